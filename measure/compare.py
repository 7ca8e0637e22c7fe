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
    original: DraftHead, converted: DraftHead, calibration: Calibration, batches: Iterable[StatesBatch] | None = None
) -> Retention:
    """Measure both heads on the held-out part of a calibration, or on the given batches.

    Sampled acceptance is the sum of min(p, q), in expectation over every position (`drafters.chain`).
    """
    batches = calibration.part("held-out") if batches is None else batches
    context, lost, whole = 0, 0.0, 0.0
    one, two, greedy_one, greedy_two = list[Acceptance](), list[Acceptance](), list[Acceptance](), list[Acceptance]()
    kl = torch.zeros(STEPS, dtype=torch.float64, device=calibration.lm_head.device)
    for piece in in_pieces(batches, original.spec.vocab):
        for ran in run_both(original, converted, [piece]):
            lost += float((ran.output - ran.original).double().square().sum())
            whole += float(ran.original.double().square().sum())
        context = max(context, piece.tokens.shape[1])
        likeliest, shares = _served(calibration.logits(piece), original.target_ids)
        ours, theirs, apart = list[Tensor](), list[Tensor](), list[Tensor]()
        our_hits, their_hits = list[Tensor](), list[Tensor]()
        drafts = (unroll(head, piece.tokens, piece.captured, STEPS) for head in (original, converted))
        # Step by step: over a large vocabulary one step's logits take gigabytes.
        for k, (own, other) in enumerate(zip(*drafts, strict=True), start=1):
            p, q = own.logits.float().log_softmax(-1), other.logits.float().log_softmax(-1)
            chance = p.exp()
            ours.append(overlap_at(shares, k, chance))
            theirs.append(overlap_at(shares, k, q.exp()))
            # KL(original || converted), in place: each of these takes gigabytes over a large vocabulary.
            apart.append(chance.mul_(p.sub_(q)).sum(-1))
            wanted = likeliest[:, k : k + p.shape[1]]
            our_hits.append((original.target_ids[own.logits.argmax(-1)] == wanted).double())
            their_hits.append((converted.target_ids[other.logits.argmax(-1)] == wanted).double())
        for found, steps in ((one, ours), (two, theirs), (greedy_one, our_hits), (greedy_two, their_hits)):
            found += map(overlap_acceptance, torch.stack(steps).split(1, dim=1))
        kl += torch.stack(apart).double().sum((1, 2))
    places = pool(one).drafts
    kept, error = share_kept(one, two)
    greedy_kept, greedy_error = share_kept(greedy_one, greedy_two)
    return Retention(
        sequences=len(one),
        positions=places,
        context=context,
        steps=STEPS,
        before=pool(one).length,
        after=pool(two).length,
        kept=kept,
        kept_error=math.nan if error is None else error,
        kl=tuple((kl / places).tolist()),
        attention_error=(lost / whole) ** 0.5,
        greedy_before=pool(greedy_one).length,
        greedy_after=pool(greedy_two).length,
        greedy_kept=greedy_kept,
        greedy_kept_error=math.nan if greedy_error is None else greedy_error,
    )


def _served(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target's likeliest tokens, and its probabilities of the draft tokens; nothing keeps its logits."""
    return logits.argmax(-1), served_shares(logits, ids)
