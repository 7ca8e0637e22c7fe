"""A converted head beside the original, on text that neither the fit nor the healing saw.

Sampled acceptance is the sum of min(p, q), in expectation over every position (`head.chain`); the two heads are
compared position by position, and the standard error is that of the mean over sequences, as neighbouring positions
share their text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...head.chain import lengths, overlap, unroll
from ...head.forward import DraftHead
from .calibration import STEPS, Batch, Calibration, in_pieces
from .trace import run_both


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
    batches = calibration.part("held-out") if batches is None else batches
    context, lost, whole = 0, 0.0, 0.0
    one: list[Tensor] = []
    two: list[Tensor] = []
    kl = torch.zeros(STEPS, dtype=torch.float64, device=calibration.lm_head.device)
    for piece in in_pieces(batches, original.spec.vocab):
        for ran in run_both(original, converted, [piece]):
            lost += float((ran.output - ran.original).double().square().sum())
            whole += float(ran.original.double().square().sum())
        context = max(context, piece.tokens.shape[1])
        served = calibration.logits(piece)
        ours, theirs, apart = list[Tensor](), list[Tensor](), list[Tensor]()
        drafts = (unroll(head, piece.tokens, piece.captured, STEPS) for head in (original, converted))
        # Step by step: over a large vocabulary the logits of one are gigabytes.
        for k, (own, other) in enumerate(zip(*drafts, strict=True)):
            ours.append(overlap(own.logits[None], served[:, k:], original.target_ids))
            theirs.append(overlap(other.logits[None], served[:, k:], converted.target_ids))
            apart.append(_divergence(own.logits, other.logits))
        one.extend(lengths(torch.cat(ours)).double())
        two.extend(lengths(torch.cat(theirs)).double())
        kl += torch.stack(apart).double().sum((1, 2))
    places = sum(len(row) for row in one)
    before, after = (float(torch.cat(rows).mean()) for rows in (one, two))
    # A ratio of means: its error is that of the mean of what the sequences are off by it.
    off = torch.stack([(b - after / before * a).sum() for a, b in zip(one, two, strict=True)])
    error = float(off.std() * len(off) ** 0.5 / (places * before)) if len(off) > 1 else float("nan")
    return HeldOut(
        sequences=len(one),
        positions=places,
        context=context,
        steps=STEPS,
        before=before,
        after=after,
        kept=after / before,
        kept_error=error,
        kl=tuple((kl / places).tolist()),
        attention_error=(lost / whole) ** 0.5,
    )


def _divergence(original: Tensor, converted: Tensor) -> Tensor:
    """Return KL(original || converted) at each position, `[B, T', draft_vocab]` twice to `[B, T']`."""
    p = original.float().log_softmax(-1)
    return (p - converted.float().log_softmax(-1)).mul_(p.exp()).sum(-1)
