"""Training data for a head, as rows of token ids.

They come from dialogues and texts (see `targets.dialogues`), or from stored states.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..errors import RecipeInvalid, TrainingDataInvalid
from ..head.vocab import keep_most_frequent, offsets
from ..targets.dialogues import Sample, encode_row, read_rows
from ..targets.states import StatesFolder
from ..targets.tokenizer import Tokenizer

HELD_OUT = 0.02  # share of the samples, or of the prompts
OPEN = 64  # rows kept open for more samples while packing
FEWEST = 4  # evaluation rows; fewer mean nothing


@dataclass(frozen=True)
class Prepared:
    """Training rows, evaluation rows, their description for the manifest, and the training prompts.

    Prompts are named by their digests.
    """

    text: Rows
    unseen: Rows
    facts: dict[str, object]
    prompts: frozenset[str]


Span = tuple[int, int, int]
"""A stored sequence's number, its first token, and the number of tokens."""


@dataclass(frozen=True)
class Placed:
    """Rows cut from stored sequences; for each, its consecutive spans; and the prompts' digests."""

    rows: Rows
    places: tuple[tuple[Span, ...], ...]
    prompts: frozenset[str]

    def sequences_of(self, rank: int) -> set[int]:
        """Return the numbers of the sequences in a process's rows."""
        shares = self.rows.shares or (range(len(self.places)),)
        return {sequence for row in shares[rank] for sequence, *_ in self.places[row]}


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
    """Read and encode a file or dataset.

    Args:
        name: a JSONL file, or a dataset's id.
        tokenizer: the target's.
        seq: tokens per row.
        held_out: another file or dataset for evaluation; otherwise one sample of `name` in fifty is held out, chosen by
            its tokens' digest, so that the choice depends on nothing else.
        split, revision: of a dataset.
        pack: whether to put several samples into a training row.

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
        chosen = _choose(samples)
        others = {key: s for key, s in samples.items() if key in chosen}
        samples = {key: s for key, s in samples.items() if key not in others}
    text, unseen = pack_samples(samples.values(), seq, pack=pack), pack_samples(others.values(), seq)
    _refuse_few(unseen, name)
    digest = hashlib.sha256("".join(sorted(samples)).encode()).hexdigest()
    facts: dict[str, object] = {"name": name, "samples": len(samples), "held_out": len(others), "sha256": digest}
    prompts = frozenset(prompt for sample in samples.values() for prompt in sample.prompts)
    return Prepared(text, unseen, facts | ({"revision": revision} if revision else {}), prompts)


def place_sequences(
    states: StatesFolder, seq: int, *, held_out: bool, pack: bool = False, processes: int = 1
) -> Placed:
    """Cut stored sequences into rows, from their tokens and masks alone: no states are read.

    Each process has its own rows, from consecutive sequences, so that it reads only a few files.

    Args:
        states: the stored states.
        seq: tokens per row; a shorter row is padded and masked.
        held_out: return the evaluation rows instead of the training rows: those of one prompt in fifty.
        pack: whether to put several sequences into a row.
        processes: number of processes that share the rows.
    """
    spans: list[Span] = []
    pieces: list[Piece] = []
    chosen = _choose({record.digest for record in states.sequences})
    for number, record in enumerate(states.sequences):
        if (record.digest in chosen) != held_out:
            continue
        given = states.read_mask(number)
        mask = _behind(record.prompt_length, record.length) if given is None else given.bool()
        for start in range(0, record.length, seq):
            part = mask[start : start + seq]
            if part[1:].any():
                spans.append((number, start, len(part)))
                pieces.append((states.read_tokens(number)[start : start + seq], part))
    lengths = [length for *_, length in spans]
    arranged: list[list[int]] = []
    shares: list[tuple[int, ...]] = []
    # Without packing each piece is a row, however short.
    for run in divide(lengths if pack else [1] * len(lengths), processes):
        own = [[run[piece] for piece in row] for row in arrange([lengths[at] for at in run], seq, pack=pack)]
        shares.append(tuple(range(len(arranged), len(arranged) + len(own))))
        arranged += own
    places = [tuple(spans[piece] for piece in row) for row in arranged]
    if len(places) < FEWEST:
        raise TrainingDataInvalid(
            f"the stored states give {len(places)} rows {'for evaluation' if held_out else 'for training'}",
            where=states.folder,
            fix="Create states of more prompts.",
        )
    told = (states.sequences[number] for number, *_ in spans)
    prompts = frozenset(digest for record in told for digest in (record.answered or (record.digest,)))
    return Placed(replace(lay_out(pieces, arranged, seq, pack=pack), shares=tuple(shares)), tuple(places), prompts)


def divide(sizes: Sequence[int], parts: int) -> list[range]:
    """Divide consecutive things into runs of nearly equal size; if there are too few, runs share them."""
    if len(sizes) < parts:
        return [range(at % len(sizes), at % len(sizes) + 1) for at in range(parts)] if sizes else []
    ends, cuts = list(accumulate(sizes)), [0]
    for part in range(1, parts):
        at = bisect_left(ends, ends[-1] * part / parts) + 1
        # Each run has at least one.
        cuts.append(min(max(at, cuts[-1] + 1), len(sizes) - parts + part))
    return [range(*pair) for pair in pairwise([*cuts, len(sizes)])]


def _samples(name: str, tokenizer: Tokenizer, split: str, revision: str | None) -> Iterable[Sample]:
    for where, row in read_rows(name, split, revision):
        yield from encode_row(row, tokenizer, where)


def _digest(sample: Sample) -> str:
    return hashlib.sha256(sample.ids.numpy().tobytes()).hexdigest()


def _choose(digests: Collection[str]) -> set[str]:
    """Return the digests of the held-out prompts."""
    return set(sorted(digests)[: max(FEWEST, round(HELD_OUT * len(digests)))])


def _refuse_few(rows: Rows, name: str) -> None:
    if len(rows.ids) < FEWEST:
        raise TrainingDataInvalid(
            f"only {len(rows.ids)} rows are left for evaluation; at least {FEWEST} are needed",
            where=name,
            fix="Use more data, or pass --held-out FILE.",
        )


def _behind(prompt: int, length: int) -> Tensor:
    return torch.arange(length) >= prompt


Piece = tuple[Tensor, Tensor]
"""Token ids [L] and mask [L] of one piece of a row."""


def pack_samples(samples: Iterable[Sample], seq: int, *, pack: bool = False) -> Rows:
    """Arrange samples in rows of one length: split longer ones into several rows, pad shorter ones.

    Padding comes at the end and is masked; a causal model's states before it do not depend on it.

    Args:
        samples: the samples to arrange.
        seq: tokens per row.
        pack: whether to put several of them into a row.

    Returns:
        The rows, without those in which no token counts.
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
            "the data holds no answers or texts to train on", fix="Use dialogues with answers, or texts."
        )
    return lay_out(pieces, arrange([len(ids) for ids, _ in pieces], seq, pack=pack), seq, pack=pack)


def arrange(lengths: Sequence[int], seq: int, *, pack: bool) -> list[list[int]]:
    """Return which pieces go into which row: one each, or as many as fit.

    Each goes into the first of some open rows with enough room, so that adjacent data stays close together on disk.
    When a
    new row is needed, the fullest one is closed.

    Args:
        lengths: of the pieces, at most `seq`.
        seq: tokens per row.
        pack: whether to put several of them into a row.
    """
    if not pack:
        return [[place] for place in range(len(lengths))]
    rows: list[list[int]] = []
    opened: list[tuple[list[int], int]] = []
    for place, length in enumerate(lengths):
        at = next((at for at, (_, left) in enumerate(opened) if left >= length), None)
        if at is not None:
            row, left = opened[at]
            row.append(place)
            opened[at] = row, left - length
            continue
        if len(opened) == OPEN:
            rows.append(opened.pop(min(range(OPEN), key=lambda at: opened[at][1]))[0])
        opened.append(([place], seq - length))
    return rows + [row for row, _ in opened]


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
    """Return `count` windows of a text, without overlap and in random order: `[count, seq]`.

    Args:
        text: [N] token ids.
        seq: tokens per window.
        count: how many.
        seed: of the choice and the order.

    Raises:
        RecipeInvalid: the text has fewer.
    """
    whole = len(text) // seq
    if whole < count:
        raise RecipeInvalid(
            f"the recipe needs {count:,} windows of {seq} tokens, but the text has {whole:,}",
            fix="Lower the recipe's batches, or use more text.",
        )
    chosen = torch.randperm(whole, generator=torch.Generator().manual_seed(seed))[:count]
    return text[: whole * seq].view(whole, seq)[chosen]


def map_draft_vocab(text: Tensor, size: int, vocab: int, specials: Sequence[int] = ()) -> Tensor:
    """Return the map from draft to target ids that keeps a text's most frequent tokens: `d2t`, [size] int64.

    It holds offsets: draft id i means target id i + d2t[i]. Target ids ascend with draft ids.

    Args:
        text: token ids.
        size: rows of the draft vocabulary.
        vocab: rows of the target's.
        specials: ids that are kept whatever their frequency.

    Raises:
        RecipeInvalid: the text has fewer distinct tokens.
        ConfigInvalid: there are more special tokens than that.
    """
    counts = torch.bincount(text, minlength=vocab)
    counts[list(specials)] += 1
    distinct = int((counts > 0).sum())
    if distinct < size:
        raise RecipeInvalid(
            f"the draft vocabulary has {size} tokens, but the text has only {distinct} distinct ones",
            fix="Lower draft_vocab, or use more text.",
        )
    return offsets(keep_most_frequent(counts, size, specials))


@dataclass(frozen=True)
class Rows:
    """Token ids [N, T] int64, and which of them count in the loss, [N, T] bool.

    For packed rows, `documents` [N, T] int32 numbers the documents of each row, -1 for padding. `shares` holds the row
    numbers of each process, if it cannot read all rows.
    """

    ids: Tensor
    mask: Tensor
    documents: Tensor | None = None
    shares: tuple[tuple[int, ...], ...] | None = None

    @property
    def usable(self) -> int:
        """How many rows a pass takes; each process takes equally many."""
        return len(self.ids) if self.shares is None else min(map(len, self.shares)) * len(self.shares)

    def own(self, rank: int, processes: int, batch: int = 1) -> Tensor:
        """Return the numbers of a process's rows, [n] int64: equally many for each process, in whole batches.

        Args:
            rank: the process.
            processes: their number; rows without shares are dealt out in turn.
            batch: rows of one process in a batch.
        """
        count = len(self.ids)
        shares: Sequence[Sequence[int]] = self.shares or [
            # With fewer rows than processes, several processes have the same row.
            range(at, count, processes) if count >= processes else [at % count]
            for at in range(processes)
        ]
        return torch.tensor(shares[rank][: min(map(len, shares)) // batch * batch], dtype=torch.int64)
