"""Changes at random, and bounds: what the programs share that fuzz kconv.

JSON is changed by its structure, weights by header, length or byte. A hang is told by the processor's time, as a loaded
machine makes every example slow; and what waits, as for the other end of a pipe, by computing nothing for minutes.
Either is a fault of its example, and the run goes on.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import struct
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

NUMBERS = (0, -1, 1, 2, 3, 7, 1 << 31, (1 << 31) - 1, 1 << 40, 1 << 63, 10**20, 10**40, 0.5, 1e-300, 1e308, -0.0)
TEXTS = (
    "",
    "a",
    "yarn",
    "U8",
    "F64",
    "BF16",
    "F4",
    "../out",
    "/etc/passwd",
    "\0",
    "é\U0001f600",
    "[/bold]",
    "x" * 9999,
)
RAW = ("NaN", "-Infinity", '"\\ud800"', "1e999", "[" * 3000 + "]" * 3000, "9" * 5000, '{"a": 1, "a": 2}')


def value(rng: random.Random) -> Any:
    """Return any value that JSON can state."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(TEXTS)
    if kind == 2:
        return rng.choice((None, True, False, [], {}))
    if kind == 3:
        return [value(rng) for _ in range(rng.randrange(4))]
    if kind == 4:
        return {rng.choice(TEXTS): value(rng) for _ in range(rng.randrange(3))}
    return rng.randrange(-2, 200)


def places(node: Any, path: tuple = ()) -> list[tuple]:
    """Return the path of everything inside a JSON value."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [found for key, inner in items for found in ((*path, key), *places(inner, (*path, key)))]


def change_json(text: bytes, rng: random.Random) -> bytes:
    """Return a JSON object with one to three of its values replaced, shifted, removed, renamed or swapped."""
    root = json.loads(text)
    raw = ""
    for _ in range(rng.randint(1, 3)):
        paths = places(root)
        if not paths:
            break
        *parents, last = rng.choice(paths)
        node = root
        for key in parents:
            node = node[key]
        old = node[last]
        match rng.randrange(6):
            case 0 if isinstance(old, int):
                node[last] = old + rng.choice((-8, -1, 1, 8))
            case 1 if isinstance(node, dict):
                del node[last]
            case 2 if isinstance(node, dict):
                node[rng.choice([*TEXTS, *node])] = node.pop(last)
            case 3:
                other = rng.choice(paths)
                near = root
                for key in other:
                    near = near[key] if isinstance(near, dict) and key in near else near
                node[last] = json.loads(json.dumps(near))
            case 4:
                raw = rng.choice(RAW)
                node[last] = "@RAW@"
            case _:
                node[last] = value(rng)
    return json.dumps(root).replace('"@RAW@"', raw).encode()


def change_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return bytes with some of them flipped, cut out or put in; near the start, where headers are, more often."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(len(data), rng.choice((16, 400, 4000))) or 1) if data else 0
        match rng.randrange(4):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at : at + rng.choice((1, 8, 1000))]
            case 2:
                data[at:at] = rng.randbytes(rng.choice((1, 8, 1000)))
            case _:
                data = data[: rng.randrange(len(data) + 1)]
    return bytes(data)


def change_weights(content: bytes, rng: random.Random) -> bytes:
    """Return a safetensors file with its header changed, its length a lie, or its bytes at random."""
    (length,) = struct.unpack("<Q", content[:8])
    match rng.randrange(4):
        case 0:
            return change_bytes(content, rng)
        case 1:
            return (
                struct.pack("<Q", rng.choice((0, 1, length - 1, length + 1, 1 << 40, 1 << 63)) % (1 << 64))
                + content[8:]
            )
        case _:
            header = change_json(content[8 : 8 + length], rng)
            return struct.pack("<Q", len(header)) + header + content[8 + length :]


def change(folder: Path, rng: random.Random) -> Path:
    """Change one or two files of a head; return the last one."""
    for _ in range(rng.choice((1, 1, 2))):
        file = rng.choice(sorted(folder.iterdir()))
        content = file.read_bytes()
        how: Callable[[bytes, random.Random], bytes] = change_bytes
        if file.suffix == ".safetensors":
            how = change_weights
        elif file.suffix == ".json" and rng.random() < 0.9:
            how = change_json
        try:
            file.write_bytes(how(content, rng))
        except (ValueError, RecursionError, struct.error):  # a file that was spoilt before
            file.write_bytes(change_bytes(content, rng))
    return file


# Bytes that a process may grow by, so that a header that claims a terabyte cannot be believed for long.
ROOM = 256 << 20
# Seconds of the processor that no example may take, of the wall clock that none may wait, and of the processor that one
# takes in that time which only has to wait for its turn.
HANGS, WAITS, TURN = 30, 300, 0.05
# By the changed file's name: what it is called in the count. What has none here is called by its suffix.
KINDS = {
    "config.json": "configs",
    "model.safetensors.index.json": "indexes",
    "kconv.json": "manifests",
    "acceptance.json": "acceptance files",
    "quoted.json": "acceptance files",
    "curve.yaml": "acceptance files",
    "report.json": "reports",
    "facts.yaml": "facts",
    "README.md": "cards",
    "LICENSE": "licenses",
    "prompts.jsonl": "prompts",
    ".safetensors": "weights",
    ".yaml": "recipes",
    ".json": "records",
}


class Hung(BaseException):
    """An example takes too long. Not an Exception, so that nothing takes it for a failure that it can name."""


def kind_of(file: Path) -> str:
    """Return what a changed file is called in the count."""
    return KINDS.get(file.name) or KINDS.get(file.suffix, "other files")


@contextmanager
def bounded(cpu: float = HANGS, wall: float = WAITS) -> Iterator[None]:
    """Raise `Hung` where the block takes more seconds of the processor, or waits for more of the wall clock at once."""

    # Of this thread alone: a stand-in's own thread looks for calls all the time.
    seen = time.thread_time()

    def end(number: int, _: object) -> None:
        nonlocal seen
        if number == signal.SIGPROF:
            raise Hung(f"it took more than {cpu:g} seconds of the processor")
        if time.thread_time() - seen < TURN:
            raise Hung(f"it waited for {wall:g} seconds")
        seen = time.thread_time()

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, cpu), (signal.ITIMER_REAL, signal.SIGALRM, wall))
    before = [signal.signal(number, end) for _, number, _ in timers]
    try:
        for timer, _, most in timers:
            signal.setitimer(timer, most, most)
        yield
    finally:
        for (timer, number, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def run_examples(work: Path, seed: str, examples: int, run_one: Callable[[str], tuple[str, str, str]]) -> None:
    """Run examples, and print what they came to as one JSON object.

    Args:
        work: the folder that an example works in, which is removed after each.
        seed: of the first; `SEED-N` repeats an example alone.
        examples: how many.
        run_one: runs an example by its seed; says what was changed, whether it was "taken", "refused" or "wrong", and
            what is wrong.
    """
    before, counts, kinds, wrong = limit_memory(), Counter[str](), Counter[str](), []
    for number in range(examples):
        name = seed if "-" in seed else f"{seed}-{number}"
        try:
            with bounded():
                kind, how, why = run_one(name)
        except Hung as hung:
            kind, how, why = "hung", "wrong", "".join(traceback.format_exception(hung))[-1500:]
        counts[how] += 1
        kinds[kind] += 1
        if why:
            wrong.append({"seed": name, "why": why})
        shutil.rmtree(work)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    print(json.dumps({**counts, "kinds": kinds, "grown": grown, "faults": wrong}))


def limit_memory() -> int:
    """Let the process grow by `ROOM` and no more; return its peak so far, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


Value = TypeVar("Value")
# Times that twice the input may take: 2 where time is linear, 4 where it is quadratic.
LINEAR = 3.0
TRIES, ATTEMPTS = 3, 5


def growth(run: Callable[[Value], object], make: Callable[[int], Value], size: int) -> float:
    """Return how many times as long an input of twice the size takes, from `size` to four times that.

    Args:
        run: what is measured.
        make: returns its input of a size; not measured.
        size: the smallest.
    """
    small, large = make(size), make(4 * size)
    found = float("inf")
    # Of this thread's own time, and the best of several: what else runs can only slow it down.
    for _ in range(ATTEMPTS):
        try:
            with bounded(cpu=3):
                found = min(found, (_least(run, large) / _least(run, small)) ** 0.5)
        except Hung:
            return float("inf")
        if found < LINEAR:
            break
    return found


def _least(run: Callable[[Value], object], value: Value) -> float:
    seconds = []
    for _ in range(TRIES):
        begun = time.thread_time()
        run(value)
        seconds.append(time.thread_time() - begun)
        # What takes this long is no noise.
        if seconds[-1] > 0.2:
            break
    return min(seconds)
