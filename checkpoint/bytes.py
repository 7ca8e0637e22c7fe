"""Tensors as bytes: streaming them out of files and into a new one.

A file is written in one pass by two threads, as hashing lets go of the interpreter's lock: one reads, hashes each
tensor, looks at its values and writes; the other hashes the file, which alone takes as long as all of these.
A tensor's digest is blake3, three times as fast as sha256, as a second sha256 would double the time of a copy.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from blake3 import blake3

from ..errors import CorruptHeader, NotACheckpoint
from .header import BITS, TensorInfo, build_header, byte_size
from .values import Scan, Values

CHUNK = 1 << 20
# Chunks that wait for the hash of the file.
AHEAD = 4
# Bytes after which the disk is asked to catch up.
WINDOW = 16 << 20
METADATA = {"format": "pt"}
# Of what a plan promised and its own steps did not keep.
REPORT = "This is a fault of kconv's own; report it with the head's config."


@dataclass(frozen=True)
class Entry:
    """A tensor to be written.

    Attributes:
        name, dtype, shape: as they will stand in the header.
        chunks: called once, when its turn comes; yields the tensor's bytes in order, whole elements at a time.
            What it yields must stay as it is while the next `AHEAD` are asked for.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[bytes | memoryview]]


@dataclass(frozen=True)
class Written:
    """A file that was written.

    Attributes:
        file: its name.
        size: its bytes.
        sha256: of the whole file, as the Hub shows it.
        digests: each tensor's blake3.
        values: what each tensor's values are like.
    """

    file: str
    size: int
    sha256: str
    digests: dict[str, str]
    values: dict[str, Values]


def stream(info: TensorInfo, chunk: int = CHUNK) -> Iterator[memoryview]:
    """Yield a tensor's bytes in order; each view is valid while the next `AHEAD` are asked for.

    Raises:
        NotACheckpoint: the file cannot be read.
        CorruptHeader: the file is shorter than its header said.
    """
    try:
        yield from _stream(info, chunk)
    except OSError as fault:
        raise NotACheckpoint(
            f"{info.file.name} cannot be read: {fault.strerror}",
            where=info.file,
            fix="Check the disk, then run the command again.",
        ) from fault


def _stream(info: TensorInfo, chunk: int) -> Iterator[memoryview]:
    needed = -(-info.size // chunk)
    ring = [memoryview(bytearray(min(chunk, info.size))) for _ in range(min(needed, AHEAD + 1))]
    with info.file.open("rb") as file:
        file.seek(info.begin)
        for turn in range(needed):
            left = info.size - turn * chunk
            view = ring[turn % len(ring)][:left]
            count = file.readinto(view)
            if count < len(view):
                raise CorruptHeader(
                    f"{info.file.name} ended {left - count:,} bytes before the end of {info.name}",
                    where=info.file,
                    fix="The file changed while it was read; fetch it again.",
                )
            yield view


def digest(info: TensorInfo) -> str:
    """Return the blake3 of a tensor's bytes, as 64 hex digits."""
    tensor = blake3()
    for chunk in stream(info):
        tensor.update(chunk)
    return tensor.hexdigest()


def file_digest(file: Path) -> str:
    """Return the sha256 of a whole file, as the Hub shows it for LFS files."""
    with file.open("rb") as stream_:
        return hashlib.file_digest(stream_, "sha256").hexdigest()


def write_safetensors(
    file: Path,
    entries: Iterable[Entry],
    *,
    check: Callable[[str, Values], None] = lambda name, values: None,
    advance: Callable[[int], None] = lambda count: None,
) -> Written:
    """Write one safetensors file in a single pass, digesting on the way.

    The order is by falling dtype width, then by name, so that every tensor is aligned to its dtype.

    Args:
        file: the file to make; it must not exist.
        entries: what to write; memory stays at a few chunks whatever their sizes.
        check: called when a tensor is through, with its name and what its values are like; may raise.
        advance: called with the number of bytes taken up since the last call.

    Raises:
        CorruptHeader: an entry yields another number of bytes than its dtype and shape say.
        OSError: the file cannot be written.
    """
    ordered = sorted(entries, key=lambda e: (-BITS[e.dtype], e.name))
    header = build_header([(e.name, e.dtype, e.shape) for e in ordered], METADATA)
    whole = hashlib.sha256(header)
    digests: dict[str, str] = {}
    values: dict[str, Values] = {}
    waiting: deque[Future[None]] = deque()
    with file.open("xb", buffering=0) as out, ThreadPoolExecutor(1) as other:
        sink = _Sink(out)
        sink.write(header)
        for entry in ordered:
            tensor, scan, count = blake3(), Scan(entry.dtype), 0
            for chunk in _cut(entry.chunks()):
                if len(chunk) * 8 % BITS[entry.dtype]:
                    raise CorruptHeader(
                        f"{entry.name} yielded {len(chunk):,} bytes, which is not a whole number of elements",
                        where=file,
                        fix=REPORT,
                    )
                if len(waiting) == AHEAD:
                    waiting.popleft().result()
                waiting.append(other.submit(whole.update, chunk))
                tensor.update(chunk)
                scan.update(chunk)
                sink.write(chunk)
                count += len(chunk)
                advance(len(chunk))
            if count != byte_size(entry.dtype, entry.shape):
                raise CorruptHeader(
                    f"{entry.name} yielded {count:,} bytes, but its shape needs another number", where=file, fix=REPORT
                )
            digests[entry.name], values[entry.name] = tensor.hexdigest(), scan.result()
            check(entry.name, values[entry.name])
    return Written(file.name, sink.size, whole.hexdigest(), digests, values)


def _cut(chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for chunk in chunks:
        view = memoryview(chunk)
        for begin in range(0, len(view), CHUNK):
            yield view[begin : begin + CHUNK]


class _Sink:
    """A new file that goes to its disk while it grows, so that little is left to flush at the end.

    What has reached the disk is dropped from the page cache: it is not read again here, and would push out what is.
    """

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._asked = 0
        self.size = 0

    def write(self, chunk: bytes | memoryview) -> None:
        """Append a chunk."""
        view = memoryview(chunk)
        while view:
            count = self._file.write(view)
            self.size += count
            view = view[count:]
        if self.size - self._asked >= WINDOW and hasattr(os, "posix_fadvise"):  # macOS has none
            # DONTNEED starts writing what is dirty, without waiting, and drops what is clean:
            # https://github.com/torvalds/linux/blob/05f6d02521d4c7a656c5135d6d81c345ce531ac0/mm/fadvise.c#L116
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            self._asked = self.size
