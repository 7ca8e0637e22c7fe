"""The text that a conversion is calibrated and measured on.

A batch is some texts of one length with the target's states for them. Every pass of a conversion reads the batches
again, so they may come from disk one by one: nothing here holds more than one of them. Within a batch a pass works on
pieces of whole texts, so that logits over a large vocabulary are in memory for only a few texts at a time.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..drafters.chain import count_chains
from ..drafters.spec import HeadSpec
from ..errors import CalibrationInvalid

STEPS = 3
"""Draft steps for calibration and measurement: the K that heads are mostly served with."""
# Chains required per input dim of the attention. Least squares through fewer fits their noise: at 7 rows per dim
# held-out acceptance was 0.5 points below that at 80 (experiments on small heads).
ROWS_PER_DIM = 4
# Bytes of one draft step's logits over one piece of a batch; a healing step holds 16 tensors of this size at once.
PIECE_BYTES = 2**28
Part = Literal["fit", "choose", "held-out"]
# Of each 10 batches or prompts, which one only chooses (a ridge, a ladder), and which one only measures.
PARTS = 10
KEPT_BACK: dict[int, Part] = {4: "choose", 9: "held-out"}
# Tokens of a text that kconv advises at least, since what is served is longer, and how many times the prompts at most.
ADVISED, LONGEST = 64, 20


@dataclass(frozen=True)
class StatesBatch:
    """Sequences of one length, and the target's states for them.

    Attributes:
        tokens: ids `[B, T]`.
        captured: outputs of the captured layers, concatenated in ascending order: `[B, T, A * target_hidden]`.
        hidden: the target's state after its final norm, which its lm_head reads: `[B, T, target_hidden]`.
    """

    tokens: Tensor
    captured: Tensor
    hidden: Tensor

    def to(self, device: torch.device) -> StatesBatch:
        """Return the batch on a device; the same object if it is already there."""
        return StatesBatch(self.tokens.to(device), self.captured.to(device), self.hidden.to(device))


@dataclass(frozen=True)
class Calibration:
    """A text's batches, and the lm_head that turns the target's final states into its logits.

    Attributes:
        batches: re-iterable; each pass must give the same batches in the same order. Computation runs on the device of
            `lm_head`, wherever they are stored.
        lm_head: the target's, `[vocab, target_hidden]`, on the head's device.
        prompts: the digest of each prompt in the text, for the manifest.
        parts: which part each batch belongs to; by position if not given.
    """

    batches: Sequence[StatesBatch]
    lm_head: Tensor
    name: str
    prompts: tuple[str, ...] = ()
    parts: Sequence[Part] = ()

    def part(self, part: Part) -> Iterator[StatesBatch]:
        """Yield the batches of one part; the parts do not overlap."""
        for index in self.indices(part):
            yield self.batch(index)

    def batch(self, index: int) -> StatesBatch:
        """Return one batch, on the device for computation."""
        return self.batches[index].to(self.lm_head.device)

    def indices(self, part: Part) -> list[int]:
        return [index for index, own in enumerate(self.part_of_each()) if own == part]

    def part_of_each(self) -> Sequence[Part]:
        return self.parts or [part_of(place) for place in range(len(self.batches))]

    def logits(self, batch: StatesBatch) -> Tensor:
        """Return the target's logits for a batch, `[B, T, vocab]`."""
        return F.linear(batch.hidden, self.lm_head)


def in_pieces(batches: Iterable[StatesBatch], vocab: int) -> Iterator[StatesBatch]:
    """Yield batches in pieces of whole texts, whose fp32 logits `[b, T, vocab]` take at most `PIECE_BYTES`.

    A single text that takes more is a piece by itself; a batch that takes no more is one piece.
    """
    for batch in batches:
        texts, length = batch.tokens.shape
        rows = max(1, PIECE_BYTES // (4 * length * vocab))
        if rows >= texts:
            yield batch
            continue
        parts = (batch.tokens.split(rows), batch.captured.split(rows), batch.hidden.split(rows))
        yield from (StatesBatch(*piece) for piece in zip(*parts, strict=True))


def part_of(place: int) -> Part:
    """Return the part of the batch, or the prompt, at a position."""
    return KEPT_BACK.get(place % PARTS, "fit")


def check_calibration(calibration: Calibration, spec: HeadSpec) -> int:
    """Refuse a calibration that does not belong to a head, is damaged, or is too small for it; takes one pass.

    Raises:
        CalibrationInvalid: it comes from another target than the head's, contains NaN or Inf, has texts too short for a
            draft, too few rows, or no part to choose or measure on.
    """
    shapes = check_batches(calibration, spec)
    return check_amount(shapes, calibration.part_of_each(), spec, calibration.name)


def check_batches(calibration: Calibration, spec: HeadSpec) -> list[tuple[int, int]]:
    """Refuse a calibration that does not belong to a head, or is damaged; takes one pass.

    Returns:
        For each batch, the number of texts and of tokens in each.

    Raises:
        CalibrationInvalid: it comes from another target than the head's, or contains NaN or Inf.
    """
    shapes: list[tuple[int, int]] = []
    for index, batch in enumerate(calibration.batches):
        _check_target(calibration, batch, spec)
        _check_batch(calibration, batch, index)
        shapes.append((batch.tokens.shape[0], batch.tokens.shape[1]))
    return shapes


def check_amount(shapes: Sequence[tuple[int, int]], parts: Sequence[Part], spec: HeadSpec, name: str) -> int:
    """Refuse a calibration that is too small for a head, from its sizes alone, before its states are created.

    Args:
        shapes: for each batch, the number of texts and of tokens in each.

    Returns:
        Rows for the fit: chains times draft steps.
    """
    for texts, length in shapes:
        if length < STEPS + 2:
            raise CalibrationInvalid(
                f"{texts} texts of {length} tokens are too short for {STEPS} draft steps",
                where=name,
                fix=f"Remove texts of fewer than {STEPS + 2} tokens.",
            )
    rows = sum(
        texts * count_chains(length, STEPS) * STEPS
        for (texts, length), part in zip(shapes, parts, strict=True)
        if part == "fit"
    )
    needed = ROWS_PER_DIM * 2 * spec.hidden
    if rows < needed:
        raise CalibrationInvalid(
            f"{rows:,} rows are too few to fit {2 * spec.hidden:,} attention inputs; {needed:,} are needed",
            where=name,
            fix=f"Use more text: at least {-(-needed * PARTS // ((PARTS - 2) * STEPS)):,} tokens, better ten times "
            "that.",
        )
    counts: Counter[Part] = Counter()
    for (texts, _), part in zip(shapes, parts, strict=True):
        counts[part] += texts
    # A single one has no standard error.
    if counts["choose"] < 1 or counts["held-out"] < 2:
        raise CalibrationInvalid(
            f"there is too little text to keep a part of it for measuring: of each {PARTS} prompts one chooses and one "
            f"measures, which gives {counts['choose']} and {counts['held-out']} texts; 1 and 2 are needed",
            where=name,
            fix=f"Use states of more prompts: {PARTS} with two texts or answers each, or {2 * PARTS}.",
        )
    return rows


def check_windows(tokens: Mapping[Part, int], prompts: int, context: int, name: str) -> None:
    """Refuse prompts that fill no text to choose on, or not two to measure on.

    Args:
        tokens: of the prompts of each part.
        prompts: how many there are in all.
        context: tokens of a text.
    """
    choose, measure = tokens.get("choose", 0), tokens.get("held-out", 0)
    if choose >= context and measure >= 2 * context:
        return
    fitting = min(choose, measure // 2)
    times = max(context / choose, 2 * context / measure) if fitting else math.inf
    if prompts < 2 * PARTS and not fitting:
        fix = f"Pass more prompts, {2 * PARTS} or more."
    elif times > LONGEST:
        fix = "Pass longer prompts."
    else:
        shorter = f", or texts of {fitting} tokens or fewer (--context)" if fitting >= ADVISED else ""
        fix = f"Pass more prompts, about {math.ceil(prompts * times / PARTS) * PARTS:,}{shorter}."
    raise CalibrationInvalid(
        f"of each {PARTS} prompts one chooses and one measures: of {prompts:,} in all these have {choose:,} and "
        f"{measure:,} tokens, but need {context:,} and {2 * context:,}",
        where=name,
        fix=fix,
    )


def _check_target(calibration: Calibration, batch: StatesBatch, spec: HeadSpec) -> None:
    """Refuse states of a different width than a head of this spec reads, or the lm_head of another target."""
    width = len(spec.captured) * spec.target_hidden
    found = (batch.captured.shape[-1], batch.hidden.shape[-1], tuple(calibration.lm_head.shape))
    wanted = (width, spec.target_hidden, (spec.vocab, spec.target_hidden))
    if found != wanted:
        raise CalibrationInvalid(
            f"the states have width {found[0]} and an lm_head of {list(found[2])}, but the head reads "
            f"{len(spec.captured)} layers of {spec.target_hidden}, {width} in all, with {list(wanted[2])}",
            where=calibration.name,
            fix=f"Use states of the head's target, captured from layers {list(spec.captured)} (as outputs).",
        )
    if int(batch.tokens.min()) < 0 or int(batch.tokens.max()) >= spec.vocab:
        raise CalibrationInvalid(
            f"the text has token ids from {int(batch.tokens.min())} to {int(batch.tokens.max())}, but the head's "
            f"vocabulary has {spec.vocab:,} tokens",
            where=calibration.name,
            fix="Use states of the head's target, over text encoded with its tokenizer.",
        )


def _check_batch(calibration: Calibration, batch: StatesBatch, index: int) -> None:
    """Refuse states with NaN or Inf, before hours of work fail on them."""
    for name, states in (("captured states", batch.captured), ("final states", batch.hidden)):
        if not bool(states.isfinite().all()):
            raise CalibrationInvalid(
                f"the target's {name} hold NaN or Inf",
                where=f"{calibration.name}, batch {index}",
                fix="Create the states again in bfloat16 or float32. A target overflows in float16.",
            )


def digest_rows(calibration: Calibration) -> str:
    """Return one sha256 over the token ids of every batch, in order, to identify the calibration text."""
    digest = hashlib.sha256()
    for batch in calibration.batches:
        digest.update(str(tuple(batch.tokens.shape)).encode())
        digest.update(batch.tokens.cpu().long().contiguous().numpy().tobytes())
    return digest.hexdigest()
