"""A converted head beside the original, on text that neither the fit nor the healing saw. What belongs here: figures.

Sampled acceptance is the sum of min(p, q), in expectation over every position (`head.chain`); the two heads are
compared position by position, and the standard error is that of the mean over sequences, as neighbouring positions
share their text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import ConversionInaccurate
from ...head.chain import lengths, overlap, unroll
from ...head.forward import DraftHead
from .calibration import Batch, Calibration
from .trace import STEPS, run_both


@dataclass(frozen=True)
class HeldOut:
    """How a converted head compares with the original.

    Attributes:
        sequences, positions: how much was measured on.
        context: tokens of the longest sequence.
        steps: K.
        before, after: sampled acceptance lengths, the bonus token included.
        kept: after / before.
        kept_error: its paired standard error.
        kl: mean KL(original || converted) per draft step, nats.
        attention_error: relative error of the attention's output, root mean square.
    """

    sequences: int
    positions: int
    context: int
    steps: int
    before: float
    after: float
    kept: float
    kept_error: float
    kl: tuple[float, ...]
    attention_error: float


@torch.no_grad()
def compare(
    original: DraftHead, converted: DraftHead, calibration: Calibration, batches: Iterable[Batch] | None = None
) -> HeldOut:
    """Measure both heads on the held-out part of a calibration, or on given batches of it."""
    batches = list(calibration.part("held-out")) if batches is None else list(batches)
    one: list[Tensor] = []
    two: list[Tensor] = []
    kl = torch.zeros(STEPS, dtype=torch.float64, device=calibration.lm_head.device)
    for batch in batches:
        logits = [
            torch.stack([step.logits for step in unroll(head, batch.tokens, batch.captured, STEPS)])
            for head in (original, converted)
        ]
        served = calibration.logits(batch)
        for found, own, head in zip((one, two), logits, (original, converted), strict=True):
            found.extend(lengths(overlap(own, served, head.target_ids)).double())
        p, q = (own.float().log_softmax(-1) for own in logits)
        kl += (p.exp() * (p - q)).sum(-1).double().sum((1, 2))
    places = sum(len(row) for row in one)
    before, after = (float(torch.cat(rows).mean()) for rows in (one, two))
    # A ratio of means: its error is that of the mean of what the sequences are off by it.
    off = torch.stack([(b - after / before * a).sum() for a, b in zip(one, two, strict=True)])
    error = float(off.std() * len(off) ** 0.5 / (places * before)) if len(off) > 1 else float("nan")
    apart = whole = 0.0
    for pair in run_both(original, converted, batches):
        apart += float((pair.output - pair.original).double().square().sum())
        whole += float(pair.original.double().square().sum())
    return HeldOut(
        sequences=len(one),
        positions=places,
        context=max(batch.tokens.shape[1] for batch in batches),
        steps=STEPS,
        before=before,
        after=after,
        kept=after / before,
        kept_error=error,
        kl=tuple((kl / places).tolist()),
        attention_error=(apart / whole) ** 0.5,
    )


def check_kept(figures: HeldOut, least: float, steps: int) -> None:
    """Refuse a conversion that keeps less of the acceptance length than was asked for.

    Raises:
        ConversionInaccurate: it does.
    """
    if not figures.kept >= least:
        raise ConversionInaccurate(
            f"the converted head keeps {figures.kept:.2%} ± {figures.kept_error:.2%} of the original's acceptance "
            f"length on {figures.sequences} held-out sequences ({figures.after:.3f} of {figures.before:.3f} at "
            f"K={figures.steps}), and {least:.2%} was asked for",
            fix=f"Heal for more steps (--heal {max(200, 5 * steps)}), calibrate on more text of the kind that is "
            f"served, or accept the loss by name (--keep {figures.kept - 0.005:.2f}).",
        )
