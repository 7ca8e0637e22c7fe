"""Data made ready for a run."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import TrainingDataInvalid
from ..targets.stored_states import StatesFolder
from ..targets.tokenizer import Tokenizer
from .job import Rows
from .samples import Sample, encode_row, pack_samples, read_rows

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
    """Cut stored sequences into rows.

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
        stored = states.read(number)
        mask = stored.loss_mask.bool() if stored.loss_mask is not None else _behind(record.prompt_length, record.length)
        for start in range(0, record.length, seq):
            if mask[start : start + seq][1:].any():
                places.append((number, start))
                ids.append(_padded(stored.tokens[start : start + seq], seq))
                masks.append(_padded(mask[start : start + seq], seq))
    if len(places) < FEWEST:
        raise TrainingDataInvalid(
            f"the stored states give {len(places)} rows {'to look at' if held_out else 'to train on'}",
            where=states.folder,
            fix="Store the states of more prompts.",
        )
    prompts = frozenset(states.sequences[number].digest for number, _ in places)
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
