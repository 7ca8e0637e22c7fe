"""Training rows of stored sequences: how they are cut, and the tables of them in the index of stored states.

A table is written with the states, for one row length. A process that trains with that length reads from the index the
entries, tokens and masks of its own rows alone, when their turn comes. A digest of each row covers what is read of it,
and distinguishes it from the same row of other states.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..checkpoint.bytes import Entry
from ..checkpoint.header import TensorInfo, byte_size
from ..checkpoint.tensors import entry, read_span, read_tensor
from ..errors import StatesInvalid
from .prompts import KEPT
from .states import AGAIN, INDEX, RowsRecord, SequenceRecord, StoredStates, check_size, refuse_zeros, shard_name

HELD_OUT = 0.02  # share of the samples, or of the prompts
OPEN = 64  # rows kept open for more samples while packing
LASTING = 4  # times as many rows are opened after a row at most before it is closed
FEWEST = 4  # evaluation rows; fewer mean nothing
SEQ = 4096  # tokens per row of kconv's own recipes

Span = tuple[int, int, int]
"""A stored sequence's number, its first token, and the number of tokens."""


def choose_held_out(digests: Collection[str]) -> set[str]:
    """Return the digests of the held-out prompts."""
    return set(sorted(digests)[: max(FEWEST, round(HELD_OUT * len(digests)))])


def cut_spans(
    sequences: Sequence[SequenceRecord], masks: Callable[[int], Tensor], seq: int, *, held_out: bool
) -> list[Span]:
    """Cut sequences into pieces of at most `seq` tokens, without those in which no token counts.

    Args:
        masks: returns which tokens of a sequence count, [T] bool.
        held_out: cut the evaluation sequences instead of the training sequences: those of one prompt in fifty.
    """
    chosen = choose_held_out({record.digest for record in sequences})
    spans: list[Span] = []
    for number, record in enumerate(sequences):
        if (record.digest in chosen) != held_out:
            continue
        for start, part in zip(range(0, record.length, seq), masks(number).split(seq), strict=True):
            # A draft starts after an answer's first token.
            if part[1:].any():
                spans.append((number, start, len(part)))
    return spans


def arrange(lengths: Sequence[int], seq: int, *, pack: bool) -> list[list[int]]:
    """Return which pieces, of at most `seq` tokens, go into which row: one each, or with `pack` as many as fit.

    Each goes into the first of some open rows with enough room. When a new row is needed, the fullest one is closed, or
    one that was opened many rows ago: so a row's data stays close together on disk.
    """
    if not pack:
        return [[place] for place in range(len(lengths))]
    rows: list[list[int]] = []
    # In the order in which they were opened.
    opened: list[tuple[list[int], int, int]] = []
    for place, length in enumerate(lengths):
        at = next((at for at, (_, left, _) in enumerate(opened) if left >= length), None)
        if at is not None:
            row, left, number = opened[at]
            row.append(place)
            opened[at] = row, left - length, number
            continue
        count = len(rows) + len(opened)
        if len(opened) == OPEN:
            old = count - opened[0][2] >= LASTING * OPEN
            rows.append(opened.pop(0 if old else min(range(OPEN), key=lambda at: opened[at][1]))[0])
        opened.append(([place], seq - length, count))
    return rows + [row for row, *_ in opened]


def divide(count: int, parts: int) -> list[range]:
    """Divide consecutive rows into runs of nearly equal length; if there are too few, runs share them."""
    if count < parts:
        return [range(at % count, at % count + 1) for at in range(parts)] if count else []
    cuts = [-(-count * part // parts) for part in range(parts + 1)]
    return [range(*cut) for cut in pairwise(cuts)]


Table = Literal["packed", "single", "held_out"]
TABLES: dict[Table, tuple[bool, bool]] = {"packed": (False, True), "single": (False, False), "held_out": (True, False)}
"""Each table's arguments `held_out` and `pack`."""

PIECE = 7
"""A piece: its first token in the index, its length, its shard, the shard's size in bytes, the digest of the shard's
beginning, and where its captured and its final states begin there."""
ROW = 6
"""A row: its first piece, the number of pieces, the lowest shard of it and all later rows, the highest shard of it and
all earlier ones, and two halves of a digest."""
HELD_ROWS = 256  # kept in memory, those read last
AT_ONCE = 1024  # pieces whose tokens are counted in one go
BEGINNING = 512  # bytes of a shard that name its first sequences


def table_entries(stored: StoredStates, tokens: Tensor, masks: Tensor, seq: int) -> tuple[list[Entry], RowsRecord]:
    """Return the tables of the rows of stored sequences, to be written into the index.

    Args:
        stored: the states, without an index.
        tokens: of all sequences, in order, [T] int32.
        masks: which of them count, [T] bool.
    """
    starts = np.cumsum([0, *(sequence.length for sequence in stored.sequences)])
    found: dict[str, Tensor] = {}
    for held_out in (False, True):
        spans = cut_spans(stored.sequences, lambda i: masks[starts[i] : starts[i + 1]], seq, held_out=held_out)
        pieces = _pieces(stored, spans, starts)
        for name, (of_held_out, pack) in TABLES.items():
            if of_held_out == held_out:
                rows = arrange([length for *_, length in spans], seq, pack=pack)
                own = pieces[[place for row in rows for place in row]] if rows else pieces[:0]
                found[f"{name}.pieces"] = torch.from_numpy(own)
                found[f"{name}.rows"] = _rows(_Key(stored.record.sha256, name, seq), rows, own, tokens, masks)
        if not held_out:
            found["counts"] = _count(pieces, tokens, masks, stored.record.target.vocab)
            found["prompts"] = _prompts(stored, spans)
    record = RowsRecord(
        seq=seq,
        **{name: len(found[f"{name}.rows"]) for name in TABLES},
        counted=int(found["counts"].sum()),
        counts_sha256=_sha256(found["counts"]),
        prompts_sha256=_sha256(found["prompts"]),
    )
    return [entry(name, tensor) for name, tensor in found.items()], record


def _pieces(stored: StoredStates, spans: Sequence[Span], starts: np.ndarray) -> np.ndarray:
    pieces = np.zeros((len(spans), PIECE), np.int64)
    beginnings: dict[int, int] = {}
    for row, (number, start, length) in zip(pieces, spans, strict=True):
        places = [stored.place(number, name) for name in ("aux_hidden_states", "hidden_states")]
        at = [info.begin + start * (info.size // info.shape[0]) for _, info in places]
        shard, info = places[0]
        if shard not in beginnings:
            beginnings[shard] = _beginning(info.file)
        row[:] = (starts[number] + start, length, shard, stored.shards[shard].size, beginnings[shard], *at)
    return pieces


def _rows(key: _Key, rows: Sequence[Sequence[int]], pieces: np.ndarray, tokens: Tensor, masks: Tensor) -> Tensor:
    counts = np.array([len(row) for row in rows], np.int64)
    table = np.zeros((len(rows), ROW), np.int64)
    if not len(rows):
        return torch.from_numpy(table)
    firsts, shards = np.cumsum(counts) - counts, pieces[:, 2]
    lowest, highest = (part.reduceat(shards, firsts) for part in (np.minimum, np.maximum))
    table[:, 0], table[:, 1] = firsts, counts
    table[:, 2], table[:, 3] = np.minimum.accumulate(lowest[::-1])[::-1], np.maximum.accumulate(highest)
    for number, row in enumerate(table):
        own = pieces[row[0] : row[0] + row[1]]
        parts = [(tokens[at : at + length], masks[at : at + length]) for at, length in own[:, :2].tolist()]
        row[4:] = key.digest(number, row, own, parts)
    return torch.from_numpy(table)


def _count(pieces: np.ndarray, tokens: Tensor, masks: Tensor, vocab: int) -> Tensor:
    counts = torch.zeros(vocab, dtype=torch.int64)
    for begin in range(0, len(pieces), AT_ONCE):
        some = pieces[begin : begin + AT_ONCE, :2].tolist()
        counted = [tokens[at : at + length][masks[at : at + length]] for at, length in some]
        counts += torch.cat(counted).bincount(minlength=vocab)
    return counts


def _prompts(stored: StoredStates, spans: Sequence[Span]) -> Tensor:
    """Return the leading digits of the digests of the prompts in these spans, [N, 8] uint8."""
    trained = (stored.sequences[number] for number in dict.fromkeys(number for number, *_ in spans))
    digests = sorted({d[:KEPT] for record in trained for d in (record.answered or (record.digest,)) if d})
    return torch.from_numpy(np.frombuffer(bytes.fromhex("".join(digests)), np.uint8).copy()).view(-1, KEPT // 2)


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def _beginning(file: Path) -> int:
    # Buffered, a whole page would be read.
    with file.open("rb", buffering=0) as opened:
        digest = hashlib.blake2b(opened.read(BEGINNING), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@dataclass(frozen=True)
class _Key:
    """What distinguishes the rows of a table from those of any other."""

    states: str
    table: str
    seq: int

    def digest(
        self, number: int, row: np.ndarray, pieces: np.ndarray, parts: Sequence[tuple[Tensor, Tensor]]
    ) -> np.ndarray:
        """Return a digest of what a row is read from, [2] int64."""
        hashed = hashlib.blake2b(f"{self.states} {self.table} {self.seq} {number}".encode(), digest_size=16)
        for part in (row[:4], pieces, *(half.numpy() for half in chain.from_iterable(parts))):
            hashed.update(np.ascontiguousarray(part).tobytes())
        return np.frombuffer(hashed.digest(), np.int64)


class StoredRow(NamedTuple):
    """A row as the index holds it: its pieces [n, PIECE], and of each its token ids and mask, [L] int32 and bool."""

    pieces: np.ndarray
    parts: tuple[tuple[Tensor, Tensor], ...]


class RowTable(Sequence[tuple[Span, ...]]):
    """A table of rows in the index, of which only those rows are read that are asked for.

    As a sequence, it has each row's spans, whose numbers stand for its pieces; see `read_span`.
    """

    def __init__(self, states: StoredStates, rows: RowsRecord, name: Table) -> None:
        self.states, self.rows, self.seq = states, rows, rows.seq
        self.name: Table = name
        self._count: int = getattr(rows, name)
        self._known: dict[int, Path] = {}
        # A batch asks for a row's tokens, and then for its states.
        self._held = lru_cache(HELD_ROWS)(self._read_row)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[Span, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple((number << 32 | at, 0, int(piece[1])) for at, piece in enumerate(self.read_row(number).pieces))

    def read_row(self, number: int) -> StoredRow:
        """Read a row's pieces, tokens and masks.

        Raises:
            StatesInvalid: the index is missing, or differs from what kconv states wrote.
        """
        return self._held(number)

    def read_span(self, index: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Read the captured and final states of a piece's tokens from `begin` up to `end`.

        Raises:
            StatesInvalid: a file is missing, or is another one.
        """
        record = self.states.record
        piece = self.read_row(index >> 32).pieces[index & 0xFFFFFFFF]
        _, _, shard, size, beginning, *at = piece.tolist()
        if shard not in self._known:
            file = check_size(self.states.folder / shard_name(shard, record.shards), size)
            if _beginning(file) != beginning:
                raise StatesInvalid(f"{file.name} differs from what kconv states wrote", where=file.parent, fix=AGAIN)
            self._known[shard] = file
        captured, hidden = (
            read_tensor(_matrix(self._known[shard], name, record.dtype, (end - begin, width), place, begin))
            for name, width, place in zip(
                ("aux_hidden_states", "hidden_states"),
                (len(record.captured) * record.target.hidden, record.target.hidden),
                at,
                strict=True,
            )
        )
        return self.states.select(captured), refuse_zeros(hidden, self.states.folder)

    def files_of(self, rows: Sequence[int]) -> list[str]:
        """Return the names of the files with these rows, from the table's first and last one of them alone."""
        if not rows:
            return []
        lowest, highest = int(self._entry(rows[0])[2]), int(self._entry(rows[-1])[3])
        return [shard_name(shard, self.states.record.shards) for shard in range(lowest, highest + 1)]

    def _entry(self, number: int) -> np.ndarray:
        return self._read(f"{self.name}.rows", number, number + 1, (len(self), ROW)).numpy()[0]

    def _read_row(self, number: int) -> StoredRow:
        row = self._entry(number)
        first, count = row[:2].tolist()
        if not 0 < count <= self.seq:
            raise self._damaged(number)
        pieces = self._read(f"{self.name}.pieces", first, first + count, (None, PIECE)).numpy()
        parts = []
        for at, length in pieces[:, :2].tolist():
            if not 0 < length <= self.seq:
                raise self._damaged(number)
            ids, mask = (
                self._read(name, at, at + length, (self.states.record.tokens, 1))[:, 0]
                for name in ("input_ids", "loss_mask")
            )
            parts.append((ids, mask))
        key = _Key(self.states.record.sha256, self.name, self.seq)
        if not np.array_equal(key.digest(number, row, pieces, parts), row[4:]):
            raise self._damaged(number)
        return StoredRow(pieces, tuple(parts))

    def _read(self, name: str, begin: int, end: int, shape: tuple[int | None, int]) -> Tensor:
        """Read consecutive rows of a matrix in the index, of this shape."""
        info = self.states.index.get(name)
        if info is not None and len(info.shape) == 1:
            info = info._replace(shape=(*info.shape, 1))
        if info is None or info.shape != (shape[0] or info.shape[0], shape[1]) or not 0 <= begin < end <= info.shape[0]:
            raise self._damaged(begin)
        return read_span(info, begin, end)

    def _damaged(self, number: int) -> StatesInvalid:
        return StatesInvalid(
            f"row {number} of {INDEX}, {self.name}, differs from what kconv states wrote",
            where=self.states.folder,
            fix=AGAIN,
        )


def read_counts(states: StoredStates, rows: RowsRecord) -> Tensor:
    """Return how often each token id counts in the training rows, [vocab] int64.

    Raises:
        StatesInvalid: the index is missing, or differs from what kconv states wrote.
    """
    return _read_whole(states, "counts", rows.counts_sha256)


def read_prompts(states: StoredStates, rows: RowsRecord) -> Iterator[str]:
    """Yield the leading digits of the training prompts' digests.

    Raises:
        StatesInvalid: the index is missing, or differs from what kconv states wrote.
    """
    found = _read_whole(states, "prompts", rows.prompts_sha256)
    yield from (bytes(row).hex() for row in found.numpy())


def _read_whole(states: StoredStates, name: str, sha256: str) -> Tensor:
    info = states.index.get(name)
    found = None if info is None else read_tensor(info)
    if found is None or _sha256(found) != sha256:
        raise StatesInvalid(f"{name} in {INDEX} differ from what kconv states wrote", where=states.folder, fix=AGAIN)
    return found


def _matrix(file: Path, name: str, dtype: str, shape: tuple[int, int], begin: int, skipped: int) -> TensorInfo:
    """Return where some rows of states are, of which `skipped` ones before are not read."""
    row = byte_size(dtype, (1, shape[1]))
    return TensorInfo(name, dtype, shape, file, begin + skipped * row, row * shape[0])
