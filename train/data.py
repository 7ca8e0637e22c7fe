"""Training data for a head, as rows of token ids, from dialogues and texts or from stored states."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from ..drafters.vocab import keep_most_frequent, offsets
from ..errors import RecipeInvalid, TrainingDataInvalid
from ..lines import counted
from ..targets.dialogues import Sample, encode_row, read_rows
from ..targets.rows import (
    FEWEST,
    TABLES,
    RowTable,
    Span,
    Table,
    arrange,
    choose_held_out,
    cut_spans,
    divide,
    read_counts,
    read_prompts,
)
from ..targets.states import StatesFolder, StoredStates
from ..targets.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prepared:
    """Training rows, evaluation rows, their description for the manifest, and the training prompts' digests."""

    text: Rows
    unseen: Rows
    facts: dict[str, object]
    prompts: frozenset[str]


class SpanReader(Protocol):
    """Gives the states of spans."""

    def read_span(self, index: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """See `StatesFolder.read_span`."""
        ...


@dataclass(frozen=True)
class Placed:
    """Rows of stored sequences, with the consecutive spans of each; `prompts` returns their prompts' digests."""

    rows: TextRows
    places: Sequence[tuple[Span, ...]]
    states: SpanReader
    prompts: Callable[[], Iterable[str]]

    def sequences_of(self, rank: int) -> set[int]:
        """Return the numbers of the sequences in a process's rows."""
        return {sequence for row in self.rows.shares[rank] for sequence, *_ in self.places[row]}

    def files_of(self, rank: int, stored: StoredStates) -> list[str]:
        """Return the names of the files of stored states that a process's rows need."""
        if isinstance(self.places, RowTable):
            return self.places.files_of(self.rows.shares[rank])
        return stored.files_of(self.sequences_of(rank))


def prepare_dialogues(
    name: str,
    tokenizer: Tokenizer,
    seq: int,
    *,
    held_out: str | None,
    split: str,
    revision: str | None,
    pack: bool = False,
) -> Prepared:
    """Read and encode a JSONL file or a dataset.

    `held_out` is another one for evaluation. Without it one sample in fifty is held out, chosen by its tokens' digest,
    so that the choice depends on nothing else.

    Raises:
        TrainingDataInvalid: it cannot be read, or a row of `held_out` is also a training row.
    """
    samples = {_digest(s): s for s in _samples(name, tokenizer, split, revision)}
    if held_out:
        others = {_digest(s): s for s in _samples(held_out, tokenizer, split, None)}
        both = samples.keys() & others.keys()
        if both:
            raise TrainingDataInvalid(
                f"{len(both)} of the {len(others)} held-out samples are also training samples",
                where=held_out,
                fix="Remove them from one of the two.",
            )
    else:
        chosen = choose_held_out(samples)
        others = {key: s for key, s in samples.items() if key in chosen}
        if samples and len(samples) == len(others):
            raise TrainingDataInvalid(
                f"it holds {counted(len(samples), 'sample')}, all of which would be held out for evaluation",
                where=name,
                fix="Use more data, or pass --held-out FILE.",
            )
        samples = {key: s for key, s in samples.items() if key not in others}
    text = pack_samples(samples.values(), seq, name, pack=pack)
    unseen = pack_samples(others.values(), seq, held_out or name)
    _refuse_few(unseen, held_out or name)
    digest = hashlib.sha256("".join(sorted(samples)).encode()).hexdigest()
    facts: dict[str, object] = {"name": name, "samples": len(samples), "held_out": len(others), "sha256": digest}
    prompts = frozenset(prompt for sample in samples.values() for prompt in sample.prompts)
    return Prepared(text, unseen, facts | ({"revision": revision} if revision else {}), prompts)


def place_rows(states: StatesFolder, seq: int, *, held_out: bool, pack: bool = False, processes: int = 1) -> Placed:
    """Return rows of stored or served states.

    They are read from the index's table when their turn comes, if it has one of this row length. Otherwise the whole
    index is read, and they are cut now: the same rows. Arguments and errors as in `place_sequences`.
    """
    rows = states.record.rows if isinstance(states, StoredStates) else None
    if not isinstance(states, StoredStates) or rows is None or rows.seq != seq:
        return place_sequences(states, seq, held_out=held_out, pack=pack, processes=processes)
    name: Table = next(name for name, kind in TABLES.items() if kind == (held_out, pack))
    table = RowTable(states, rows, name)
    _refuse_few_placed(len(table), states, held_out=held_out)
    return Placed(TableRows(table, processes), table, table, lambda: read_prompts(states, rows))


def place_sequences(
    states: StatesFolder, seq: int, *, held_out: bool, pack: bool = False, processes: int = 1
) -> Placed:
    """Cut stored sequences into rows, from their tokens and masks alone: no states are read.

    Each process has its own rows, from consecutive sequences, so that it reads only a few files.

    Args:
        seq: tokens per row; a shorter row is padded and masked.
        held_out: return the evaluation rows instead of the training rows: those of one prompt in fifty.

    Raises:
        TrainingDataInvalid: there are too few rows.
        StatesInvalid: the states cannot be read.
    """
    sequences = states.sequences

    def mask_of(number: int) -> Tensor:
        given, record = states.read_mask(number), sequences[number]
        return torch.arange(record.length) >= record.prompt_length if given is None else given.bool()

    spans = cut_spans(sequences, mask_of, seq, held_out=held_out)
    arranged = arrange([length for *_, length in spans], seq, pack=pack)
    _refuse_few_placed(len(arranged), states, held_out=held_out)
    pieces = [
        (states.read_tokens(number)[start : start + length], mask_of(number)[start : start + length])
        for number, start, length in spans
    ]
    rows = replace(lay_out(pieces, arranged, seq, pack=pack), processes=processes)
    trained = {number for number, *_ in spans}
    prompts = frozenset(
        digest for number in trained for digest in (sequences[number].answered or (sequences[number].digest,))
    )
    return Placed(rows, [tuple(spans[piece] for piece in row) for row in arranged], states, lambda: prompts)


def _refuse_few_placed(count: int, states: StatesFolder, *, held_out: bool) -> None:
    if count < FEWEST:
        raise TrainingDataInvalid(
            f"the stored states give {count} rows for {'evaluation' if held_out else 'training'}, fewer than {FEWEST}",
            where=states.folder,
            fix="Create states of more text, or set a smaller seq (--set seq=N).",
        )


def _samples(name: str, tokenizer: Tokenizer, split: str, revision: str | None) -> Iterable[Sample]:
    for where, row in read_rows(name, split, revision):
        yield from encode_row(row, tokenizer, where)


def _digest(sample: Sample) -> str:
    return hashlib.sha256(sample.ids.numpy().tobytes()).hexdigest()


def _refuse_few(rows: Rows, name: str) -> None:
    if len(rows.ids) < FEWEST:
        raise TrainingDataInvalid(
            f"only {len(rows.ids)} rows are left for evaluation; at least {FEWEST} are needed",
            where=name,
            fix="Use more data, or pass --held-out FILE.",
        )


Piece = tuple[Tensor, Tensor]
"""Token ids [L] and mask [L] of one piece of a row."""


def pack_samples(samples: Iterable[Sample], seq: int, name: str = "", *, pack: bool = False) -> Rows:
    """Arrange samples in rows of one length: split longer ones into several rows, pad shorter ones.

    `name` is that of the data, for a message.

    Padding comes at the end and is masked; a causal model's states before it do not depend on it. Rows in which no
    token counts are left out.
    """
    # A draft starts after the answer's first token, which the target's prefill gives.
    pieces = [
        (ids, mask)
        for sample in samples
        for ids, mask in zip(sample.ids.split(seq), sample.mask.split(seq), strict=True)
        if mask[1:].any()
    ]
    if not pieces:
        raise TrainingDataInvalid(
            "the data holds no answers or texts", where=name, fix="Use dialogues with answers, or texts."
        )
    return lay_out(pieces, arrange([len(ids) for ids, _ in pieces], seq, pack=pack), seq, pack=pack)


def lay_out(pieces: Sequence[Piece], rows: Sequence[Sequence[int]], seq: int, *, pack: bool) -> Rows:
    """Return rows of pieces; see `arrange`."""
    ids = torch.zeros(len(rows), seq, dtype=torch.int64)
    mask = torch.zeros(len(rows), seq, dtype=torch.bool)
    documents = torch.full((len(rows), seq), -1, dtype=torch.int32) if pack else None
    for number, row in enumerate(rows):
        at = 0
        for document, place in enumerate(row):
            own, counted = pieces[place]
            ids[number, at : at + len(own)], mask[number, at : at + len(own)] = own, counted
            if documents is not None:
                documents[number, at : at + len(own)] = document
            at += len(own)
    return Rows(ids, mask, documents)


def cut_windows(text: Tensor, seq: int, count: int, seed: int) -> Tensor:
    """Return `count` windows of a text [N], without overlap and in random order: `[count, seq]`."""
    whole = len(text) // seq
    if whole < count:
        raise RecipeInvalid(
            f"the recipe needs {count:,} windows of {seq} tokens, but the text has {whole:,}",
            fix="Lower the recipe's batches, or use more text.",
        )
    chosen = torch.randperm(whole, generator=torch.Generator().manual_seed(seed))[:count]
    return text[: whole * seq].view(whole, seq)[chosen]


def map_draft_vocab(counts: Tensor, size: int, specials: Sequence[int] = ()) -> Tensor:
    """Return the map from draft to target ids that keeps a text's most frequent tokens: `d2t`, [size] int64.

    It holds offsets: draft id i means target id i + d2t[i]. Target ids ascend with draft ids.

    Args:
        counts: how often the text has each id of the target's vocabulary, [vocab].
        specials: ids that are kept whatever their frequency.
    """
    counts = counts.clone()
    counts[list(specials)] += 1
    distinct = int((counts > 0).sum())
    if distinct < size:
        raise RecipeInvalid(
            f"the draft vocabulary has {size} tokens, but the text has only {distinct} distinct ones",
            fix="Lower draft_vocab, or use more text.",
        )
    return torch.from_numpy(offsets(keep_most_frequent(counts.numpy(), size, specials)))


class TextRows(Protocol):
    """Rows of a text, in memory or read when they are asked for."""

    @property
    def shares(self) -> Sequence[Sequence[int]]:
        """The row numbers of each process, if it cannot read all rows; otherwise of one that has them all."""
        ...

    @property
    def usable(self) -> int:
        """How many rows a pass takes; each process takes equally many."""
        ...

    @property
    def size(self) -> int:
        """How many tokens the rows have, with padding."""
        ...

    def own(self, rank: int, processes: int, batch: int = 1) -> Tensor:
        """Return the numbers of a process's rows, [n] int64: equally many for each process, in whole batches.

        Rows without shares are dealt out in turn.
        """
        ...

    def take(self, rows: Tensor) -> Rows:
        """Return some rows [n], in this order."""
        ...

    def count(self, vocab: int) -> Tensor:
        """Return how often each token id counts in the loss, [vocab] int64."""
        ...

    def digests(self) -> list[str]:
        """Return what distinguishes these rows from others."""
        ...


@dataclass(frozen=True)
class Rows:
    """Token ids [N, T] int64, and which of them count in the loss, [N, T] bool.

    For packed rows, `documents` [N, T] int32 numbers the documents of each row, -1 for padding. `processes` is the
    number of processes among which the rows are divided; None if each could have any.
    """

    ids: Tensor
    mask: Tensor
    documents: Tensor | None = None
    processes: int | None = None

    @property
    def shares(self) -> list[range]:
        return divide(len(self.ids), self.processes or 1)

    @property
    def usable(self) -> int:
        return _usable(self.shares)

    @property
    def size(self) -> int:
        return self.ids.numel()

    def own(self, rank: int, processes: int, batch: int = 1) -> Tensor:
        count = len(self.ids)
        shares = (
            self.shares
            if self.processes
            else [
                # With fewer rows than processes, several processes have the same row.
                range(at, count, processes) if count >= processes else range(at % count, at % count + 1)
                for at in range(processes)
            ]
        )
        return _own(shares, rank, batch)

    def take(self, rows: Tensor) -> Rows:
        documents = None if self.documents is None else self.documents[rows]
        return Rows(self.ids[rows], self.mask[rows], documents)

    def count(self, vocab: int) -> Tensor:
        return self.ids[self.mask].bincount(minlength=vocab)

    def digests(self) -> list[str]:
        tensors = [self.ids, self.mask, *([] if self.documents is None else [self.documents])]
        return [hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for tensor in tensors]


class TableRows:
    """Rows of a table in the index of stored states, divided among processes."""

    def __init__(self, table: RowTable, processes: int) -> None:
        self._table = table
        self.shares = divide(len(table), processes)

    @property
    def usable(self) -> int:
        return _usable(self.shares)

    @property
    def size(self) -> int:
        return len(self._table) * self._table.seq

    def own(self, rank: int, processes: int, batch: int = 1) -> Tensor:
        return _own(self.shares, rank, batch)

    def take(self, rows: Tensor) -> Rows:
        taken = [self._table.read_row(row).parts for row in rows.tolist()]
        pieces = [(ids.long(), mask) for parts in taken for ids, mask in parts]
        ends = [*accumulate(map(len, taken), initial=0)]
        own = [range(*pair) for pair in pairwise(ends)]
        return lay_out(pieces, own, self._table.seq, pack=TABLES[self._table.name][1])

    def count(self, vocab: int) -> Tensor:
        """See `TextRows.count`; only training rows are counted."""
        return read_counts(self._table.states, self._table.rows)

    def digests(self) -> list[str]:
        index = self._table.states.record.index
        return [index.sha256 if index else "", self._table.name]


def _usable(shares: Sequence[Sequence[int]]) -> int:
    return min(map(len, shares), default=0) * len(shares)


def _own(shares: Sequence[range], rank: int, batch: int) -> Tensor:
    return torch.tensor(shares[rank][: min(map(len, shares)) // batch * batch], dtype=torch.int64)
