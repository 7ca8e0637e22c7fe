"""Kills conversions, at each system call and at random moments, and prints what each kill left. Run as a program.

Usage: python kill.py SMALL LARGE ROOT SEED. One process loads torch once; each conversion is a fork of it.
The small head is killed at each call, the large one, which takes a while, at random moments.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import verify
from kconv.convert.execute import execute
from kconv.convert.layouts import by_name
from kconv.convert.plan import Plan, plan
from kconv.convert.read import read_head

CALLS = {"open", "write", "fsync", "mkdir", "rename", "close", "rmdir", "unlink"}
RANDOM_KILLS = 6


def fork(decided: Plan, out: Path, before: Callable[[], None]) -> int:
    """Convert in a child process, and return its id."""
    child = os.fork()
    if child == 0:
        before()
        execute(decided, out)
        sys.setprofile(None)
        os._exit(0)
    return child


def die_at(count: int) -> Callable[[], None]:
    """Return what makes a process kill itself just before its count-th call that changes the disk."""
    left = count

    def watch(_frame: object, event: str, called: object) -> None:
        nonlocal left
        if event == "c_call" and getattr(called, "__name__", "") in CALLS:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return lambda: sys.setprofile(watch)


def look(root: Path, out: Path) -> dict[str, object]:
    """Say what a kill left, and clear it away."""
    left = {
        "out": [path.name for path in out.iterdir()] if out.exists() else None,
        "holds": bool(verify(out)) if out.exists() else None,
        "beside": [path.name for path in root.iterdir() if path != out],
    }
    for path in root.iterdir():
        shutil.rmtree(path)
    return left


def main(small: Path, large: Path, root: Path, seed: int) -> None:
    """Print one JSON line for each kill, and one for the conversion that was left to end."""
    decided, out = plan(read_head(open_checkpoint(small)), by_name("trtllm")), root / "out"
    for count in range(10_000):
        _, status = os.waitpid(fork(decided, out, die_at(count)), 0)
        killed = os.WIFSIGNALED(status)
        print(json.dumps({"kill": f"call {count}" if killed else "none", **look(root, out)}))
        if not killed:
            break
    decided = plan(read_head(open_checkpoint(large)), by_name("trtllm"))
    begin = time.monotonic()
    os.waitpid(fork(decided, out, lambda: None), 0)
    whole = time.monotonic() - begin
    shutil.rmtree(out)
    moments = random.Random(seed)
    for _ in range(RANDOM_KILLS):
        child = fork(decided, out, lambda: None)
        time.sleep(moments.uniform(0, 1.2) * whole)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print(json.dumps({"kill": "random", **look(root, out)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
