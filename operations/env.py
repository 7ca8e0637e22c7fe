"""`kconv env`."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import RequestInvalid
from ..installed import LIBRARIES, version_of
from ..lines import Facts, Part, Result
from ..options import Name, option
from .base import Context, Operation

# Their values may hold a name, an address or a token, so only whether they are set is shown.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE", "HF_TOKEN", "HTTPS_PROXY", "KCONV_CACHE",
    "OMP_NUM_THREADS", "WORLD_SIZE",
)  # fmt: skip
SAY = "from importlib.metadata import distributions as d; print(*{x.name.lower() + '=' + x.version for x in d()})"


@dataclass(frozen=True, repr=False)
class Environment(Result):
    """What a bug report needs, without paths, names or tokens of the user.

    Attributes:
        kconv: its version, with the commit if it runs from a clone.
        python: version, operating system and processor type.
        libraries: version of each library that a result depends on; None if it is not installed.
        engines: version of each engine that was found.
        machine: processor, cores (usable of all), memory in GiB, and each GPU that torch sees (None without torch).
        compiler: whether the C compiler that NVFP4 packing uses is there.
        variables: names of environment variables that are set; never their values.
    """

    kconv: str
    python: str
    libraries: dict[str, str | None]
    engines: dict[str, str]
    machine: dict[str, Any]
    compiler: bool
    variables: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)

    def lines(self) -> Iterable[Part]:
        """Return the facts, each by its name."""
        machine, facts = self.machine, {"kconv": self.kconv, "python": self.python}
        facts |= {name: number or "not installed" for name, number in self.libraries.items()}
        facts["engines"] = ", ".join(f"{name} {number}" for name, number in self.engines.items()) or "none found"
        facts["processor"] = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB of memory"
        gpus = machine["gpus"]
        facts["GPUs"] = "not known without torch" if gpus is None else "; ".join(gpus) or "none that torch sees"
        facts["C compiler"] = "yes" if self.compiler else "no"
        facts["variables set"] = ", ".join(self.variables) or "none"
        return (Facts(facts),)


class Env(Operation):
    """Show what to paste into a bug report: versions, engines and the machine.

    Shows no path, host name, token or value of an environment variable. Looks for engines next to kconv, and in the
    environments that --engine-python names.
    """

    EXAMPLES = ("kconv env", "kconv env --engine-python .engine-venv/bin/python", "kconv env --json")

    engine_python: tuple[Name, ...] = option((), "Python of an engine's environment; repeatable.", kind="file")

    def run(self, context: Context) -> Environment:
        """Return the versions and the machine.

        Raises:
            RequestInvalid: --engine-python is not a Python that runs.
        """
        from ..engines.registry import engines as known

        packages = [name for one in known() for name in one.packages]
        engines = {name: found for name in packages if (found := version_of(name))}
        for python in self.engine_python:
            installed = _packages(str(python))
            engines |= {name: installed[name] for name in packages if name in installed}
        return Environment(
            kconv=" ".join(filter(None, (version_of("kconv") or "not installed", _commit()))),
            python=f"{platform.python_version()} on {platform.platform()}",
            libraries={name: version_of(name) for name in LIBRARIES},
            engines=engines,
            machine=_machine(),
            compiler=any(shutil.which(name) for name in ("cc", "gcc", "clang")),
            variables=tuple(name for name in VARIABLES if os.environ.get(name)),
        )


def _packages(python: str) -> dict[str, str]:
    """Return the packages in another Python's environment, with their versions."""
    try:
        ran = subprocess.run([python, "-I", "-c", SAY], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise RequestInvalid(
            f"--engine-python: {python} does not run as Python",
            fix="Pass the path of a Python, e.g. .engine-venv/bin/python.",
        ) from error
    return {re.sub("[-.]", "_", name): number for name, _, number in (one.partition("=") for one in ran.stdout.split())}


def _commit() -> str:
    """Return the commit of the clone that kconv runs from; empty outside a clone."""
    here = Path(__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return ""
    try:
        ask = ["git", "-C", str(here), "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(ask, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _machine() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": _processor(),
        "cores": f"{usable} of {os.cpu_count()}",
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": _gpus(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in fields if key.strip() == "model name"), platform.machine())


def _gpus() -> list[str] | None:
    """Return the GPUs that torch sees, each with its memory; None without torch."""
    try:
        import torch
    except ModuleNotFoundError:
        return None

    if not torch.cuda.is_available():
        return []
    every = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    return [f"{one.name}, {one.total_memory / 2**30:.0f} GiB" for one in every]
