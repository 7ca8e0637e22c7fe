"""The machine that a benchmark runs on."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

KCONV = Path(sys.executable).parent / "kconv"
BLOCK = 64 << 20


@dataclass(frozen=True)
class Run:
    """A program, timed: seconds of the wall clock and of the processors, and the peak resident memory in MiB."""

    wall: float
    cpu: float
    peak: float


@dataclass(frozen=True)
class Spent:
    """Seconds on the wall, and of the processor, which a busy machine lengthens less."""

    wall: float
    processor: float

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.wall + other.wall, self.processor + other.processor)

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.wall - other.wall, self.processor - other.processor)


def clock() -> Spent:
    """Return the time, and the processor time of all programs that were started here and have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Spent(time.perf_counter(), children.ru_utime + children.ru_stime)


def processor() -> str:
    """Return what the processor is called."""
    fields = (text.partition(":") for text in Path("/proc/cpuinfo").read_text().splitlines())
    return next((value.strip() for key, _, value in fields if key.strip() == "model name"), platform.machine())


def memory() -> float:
    """Return how much memory there is, in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def describe(folder: Path) -> str:
    """Say what a benchmark ran on whose files lie in a folder."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True).stdout.strip()
    about = f"{os.cpu_count()} cores of {processor()}, {memory():.0f} GiB of memory, {kind}"
    return f"{about}, Linux {platform.release()}"


def timed(command: list[str], variables: Mapping[str, str] | None = None) -> Run:
    """Run a command to its end."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **(variables or {})})
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"error: {' '.join(command[:2])} ended with {process.returncode}")
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of its own: Linux counts a parent's peak memory into that of what it starts."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
        return other.submit(function, *arguments).result()


def warm(*files: Path) -> None:
    """Read files once, so that they are in the page cache as far as there is room."""
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.read(BLOCK):
                pass


def cool(*files: Path) -> None:
    """Drop files that are on their disk already from the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
