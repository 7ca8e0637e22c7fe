"""A converted head compared with the original, on text that neither the fit nor healing saw."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ..drafters.chain import Acceptance, overlap_acceptance, overlap_at, pool, served_shares, unroll
from ..drafters.forward import DraftHead
from .batches import STEPS, Calibration, StatesBatch, in_pieces
from .retention import Retention
from .statistics import share_kept
from .trace import run_both


@torch.no_grad()
def compare(
    original: DraftHead,
    converted: DraftHead,
    calibration: Calibration,
    batches: Iterable[StatesBatch] | None = None,
    *,
    trained: DraftHead | None = None,
) -> Retention:
    """Measure both heads on the held-out part of a calibration, or on the given batches.

    Sampled acceptance is the sum of min(p, q), in expectation over every position (`drafters.chain`).

    Args:
        batches: what to measure on instead of its held-out part.
        trained: the original after the same training as the converted head.
    """
    batches = calibration.part("held-out") if batches is None else batches
    context, lost, whole = 0, 0.0, 0.0
    heads = [original, converted, *([trained] if trained else [])]
    sampled, greedy = ([list[Acceptance]() for _ in heads] for _ in range(2))
    kl = torch.zeros(STEPS, dtype=torch.float64, device=calibration.lm_head.device)
    for piece in in_pieces(batches, original.spec.vocab):
        for ran in run_both(original, converted, [piece]):
            lost += float((ran.output - ran.original).double().square().sum())
            whole += float(ran.original.double().square().sum())
        context = max(context, piece.tokens.shape[1])
        likeliest, shares = _served(calibration.logits(piece), original.target_ids)
        overlaps, hits = ([list[Tensor]() for _ in heads] for _ in range(2))
        apart = list[Tensor]()
        drafts = (unroll(head, piece.tokens, piece.captured, STEPS) for head in heads)
        # Step by step: over a large vocabulary one step's logits take gigabytes.
        for k, steps in enumerate(zip(*drafts, strict=True), start=1):
            p = steps[0].logits.float().log_softmax(-1)
            for at, (head, step) in enumerate(zip(heads, steps, strict=True)):
                q = step.logits.float().log_softmax(-1) if at else p
                overlaps[at].append(overlap_at(shares, k, q.exp()))
                hits[at].append((head.target_ids[step.logits.argmax(-1)] == likeliest[:, k : k + q.shape[1]]).double())
                if at == 1:
                    apart.append(torch.sub(p, q).mul_(p.exp()).sum(-1))
        for found, by_head in ((sampled, overlaps), (greedy, hits)):
            for own, by_step in zip(found, by_head, strict=True):
                own += map(overlap_acceptance, torch.stack(by_step).split(1, dim=1))
        kl += torch.stack(apart).double().sum((1, 2))
    places = pool(sampled[0]).drafts
    kept, error = share_kept(sampled[-1] if trained else sampled[0], sampled[1])
    greedy_kept, greedy_error = share_kept(greedy[-1] if trained else greedy[0], greedy[1])
    lengths, greedy_lengths = ([pool(one).length for one in found] for found in (sampled, greedy))
    return Retention(
        sequences=len(sampled[0]),
        positions=places,
        context=context,
        steps=STEPS,
        before=lengths[0],
        after=lengths[1],
        kept=kept,
        kept_error=math.nan if error is None else error,
        kl=tuple((kl / places).tolist()),
        attention_error=(lost / whole) ** 0.5,
        gained=lengths[1] / lengths[0],
        greedy_before=greedy_lengths[0],
        greedy_after=greedy_lengths[1],
        greedy_kept=greedy_kept,
        greedy_kept_error=math.nan if greedy_error is None else greedy_error,
        greedy_gained=greedy_lengths[1] / greedy_lengths[0],
        trained=lengths[-1] if trained else None,
        greedy_trained=greedy_lengths[-1] if trained else None,
    )


def _served(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target's likeliest tokens, and its probabilities of the draft tokens; nothing keeps its logits."""
    return logits.argmax(-1), served_shares(logits, ids)
