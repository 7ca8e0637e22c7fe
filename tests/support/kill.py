"""Kills conversions, at each system call and at random moments, and prints what each kill left. Run as a program.

What a kill left beside the output is shown to kconv's readers, and as an engine reads it: a folder with a config is a
checkpoint, so if it can be read at all it must be whole by then.

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

from click.testing import CliRunner
from safetensors import SafetensorError, safe_open

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import MANIFEST, verify
from kconv.checkpoint.source import resolve
from kconv.cli import main as kconv
from kconv.convert.execute import execute
from kconv.convert.plan import Plan, plan
from kconv.convert.read import read_head
from kconv.engines import by_name
from kconv.errors import KconvError

CALLS = {"open", "write", "fsync", "mkdir", "rename", "close", "rmdir", "unlink"}
RANDOM_KILLS = 20
READERS: dict[str, Callable[[Path], object]] = {
    "open_checkpoint": open_checkpoint,
    "verify": verify,
    "resolve": lambda folder: resolve(str(folder)).open_weights(),
}
COMMANDS = ("inspect {}", "vocab {}", "verify {}", "to-vllm {} nowhere --dry-run")


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


def accepted_by(folder: Path) -> list[str]:
    """Return which of kconv's readers and commands take a folder for a head."""
    takers = []
    for name, read in READERS.items():
        try:
            read(folder)
            takers.append(name)
        except KconvError:
            pass
    for command in COMMANDS:
        if CliRunner().invoke(kconv, command.format(folder).split()).exit_code == 0:
            takers.append(command)
    return takers


def seen_by_engines(folder: Path, whole: dict[str, bytes]) -> str:
    """Say what a reader that looks for a config and weights finds: "nothing", the "whole" head, or a "broken" one."""
    if not (folder / "config.json").exists():
        return "nothing"
    try:
        with safe_open(folder / "model.safetensors", "np") as weights:
            list(weights.keys())
        json.loads((folder / "config.json").read_text())
    except (SafetensorError, OSError, ValueError):
        return "nothing"  # a reader stops, as at a config that is still empty
    same = all((folder / name).read_bytes() == content for name, content in whole.items())
    return "whole" if same else "broken"


def look(root: Path, out: Path, whole: dict[str, bytes]) -> dict[str, object]:
    """Say what a kill left, and clear it away."""
    left = {
        "out": [path.name for path in out.iterdir()] if out.exists() else None,
        "holds": bool(verify(out)) if out.exists() else None,
        "beside": [path.name for path in root.iterdir() if path != out],
        "accepted": [reader for path in root.iterdir() if path != out for reader in accepted_by(path)],
        "engines": [seen_by_engines(path, whole) for path in root.iterdir() if path != out],
    }
    for path in root.iterdir():
        shutil.rmtree(path)
    return left


def convert_undisturbed(decided: Plan, out: Path) -> tuple[dict[str, bytes], float]:
    """Convert without a kill; return the files but the manifest, and how many seconds it took."""
    begin = time.monotonic()
    os.waitpid(fork(decided, out, lambda: None), 0)
    seconds = time.monotonic() - begin
    whole = {path.name: path.read_bytes() for path in out.iterdir() if path.name != MANIFEST}
    shutil.rmtree(out)
    return whole, seconds


def main(small: Path, large: Path, root: Path, seed: int) -> None:
    """Print one JSON line for each kill, and one for the conversion that was left to end."""
    decided, out = plan(read_head(open_checkpoint(small)), by_name("trtllm")), root / "out"
    whole, _ = convert_undisturbed(decided, out)
    for count in range(10_000):
        _, status = os.waitpid(fork(decided, out, die_at(count)), 0)
        killed = os.WIFSIGNALED(status)
        print(json.dumps({"kill": f"call {count}" if killed else "none", **look(root, out, whole)}))
        if not killed:
            break
    decided = plan(read_head(open_checkpoint(large)), by_name("trtllm"))
    whole, seconds = convert_undisturbed(decided, out)
    moments = random.Random(seed)
    for _ in range(RANDOM_KILLS):
        child = fork(decided, out, lambda: None)
        time.sleep(moments.uniform(0, 1.2) * seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print(json.dumps({"kill": "random", **look(root, out, whole)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
