"""What the programs that change things at random share: bounds of memory and time, and the count of examples."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

# Bytes that a process may grow by, so that a header that claims a terabyte cannot be believed for long.
ROOM = 256 << 20
HANGS = 60  # seconds


def run_examples(work: Path, seed: str, examples: int, run_one: Callable[[str], tuple[str, str]]) -> None:
    """Run examples, and print what they came to as one JSON object.

    Args:
        work: the folder that an example works in, which is removed after each.
        seed: of the first; `SEED-N` repeats an example alone.
        examples: how many.
        run_one: runs an example by its seed, and says whether it was "taken", "refused" or "wrong", and what is wrong.
    """
    before, counts, wrong = limit_memory(), Counter[str](), []
    for number in range(examples):
        name = seed if "-" in seed else f"{seed}-{number}"
        signal.alarm(HANGS)
        how, why = run_one(name)
        signal.alarm(0)
        counts[how] += 1
        if why:
            wrong.append({"seed": name, "why": why})
        shutil.rmtree(work)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    print(json.dumps({**counts, "grown": grown, "faults": wrong}))


def limit_memory() -> int:
    """Let the process grow by `ROOM` and no more; return its peak so far, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
