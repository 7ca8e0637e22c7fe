"""Tensors as bytes: stream them out of files and into a new one, and read each file once for everything needed.

Two threads write a file in one pass, since hashing releases the interpreter's lock: one reads, hashes each tensor,
checks its values and writes; the other hashes the whole file, which takes as long as everything else together.
Reading works the same way. Several files are read in parallel, and so are the tensors of a file whose sha256 is not
needed. A tensor's digest is blake3, three times as fast as sha256: a second sha256 would double the time of a copy.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from itertools import cycle, groupby
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Self

from blake3 import blake3

from ..errors import CorruptHeader, NotACheckpoint
from .header import BITS, TensorInfo, build_header, byte_size
from .values import Scan, Values, to_floats

if TYPE_CHECKING:
    import numpy as np

CHUNK = 1 << 20
# Chunks that may wait for the file's hash.
AHEAD = 4
# Bytes between requests to flush to disk.
WINDOW = 16 << 20
# Bytes of tensors that one thread reads in a row when several threads read one file.
SHARE = 64 << 20
METADATA = {"format": "pt"}
# What numpy calls the dtypes of maps and masks.
INTEGERS = {"BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
# Rows of a matrix that are read at once.
ROWS = 1024
# For errors in kconv's own plan.
REPORT = "This is a bug in kconv; report it with the head's config."


@dataclass(frozen=True)
class Entry:
    """A tensor to be written.

    Attributes:
        chunks: called once, when the tensor's turn comes; yields its bytes in order, in whole elements. Each chunk must
        stay unchanged while the next `AHEAD` are requested.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[bytes | memoryview]]


@dataclass(frozen=True)
class Written:
    """A file that was written.

    Attributes:
        size: in bytes.
        sha256: of the whole file, as the Hub shows it.
        digests: each tensor's blake3.
    """

    file: str
    size: int
    sha256: str
    digests: dict[str, str]
    values: dict[str, Values]


@dataclass(frozen=True)
class Wanted:
    """What to compute from one file, whose bytes are read once.

    Attributes:
        whole: whether to compute the sha256 of the whole file.
        digests: the tensors, or parts of tensors, to hash with blake3.
        values: the tensors whose values to check.
    """

    file: Path
    whole: bool = False
    digests: Sequence[TensorInfo] = ()
    values: Sequence[TensorInfo] = ()


def stream(info: TensorInfo, chunk: int = CHUNK) -> Iterator[memoryview]:
    """Yield a tensor's bytes in order; each view stays valid while the next `AHEAD` are requested.

    Raises:
        NotACheckpoint: the file cannot be read.
        CorruptHeader: the file is shorter than its header said.
    """
    needed = -(-info.size // chunk)
    ring = cycle(memoryview(bytearray(min(chunk, info.size))) for _ in range(min(needed, AHEAD + 1)))
    with _readable(info.file), info.file.open("rb", buffering=0) as file:
        yield from _exactly(file, info, ring)


@contextmanager
def _readable(file: Path) -> Generator[None]:
    try:
        yield
    except OSError as fault:
        raise NotACheckpoint(
            f"{file.name} cannot be read: {fault.strerror}",
            where=file,
            fix="Check the disk, then run the command again.",
        ) from fault


def _exactly(file: FileIO, info: TensorInfo, ring: Iterator[memoryview]) -> Iterator[memoryview]:
    left = info.size
    for view in _pieces(file, info.begin, info.begin + info.size, ring):
        left -= len(view)
        yield view
    if left:
        raise CorruptHeader(
            f"{info.file.name} ended {left:,} bytes before the end of {info.name}",
            where=info.file,
            fix="The file changed while kconv read it; fetch it again.",
        )


def _pieces(file: FileIO, begin: int, end: int, ring: Iterator[memoryview]) -> Iterator[memoryview]:
    """Yield the bytes from `begin` to `end`, or to the end of the file if that comes first."""
    file.seek(begin)
    while begin < end:
        view = next(ring)
        view = view[: min(len(view), end - begin)]
        count = 0
        while count < len(view) and (taken := file.readinto(view[count:])):
            count += taken
        if count:
            yield view[:count]
        if count < len(view):
            return
        begin += count


def read_floats(info: TensorInfo, rows: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
    """Read a BF16, F16 or F32 tensor as float32, without torch: all of it, or these rows of a matrix in this order."""
    if rows is None:
        return to_floats(b"".join(map(bytes, stream(info))), info.dtype).reshape(info.shape)
    return to_floats(row_bytes(info, rows).data, info.dtype).reshape(len(rows), -1)


def read_integers(info: TensorInfo) -> np.ndarray:
    """Read a tensor of integers or of true and false, without torch.

    Raises:
        NotACheckpoint: the file cannot be read.
        CorruptHeader: the file is shorter than its header said.
    """
    import numpy as np

    return np.frombuffer(b"".join(map(bytes, stream(info))), INTEGERS[info.dtype]).reshape(info.shape)


def first_bytes(tensors: Iterable[TensorInfo], count: int) -> dict[str, bytes]:
    """Read the first bytes of many tensors, at most `count` of each, by their names.

    Raises:
        NotACheckpoint: a file cannot be read.
    """
    of_file: dict[Path, list[TensorInfo]] = {}
    for info in tensors:
        of_file.setdefault(info.file, []).append(info)
    found: dict[str, bytes] = {}
    for file, own in of_file.items():
        with _readable(file), file.open("rb", buffering=0) as opened:
            for info in own:
                opened.seek(info.begin)
                found[info.name] = opened.read(min(count, info.size))
    return found


# Bytes of each tensor, and the most tensors of one kind: all of its layers, and some of its experts.
SAMPLED, MOST = 64, 256


@dataclass(frozen=True)
class WeightsSample:
    """What tells weights from others, however their files are split.

    Attributes:
        form: blake3 of the tensors' names, dtypes and shapes.
        weights: blake3 of each tensor's first bytes, or of up to 256 of a kind that has more: LoRA, and training that
            freezes the ends, leave embedding, norms and output matrix as they are. It says nothing about other forms.
    """

    form: str
    weights: str


def sample_weights(tensors: Iterable[TensorInfo]) -> WeightsSample:
    """Read what tells weights from others; a checkpoint of 250,000 tensors has a few thousand reads.

    Raises:
        NotACheckpoint: a file cannot be read.
    """
    form, weights = blake3(), blake3()
    kinds: dict[str, list[TensorInfo]] = {}
    for info in sorted(tensors):
        form.update(repr((info.name, info.dtype, info.shape)).encode())
        kinds.setdefault(info.kind, []).append(info)
    looked_at = sorted(info for kind in kinds.values() for info in kind[:: -(-len(kind) // MOST)])
    first = first_bytes(looked_at, SAMPLED)
    for info in looked_at:
        weights.update(first[info.name])
    return WeightsSample(form.hexdigest(), weights.hexdigest())


def row_bytes(info: TensorInfo, rows: Sequence[int] | np.ndarray) -> np.ndarray:
    """Read some rows of a matrix, without the rest: [n, bytes of a row], row k being the matrix's row `rows[k]`.

    Raises:
        IndexError: the matrix has no such row; what lies there is another tensor's.
    """
    import numpy as np

    width = info.size // info.shape[0]
    found, done = np.empty((len(rows), width), np.uint8), 0
    if len(rows) and not 0 <= min(rows) <= max(rows) < info.shape[0]:
        raise IndexError(f"{info.name} has rows 0 to {info.shape[0] - 1}, not {min(rows)} to {max(rows)}")
    with _readable(info.file), info.file.open("rb", buffering=0) as file:
        # Consecutive rows are read at once.
        for _, run in groupby(enumerate(map(int, rows)), lambda at: at[1] - at[0]):
            (_, first), *more = run
            count = 1 + len(more)
            part = info._replace(begin=info.begin + first * width, size=count * width)
            for _ in _exactly(file, part, iter([found[done : done + count].data.cast("B")])):
                pass
            done += count
    return found


def same_bytes(one: TensorInfo, other: TensorInfo) -> bool:
    """Return whether two tensors have one dtype, one shape and the same bytes; 0.0 and -0.0 differ, NaN is itself."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(a == b for a, b in zip(stream(one), stream(other), strict=True))


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


class _Sha256:
    """The sha256 of a file, computed by a second thread; chunks must stay unchanged while the next `AHEAD` come."""

    def __init__(self) -> None:
        self._hash, self._other = hashlib.sha256(), ThreadPoolExecutor(1)
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._other.shutdown()

    def update(self, chunk: bytes | memoryview) -> None:
        if len(self._waiting) == AHEAD:
            self._waiting.popleft().result()
        self._waiting.append(self._other.submit(self._hash.update, chunk))

    def hexdigest(self) -> str:
        for one in self._waiting:
            one.result()
        return self._hash.hexdigest()


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Span:
    """Consecutive bytes of a file, and what to compute from them.

    Attributes:
        info: the tensor that these bytes belong to; errors name it.
        place: the offset and the number of bytes.
        scanned: the shapes and dtypes for the value check.
        parts: spans inside this one that are hashed on their own.
    """

    def __init__(self, info: TensorInfo) -> None:
        self.info, self.place, self.end = info, (info.begin, info.size), info.begin + info.size
        self.hashed = False
        self.scanned: set[tuple[str, tuple[int, ...]]] = set()
        self.parts: list[_Span] = []

    def holds(self, other: _Span) -> bool:
        """Return whether another span, which begins no earlier, lies inside this one."""
        return other.end <= self.end and not other.scanned


@dataclass
class _Seen:
    """Results for a file: its sha256, the blake3 of spans, and the values of tensors."""

    sha256: str = ""
    digests: dict[tuple[int, int], str] = field(default_factory=dict)
    values: dict[tuple[int, int, str, tuple[int, ...]], Values] = field(default_factory=dict)


class Look:
    """Read files once, in the background, and compute everything wanted from them.

    A file whose sha256 is wanted is read by one thread, which also checks its tensors, and hashed by another. The
    tensors of other files are shared out among threads. As many files are read at once as there are processors, each
    through a few chunks. A read error is raised when a caller asks for a result that it prevented.
    """

    def __init__(self, wanted: Iterable[Wanted]) -> None:
        together: dict[Path, list[Wanted]] = {}
        for one in wanted:
            together.setdefault(one.file, []).append(one)
        self._left = Event()
        self._pool = ThreadPoolExecutor(processors())
        self._files: dict[Path, Future[_Seen]] = {}
        self._spans: dict[Path, dict[tuple[int, int], Future[_Seen]]] = {}
        # Files that are hashed whole take longest.
        for file, ones in sorted(together.items(), key=lambda item: not any(one.whole for one in item[1])):
            whole, spans = any(one.whole for one in ones), _spans(ones)
            places = self._spans[file] = {}
            for share in [spans] if whole else _shares(spans):
                found = self._files[file] = self._pool.submit(self._read, file, share, whole)
                places |= {one.place: found for span in share for one in (span, *span.parts)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop reading; no more results are needed."""
        self._left.set()
        self._pool.shutdown(cancel_futures=True)

    def sha256(self, file: Path) -> str:
        """Return the sha256 of a file when it has been read; a file that was not requested is read now."""
        if file not in self._files:
            with _readable(file):
                return file_digest(file)
        return self._files[file].result().sha256

    def digest(self, info: TensorInfo) -> str:
        """Return the blake3 of a tensor, or a part of one; see `sha256`."""
        place = info.begin, info.size
        return self._spans[info.file][place].result().digests[place]

    def values(self, info: TensorInfo) -> Values:
        """Return the summary of a tensor's values; see `sha256`."""
        place = info.begin, info.size
        return self._spans[info.file][place].result().values[*place, info.dtype, info.shape]

    def _read(self, file: Path, spans: Sequence[_Span], whole: bool) -> _Seen:
        seen, at = _Seen(), 0
        ring = cycle([memoryview(bytearray(CHUNK)) for _ in range(AHEAD + 1 if whole else 1)])
        with _readable(file), file.open("rb", buffering=0) as opened, _Sha256() as hashed:

            def take_up(begin: int, view: memoryview) -> None:
                nonlocal at
                if self._left.is_set():
                    raise CancelledError
                if whole and begin + len(view) > at:
                    hashed.update(view[max(at - begin, 0) :])
                    at = begin + len(view)

            def skip(end: int) -> None:
                for view in _pieces(opened, at, end, ring) if whole else ():
                    take_up(at, view)

            for span in spans:
                skip(span.info.begin)
                place = span.info.begin
                hashes = [(one, blake3()) for one in (span, *span.parts) if one.hashed]
                scans = [(shape, Scan(*shape)) for shape in span.scanned]
                for view in _exactly(opened, span.info, ring):
                    take_up(place, view)
                    for one, digest_ in hashes:
                        begin = max(one.info.begin - place, 0)
                        digest_.update(view[begin : max(one.end - place, begin)])
                    for _, scan in scans:
                        scan.update(view)
                    place += len(view)
                seen.digests |= {one.place: digest_.hexdigest() for one, digest_ in hashes}
                seen.values |= {(*span.place, *shape): scan.result() for shape, scan in scans}
            skip(sys.maxsize)
            seen.sha256 = hashed.hexdigest() if whole else ""
        return seen


def _spans(wanted: Iterable[Wanted]) -> list[_Span]:
    """Return what is wanted of a file by position, with parts nested inside the spans that contain them."""
    spans: dict[tuple[int, int], _Span] = {}
    for one in wanted:
        for info in one.digests:
            spans.setdefault((info.begin, info.size), _Span(info)).hashed = True
        for info in one.values:
            spans.setdefault((info.begin, info.size), _Span(info)).scanned.add((info.dtype, info.shape))
    found: list[_Span] = []
    for span in sorted(spans.values(), key=lambda span: (span.info.begin, -span.end)):
        if found and found[-1].holds(span):
            found[-1].parts.append(span)
        else:
            found.append(span)
    return found


def _shares(spans: Sequence[_Span]) -> list[list[_Span]]:
    """Split what is wanted of a file into shares, each read in one go."""
    shares: list[list[_Span]] = []
    left = 0
    for span in spans:
        if left <= 0:
            shares.append([])
            left = SHARE
        shares[-1].append(span)
        left -= span.info.size
    return shares


def write_safetensors(
    file: Path,
    entries: Iterable[Entry],
    *,
    check: Callable[[str, Values], None] = lambda name, values: None,
    advance: Callable[[int], None] = lambda count: None,
) -> Written:
    """Write one safetensors file in a single pass, hashing on the way.

    Tensors are ordered by falling dtype width, then by name, so that each is aligned to its dtype.

    Args:
        entries: what to write; memory use is a few chunks, whatever the sizes.
        check: called after each tensor with its name and the summary of its values; may raise.
        advance: called with the number of bytes written since the last call.

    Raises:
        CorruptHeader: an entry yields a different number of bytes than its dtype and shape need.
        OSError: the file cannot be written.
    """
    ordered = sorted(entries, key=lambda e: (-BITS[e.dtype], e.name))
    header = build_header([(e.name, e.dtype, e.shape) for e in ordered], METADATA)
    digests: dict[str, str] = {}
    values: dict[str, Values] = {}
    with file.open("xb", buffering=0) as out, _Sha256() as whole:
        sink = _Sink(out)
        whole.update(header)
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
                whole.update(chunk)
                tensor.update(chunk)
                scan.update(chunk)
                sink.write(chunk)
                count += len(chunk)
                advance(len(chunk))
            if count != byte_size(entry.dtype, entry.shape):
                raise CorruptHeader(
                    f"{entry.name} yielded {count:,} bytes, but its shape needs another count", where=file, fix=REPORT
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
    """A new file that is flushed to disk while it grows, so that little is left to flush at the end.

    Flushed bytes are dropped from the page cache: kconv does not read them again, and they would evict bytes that it
    does read.
    """

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._asked = 0
        self.size = 0

    def write(self, chunk: bytes | memoryview) -> None:
        view = memoryview(chunk)
        while view:
            count = self._file.write(view)
            self.size += count
            view = view[count:]
        if self.size - self._asked >= WINDOW and hasattr(os, "posix_fadvise"):  # macOS has none
            # DONTNEED starts writing dirty pages, without waiting, and drops clean ones:
            # https://github.com/torvalds/linux/blob/05f6d02521d4c7a656c5135d6d81c345ce531ac0/mm/fadvise.c#L116
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            self._asked = self.size
