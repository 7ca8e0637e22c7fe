"""C sources of this package made ready to call.

Without a compiler there is None, and whoever asked has a slower way; what was compiled is trusted only after it
agreed with that way.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC")
SECONDS = 120


def load_native(source: str) -> ctypes.CDLL | None:
    """Return a C source of this package as a library, compiled at its first use on this kind of machine.

    Args:
        source: the file's name, e.g. "int4.c".

    Returns:
        The library; None where there is no compiler, or the cache cannot be written, or KCONV_NATIVE=0.
    """
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or ""]
    if not compiler[0] or os.environ.get("KCONV_NATIVE") == "0":
        return None
    text = (Path(__file__).parent / source).read_text()
    stamp = hashlib.sha256("\0".join([text, *compiler, *FLAGS, _machine()]).encode()).hexdigest()[:16]
    library = _cache() / f"{source.removesuffix('.c')}-{stamp}.so"
    try:
        if not library.exists():
            _compile(compiler, text, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError):
        return None


def _compile(compiler: list[str], text: str, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source, made = Path(folder, "source.c"), Path(folder, "made.so")
        source.write_text(text)
        subprocess.run(
            [*compiler, *FLAGS, "-o", str(made), str(source)], check=True, capture_output=True, timeout=SECONDS
        )
        made.replace(library)  # whole or not at all, as another process may be at it too


def _cache() -> Path:
    return Path(os.environ.get("KCONV_CACHE") or Path.home() / ".cache" / "kconv") / "native"


def _machine() -> str:
    """Name the kind of processor: -march=native must not be run on another one that shares the cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()} {flags}"
