"""What a head is trained on, as rows of token ids.

They come from dialogues and texts (see `targets.dialogues`), or from stored states.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import RecipeInvalid, TrainingDataInvalid
from ..head.vocab import keep_most_frequent, offsets
from ..targets.dialogues import Sample, encode_row, read_rows
from ..targets.states import StatesFolder
from ..targets.tokenizer import Tokenizer

HELD_OUT = 0.02  # share of the samples, or of the prompts
FEWEST = 4  # rows to look at; fewer say nothing


@dataclass(frozen=True)
class Prepared:
    """Rows to train on, rows that are only looked at, what the manifest is to say of them, and the prompts trained on.

    Prompts are named by their digests.
    """

    text: Rows
    unseen: Rows
    facts: dict[str, object]
    prompts: frozenset[str]


@dataclass(frozen=True)
class Placed:
    """Rows cut from stored sequences: of each the sequence and the token it begins with; and the prompts' digests."""

    rows: Rows
    places: tuple[tuple[int, int], ...]
    prompts: frozenset[str]


def prepare_dialogues(
    name: str, tokenizer: Tokenizer, seq: int, *, held_out: str | None, split: str, revision: str | None
) -> Prepared:
    """Read and encode a file or dataset.

    Args:
        name: a JSONL file, or a dataset's id.
        tokenizer: the target's.
        seq: tokens per row.
        held_out: another file or dataset to look at; else one sample of `name` in fifty is held out, chosen by
            its tokens' digest, so that the choice hangs on nothing else.
        split, revision: of a dataset.

    Raises:
        TrainingDataInvalid: it cannot be read, or a row of `held_out` is trained on too.
    """
    samples = {_digest(s): s for s in _samples(name, tokenizer, split, revision)}
    if held_out:
        others = {_digest(s): s for s in _samples(held_out, tokenizer, split, None)}
        both = samples.keys() & others.keys()
        if both:
            raise TrainingDataInvalid(
                f"{len(both)} of the {len(others)} held-out samples are trained on too",
                where=held_out,
                fix="Take them out of one of the two.",
            )
    else:
        chosen = _choose(samples)
        others = {key: s for key, s in samples.items() if key in chosen}
        samples = {key: s for key, s in samples.items() if key not in others}
    text, unseen = (Rows(*pack_samples(part.values(), seq)) for part in (samples, others))
    _refuse_few(unseen, name)
    digest = hashlib.sha256("".join(sorted(samples)).encode()).hexdigest()
    facts: dict[str, object] = {"name": name, "samples": len(samples), "held_out": len(others), "sha256": digest}
    prompts = frozenset(prompt for sample in samples.values() for prompt in sample.prompts)
    return Prepared(text, unseen, facts | ({"revision": revision} if revision else {}), prompts)


def place_sequences(states: StatesFolder, seq: int, *, held_out: bool) -> Placed:
    """Cut stored sequences into rows, by their tokens and masks alone: no states are read.

    Args:
        states: what was stored.
        seq: tokens per row; what is shorter is padded and masked.
        held_out: the rows to look at instead of the rows to train on: those of one prompt in fifty.
    """
    places: list[tuple[int, int]] = []
    ids: list[Tensor] = []
    masks: list[Tensor] = []
    chosen = _choose({record.digest for record in states.sequences})
    for number, record in enumerate(states.sequences):
        if (record.digest in chosen) != held_out:
            continue
        given = states.read_mask(number)
        mask = _behind(record.prompt_length, record.length) if given is None else given.bool()
        for start in range(0, record.length, seq):
            if mask[start : start + seq][1:].any():
                places.append((number, start))
                ids.append(_padded(states.read_tokens(number)[start : start + seq], seq))
                masks.append(_padded(mask[start : start + seq], seq))
    if len(places) < FEWEST:
        raise TrainingDataInvalid(
            f"the stored states give {len(places)} rows {'to look at' if held_out else 'to train on'}",
            where=states.folder,
            fix="Store the states of more prompts.",
        )
    told = (states.sequences[number] for number, _ in places)
    prompts = frozenset(digest for record in told for digest in (record.answered or (record.digest,)))
    return Placed(Rows(torch.stack(ids), torch.stack(masks)), tuple(places), prompts)


def _samples(name: str, tokenizer: Tokenizer, split: str, revision: str | None) -> Iterable[Sample]:
    for where, row in read_rows(name, split, revision):
        yield from encode_row(row, tokenizer, where)


def _digest(sample: Sample) -> str:
    return hashlib.sha256(sample.ids.numpy().tobytes()).hexdigest()


def _choose(digests: Collection[str]) -> set[str]:
    """Return the digests of what is held out."""
    return set(sorted(digests)[: max(FEWEST, round(HELD_OUT * len(digests)))])


def _refuse_few(rows: Rows, name: str) -> None:
    if len(rows.ids) < FEWEST:
        raise TrainingDataInvalid(
            f"only {len(rows.ids)} rows are left to look at; {FEWEST} are the fewest that say anything",
            where=name,
            fix="Give more data, or --held-out FILE.",
        )


def _behind(prompt: int, length: int) -> Tensor:
    return torch.arange(length) >= prompt


def _padded(values: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - len(values)))


def pack_samples(samples: Iterable[Sample], seq: int) -> tuple[Tensor, Tensor]:
    """Lay samples out in rows of one length: cut what is longer into rows of its own, pad what is shorter.

    Padding stands at the end and is masked; a causal model's states before it do not depend on it.

    Args:
        samples: what to lay out.
        seq: tokens per row.

    Returns:
        ids [N, seq] int64 and mask [N, seq] bool. Rows in which nothing counts are left out.
    """
    rows: list[Tensor] = []
    masks: list[Tensor] = []
    for sample in samples:
        for ids, mask in zip(sample.ids.split(seq), sample.mask.split(seq), strict=True):
            # A draft starts behind the answer's first token, which the target's prefill gives.
            if mask[1:].any():
                rows.append(torch.nn.functional.pad(ids, (0, seq - len(ids))))
                masks.append(torch.nn.functional.pad(mask, (0, seq - len(mask))))
    if not rows:
        raise TrainingDataInvalid("the data holds nothing to train on", fix="Give dialogues with answers, or texts.")
    return torch.stack(rows), torch.stack(masks)


def cut_windows(text: Tensor, seq: int, count: int, seed: int) -> Tensor:
    """Return `count` windows of a text that do not overlap, in random order: `[count, seq]`.

    Args:
        text: [N] token ids.
        seq: tokens per window.
        count: how many.
        seed: of the choice and the order.

    Raises:
        RecipeInvalid: the text holds fewer.
    """
    whole = len(text) // seq
    if whole < count:
        raise RecipeInvalid(
            f"the recipe asks for {count:,} windows of {seq} tokens, and the text holds {whole:,}",
            fix="Lower the recipe's batches, or give more text.",
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
        RecipeInvalid: the text holds fewer distinct tokens.
        ConfigInvalid: the special tokens alone are more.
    """
    counts = torch.bincount(text, minlength=vocab)
    counts[list(specials)] += 1
    distinct = int((counts > 0).sum())
    if distinct < size:
        raise RecipeInvalid(
            f"the draft vocabulary has {size} tokens, and the text {distinct} distinct ones",
            fix="Lower draft_vocab, or give more text.",
        )
    return offsets(keep_most_frequent(counts, size, specials))


@dataclass(frozen=True)
class Rows:
    """Token ids [N, T] int64, and which of them count in the loss, [N, T] bool."""

    ids: Tensor
    mask: Tensor
