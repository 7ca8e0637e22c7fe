"""Checkpoints changed at random: a folder's JSON by its structure, its weights by header, length or byte."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
