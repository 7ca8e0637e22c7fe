"""Safetensors headers, read without trusting them.

Format: https://github.com/huggingface/safetensors/blob/v0.6.2/README.md#format
"""

from __future__ import annotations

import json
import math
import re
import struct
import sys
from itertools import repeat
from operator import sub
from pathlib import Path
from typing import NamedTuple, Protocol

from ..errors import CorruptHeader, NotACheckpoint
from .schema import MAX_DIGITS, MAX_JSON_VALUES, Json, parse_object, refuse_many

# https://github.com/huggingface/safetensors/blob/v0.6.2/safetensors/src/tensor.rs#L12
MAX_HEADER_BYTES = 100_000_000
# What may be in place of a checkpoint's file, by its first bytes.
IMPOSTORS = {
    b"version https://git-lfs": (
        "a Git LFS pointer, not the file it points to",
        "Run git lfs install, then git lfs pull; or hf download.",
    ),
    b"<": (
        "a web page or XML, not the file itself",
        "Download it again; the server may have asked for a login.",
    ),
    b"PK\x03\x04": ("a zip archive, as torch.save writes it", "Save its tensors with safetensors first."),
    b"GGUF": ("a GGUF file", "Give the checkpoint that it was made from."),
}
IMPOSTOR_BYTES = max(map(len, IMPOSTORS))
# More than any tensor library supports; multiplying a million dims would take hours.
MAX_DIMS = 64

BITS = {
    "F4": 4, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
# The dtypes of weights that kconv can compute with, by torch's names, which config.json and options use.
FLOAT_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
TORCH_NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()}

# An entry as libraries write it: its keys in this order, without spaces or escapes.
ENTRY = re.compile(
    r'"([^"\\\x00-\x1f]*)":\{"dtype":"([A-Z0-9_]*)","shape":\[((?:(?:0|[1-9][0-9]*)(?:,(?:0|[1-9][0-9]*))*)?)\],'
    r'"data_offsets":\[(0|[1-9][0-9]{0,17}),(0|[1-9][0-9]{0,17})\]\}(?:,(?=")|\}\Z)'
)
# A number of a layer or an expert in a tensor's name.
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
# Characters of an entry besides its values, including the one after it.
ENTRY_MARKS = len('"":{"dtype":"","shape":[],"data_offsets":[,]},')
FREE_TEXTS = re.compile(r'\{(?:"__metadata__":(\{[^{}]*\}),)?')


class Readable(Protocol):
    """A source of bytes, read in order."""

    def read(self, count: int, /) -> bytes:
        """Return the next `count` bytes, or fewer at the end."""
        ...


class TensorInfo(NamedTuple):
    """Where one tensor's bytes are.

    Attributes:
        name: the name on disk.
        dtype: safetensors dtype, e.g. "BF16".
        begin: absolute offset of its first byte in `file`.
        size: number of bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    size: int

    @property
    def kind(self) -> str:
        """The name without the numbers of its layer and expert, e.g. "model.layers.*.mlp.up_proj.weight"."""
        return NUMBER.sub("*", self.name)


def byte_size(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the number of bytes of a tensor; for 4-bit dtypes two elements share one."""
    return math.prod(shape) * BITS[dtype] // 8


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Parse a safetensors file's header: its tensors by name, in file order.

    Raises:
        NotACheckpoint: the file cannot be opened.
        CorruptHeader: the header is impossible: it overruns the file, repeats a name, or its
            offsets overlap, leave holes, or disagree with dtype and shape.
    """
    try:
        if not file.is_file():  # a pipe would block forever
            raise NotACheckpoint(f"{file.name} is not a file", where=file, fix="Check the path and its links.")
        with file.open("rb") as stream:
            _refuse_impostor(stream.read(IMPOSTOR_BYTES), file)
            stream.seek(0)
            return parse_header(stream, file, file.stat().st_size)
    except OSError as fault:
        denied = isinstance(fault, PermissionError)
        fix = "You may not read it: change its permissions." if denied else "Check the path and its links."
        raise NotACheckpoint(f"{file.name} cannot be opened: {fault.strerror}", where=file, fix=fix) from fault


def parse_header(stream: Readable, file: Path, file_size: int) -> dict[str, TensorInfo]:
    """Parse the header at the start of a stream; `file` may be a name on the Hub, and its size is in bytes."""
    (length,) = struct.unpack("<Q", _exactly(stream, 8, file))
    if length > min(MAX_HEADER_BYTES, file_size - 8):
        raise _corrupt(file, f"the header claims {length:,} bytes in a file of {file_size:,}")
    text = _exactly(stream, length, file)
    begin, size = 8 + length, file_size - 8 - length
    # Headers written differently, or with errors, are checked entry by entry.
    return _in_bulk(file, text, begin, size) or _check(file, _parse(file, text), data_begin=begin, data_size=size)


def build_header(entries: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """Return the leading bytes of a safetensors file: the length, then JSON padded to 8 bytes.

    Args:
        entries: (name, dtype, shape) in the order in which the data follows.
    """
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, dtype, shape in entries:
        end = offset + byte_size(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _refuse_impostor(start: bytes, file: Path) -> None:
    for mark, (what, fix) in IMPOSTORS.items():
        # Each of these, read as a header's length, exceeds the longest header allowed.
        if start.startswith(mark) and int.from_bytes(start[:8], "little") > MAX_HEADER_BYTES:
            raise CorruptHeader(f"{file.name} is {what}", where=file, fix=fix)


def _corrupt(file: Path, what: str) -> CorruptHeader:
    return CorruptHeader(
        f"{file.name} is not a whole safetensors file: {what}",
        where=file,
        fix="Fetch or export the file again; compare its sha256 with the publisher's.",
    )


def _exactly(stream: Readable, count: int, file: Path) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise _corrupt(file, f"{count:,} bytes were expected, but {len(data):,} are there")
    return data


def _parse(file: Path, text: bytes) -> dict[str, Json]:
    try:
        header = parse_object(text)
    except ValueError as fault:
        raise _corrupt(file, f"its header cannot be read: {fault}") from fault
    metadata: Json = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _corrupt(file, "its __metadata__ is not a map of strings")
    return header


def _in_bulk(file: Path, text: bytes, data_begin: int, data_size: int) -> dict[str, TensorInfo] | None:
    """Return the tensors of a valid header written the usual way; None for any other header."""
    try:
        refuse_many(text, MAX_JSON_VALUES)
        header = text.decode().rstrip(" ")
        start = FREE_TEXTS.match(header)
        if start is None or (start[1] and _parse(file, b'{"__metadata__":%b}' % start[1].encode())):
            return None
        names, dtypes, dims, firsts, lasts = zip(*ENTRY.findall(header, start.end()), strict=True)
        shapes = {one: tuple(int(dim) for dim in one.split(",") if dim) for one in set(dims)}
        if any(len(one) > MAX_DIMS or max(one, default=0) >= 10**MAX_DIGITS for one in shapes.values()):
            return None
        kinds = list(zip(dtypes, dims, strict=True))
        bits = {(dtype, one): BITS[dtype] * math.prod(shapes[one]) for dtype, one in set(kinds)}
    except (ValueError, KeyError, CorruptHeader):
        return None
    read = len(names) * ENTRY_MARKS + sum(sum(map(len, part)) for part in (names, dtypes, dims, firsts, lasts))
    begins, ends = list(map(int, firsts)), list(map(int, lasts))
    sizes = list(map(sub, ends, begins))
    spans = sorted(zip(begins, ends, strict=True))
    infos = map(
        TensorInfo, names, map(sys.intern, dtypes), map(shapes.__getitem__, dims), repeat(file),
        map(data_begin.__add__, begins), sizes,
    )  # fmt: skip
    found = dict(zip(names, infos, strict=True))
    whole = (
        start.end() + read == len(header)
        and len(found) == len(names)
        and "__metadata__" not in found
        and [8 * size for size in sizes] == list(map(bits.__getitem__, kinds))
        and [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
        and spans[-1][1] == data_size
    )
    return found if whole else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check(file: Path, header: dict[str, Json], *, data_begin: int, data_size: int) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]}:
                pass
            case _:
                raise _corrupt(file, f"the entry of {name!r} lacks dtype, shape or data_offsets")
        if dtype not in BITS:
            raise _corrupt(file, f"{name!r} has the unknown dtype {dtype!r}")
        if len(shape) > MAX_DIMS or not all(map(_is_count, [*shape, begin, end])):
            raise _corrupt(file, f"{name!r} has a dim or an offset that is not a count")
        if math.prod(shape) * BITS[dtype] != (end - begin) * 8:
            raise _corrupt(file, f"{name!r} is {dtype} {shape}, but its offsets span {end - begin:,} bytes")
        infos[name] = TensorInfo(name, dtype, tuple(shape), file, data_begin + begin, end - begin)
    at = data_begin
    for info in sorted(infos.values(), key=lambda i: (i.begin, i.size)):
        if info.begin != at:
            raise _corrupt(file, f"{info.name!r} overlaps its neighbor or leaves a hole")
        at += info.size
    if at != data_begin + data_size:
        raise _corrupt(file, f"the tensors end at byte {at:,}, but the file ends at {data_begin + data_size:,}")
    return infos
