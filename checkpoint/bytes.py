"""Tensors as bytes: streaming them out of files and into a new one. What belongs here: no torch, no meaning."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import CorruptHeader
from .header import BITS, TensorInfo, build_header, byte_size

CHUNK = 4 << 20
METADATA = {"format": "pt"}


@dataclass(frozen=True)
class Entry:
    """A tensor to be written.

    Attributes:
        name, dtype, shape: as they will stand in the header.
        chunks: called once, when its turn comes; yields the tensor's bytes in order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[bytes | memoryview]]


@dataclass(frozen=True)
class Written:
    """A file that was written: its sha256 as the Hub shows it, its size, and each tensor's sha256."""

    file: str
    size: int
    sha256: str
    digests: dict[str, str]


def stream(info: TensorInfo, chunk: int = CHUNK) -> Iterator[memoryview]:
    """Yield a tensor's bytes in order; each view is valid until the next is asked for.

    Raises:
        CorruptHeader: the file is shorter than its header said.
    """
    buffer = bytearray(min(chunk, max(info.size, 1)))
    view = memoryview(buffer)
    with info.file.open("rb", buffering=0) as file:
        file.seek(info.begin)
        left = info.size
        while left:
            count = file.readinto(view[: min(left, len(buffer))])
            if not count:
                raise CorruptHeader(
                    f"{info.file.name} ended {left:,} bytes before the end of {info.name}",
                    where=info.file,
                    fix="The file changed while it was read; fetch it again.",
                )
            left -= count
            yield view[:count]


def digest(info: TensorInfo) -> str:
    """Return the sha256 of a tensor's bytes, as 64 hex digits."""
    sha = hashlib.sha256()
    for chunk in stream(info):
        sha.update(chunk)
    return sha.hexdigest()


def file_digest(file: Path) -> str:
    """Return the sha256 of a whole file, as the Hub shows it for LFS files."""
    with file.open("rb") as stream_:
        return hashlib.file_digest(stream_, "sha256").hexdigest()


def write_safetensors(file: Path, entries: Iterable[Entry]) -> Written:
    """Write one safetensors file in a single pass, digesting on the way.

    The order is by falling dtype width, then by name, so that every tensor is aligned to its dtype.

    Args:
        file: the file to make; it must not exist.
        entries: what to write; memory stays at one chunk whatever their sizes.

    Raises:
        CorruptHeader: an entry yields another number of bytes than its dtype and shape say.
        OSError: the file cannot be written.
    """
    ordered = sorted(entries, key=lambda e: (-BITS[e.dtype], e.name))
    header = build_header([(e.name, e.dtype, e.shape) for e in ordered], METADATA)
    whole, digests, size = hashlib.sha256(header), {}, len(header)
    with file.open("xb", buffering=0) as out:
        out.write(header)
        for entry in ordered:
            sha, count = hashlib.sha256(), 0
            for chunk in entry.chunks():
                _write_all(out, chunk)
                sha.update(chunk)
                whole.update(chunk)
                count += len(chunk)
            if count != byte_size(entry.dtype, entry.shape):
                raise CorruptHeader(f"{entry.name} yielded {count:,} bytes, not what its shape says", where=file)
            digests[entry.name] = sha.hexdigest()
            size += count
    return Written(file.name, size, whole.hexdigest(), digests)


def _write_all(out, chunk: bytes | memoryview) -> None:
    view = memoryview(chunk)
    while view:
        view = view[out.write(view) :]
