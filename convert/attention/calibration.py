"""What a conversion is calibrated and measured on. What belongs here: batches of states, their split, their refusals.

A batch is a text with the target's states over it. Every pass of a conversion goes over the batches anew, so they
may be read from disk one by one: nothing here holds more than one of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from ...errors import CalibrationInvalid
from ...head.spec import HeadSpec

# Chains that must stand behind each input dim of the attention. Least squares through fewer follow their noise:
# at 7 rows a dim held-out acceptance was 0.5 points below that at 80 (experiments on small heads).
ROWS_PER_DIM = 4
Part = Literal["fit", "choose", "held-out"]
# Of each 10 batches or prompts, which one only chooses (a ridge, a ladder), and which one only measures.
PARTS = 10
KEPT_BACK: dict[int, Part] = {4: "choose", 9: "held-out"}


@dataclass(frozen=True)
class Batch:
    """Sequences of one length, and the target's states over them.

    Attributes:
        tokens: ids `[B, T]`.
        captured: outputs of the captured layers side by side, in ascending order: `[B, T, A * target_hidden]`.
        hidden: the target's state after its final norm, which its lm_head reads: `[B, T, target_hidden]`.
    """

    tokens: Tensor
    captured: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class Calibration:
    """A text's batches, and what turns the target's final states into its logits.

    Attributes:
        batches: re-iterable; each pass must give the same batches in the same order.
        lm_head: the target's, `[vocab, target_hidden]`.
        name: what the text is, for the manifest.
        prompts: the digest of each prompt that the text is made of, for the manifest.
        parts: which part each batch is of; by its place where it is not said.
    """

    batches: Sequence[Batch]
    lm_head: Tensor
    name: str
    prompts: tuple[str, ...] = ()
    parts: Sequence[Part] = ()

    def part(self, part: Part) -> Iterator[Batch]:
        """Yield the batches of one part: no batch is in two."""
        for index in self.indices(part):
            yield self.batches[index]

    def indices(self, part: Part) -> list[int]:
        """Return which batches a part consists of."""
        parts = self.parts or [part_of(place) for place in range(len(self.batches))]
        return [index for index, own in enumerate(parts) if own == part]

    def logits(self, batch: Batch) -> Tensor:
        """Return the target's logits over a batch, `[B, T, vocab]`."""
        return F.linear(batch.hidden, self.lm_head)


def part_of(place: int) -> Part:
    """Return the part of the batch, or the prompt, at a place."""
    return KEPT_BACK.get(place % PARTS, "fit")


def check_calibration(calibration: Calibration, spec: HeadSpec, steps: int) -> int:
    """Refuse a calibration that does not belong to a head, or is too small for it.

    Args:
        calibration: the batches.
        spec: the head that is converted.
        steps: draft steps that are calibrated on.

    Returns:
        Rows that are fitted on: chains times draft steps.

    Raises:
        CalibrationInvalid: it is of another target than the head's, or has too few rows.
    """
    width = len(spec.captured) * spec.target_hidden
    for batch in islice(calibration.batches, 1):
        found = (batch.captured.shape[-1], batch.hidden.shape[-1], tuple(calibration.lm_head.shape))
        wanted = (width, spec.target_hidden, (spec.vocab, spec.target_hidden))
        if found != wanted:
            raise CalibrationInvalid(
                f"the states are {found[0]} wide with a lm_head of {list(found[2])}, and the head reads "
                f"{len(spec.captured)} layers of {spec.target_hidden}, {width} in all, with {list(wanted[2])}",
                where=calibration.name,
                fix=f"Give states of the head's own target, captured from layers {list(spec.captured)} (as outputs).",
            )
    rows, needed = count_rows(calibration.part("fit"), steps), ROWS_PER_DIM * 2 * spec.hidden
    if rows >= needed and not calibration.indices("held-out"):
        raise CalibrationInvalid(
            f"the text makes {len(calibration.batches)} batches, and none to measure on: it is wanted in at least "
            f"{PARTS} batches, or {PARTS} prompts of --states, of which two are kept from the fit",
            where=calibration.name,
            fix="Give more text: with --states of more prompts, with --prompts also cut shorter (--context).",
        )
    if rows < needed:
        raise CalibrationInvalid(
            f"{rows:,} rows are too few to fit {2 * spec.hidden:,} inputs of the attention: {needed:,} are the least",
            where=calibration.name,
            fix=f"Give more text: at least {-(-needed * PARTS // ((PARTS - 2) * steps)):,} tokens, better ten times "
            "that.",
        )
    return rows


def count_rows(batches: Iterable[Batch], steps: int) -> int:
    """Return chains times draft steps."""
    return sum(b.tokens.shape[0] * max(b.tokens.shape[1] - 1 - steps, 0) * steps for b in batches)


def digest_rows(calibration: Calibration) -> str:
    """Return one sha256 over the token ids of every batch, in order: what a conversion was calibrated on."""
    digest = hashlib.sha256()
    for batch in calibration.batches:
        digest.update(str(tuple(batch.tokens.shape)).encode())
        digest.update(batch.tokens.cpu().long().contiguous().numpy().tobytes())
    return digest.hexdigest()
