"""Safetensors files made by hand, so that they can lie: header and data put together without any library."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def entry(dtype: str, shape: list, begin: int, end: int) -> dict[str, Any]:
    """Return one tensor's header entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


# A sound file.
GOOD = {
    "__metadata__": {"format": "pt"},
    "a": entry("F32", [2, 3], 0, 24),
    "b": entry("BF16", [4], 24, 32),
    "empty": entry("I64", [0, 7], 32, 32),
    "scalar": entry("BOOL", [], 32, 33),
}
DATA = bytes(range(33))


def write_raw(
    file: Path, header: dict[str, Any] | bytes, data: bytes = b"", *, length: int | None = None, space: str = " "
) -> Path:
    """Write a file from a header, as an object or as its very bytes, and data.

    `length` is what the file claims; `space` stands behind a header's commas and colons, where libraries write nothing.
    """
    separators = f",{space}", f":{space}"
    text = header if isinstance(header, bytes) else json.dumps(header, separators=separators).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file
