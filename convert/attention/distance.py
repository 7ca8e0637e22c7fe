"""How far a head's drafts are from the original's.

Both heads draft K steps on a text, each on hidden states of its own. The distance is `KL(original || student)` of each
step's tokens, plus a tenth of the relative squared error of the hidden state that it hands on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...head.chain import count_chains, unroll
from ...head.forward import DraftHead
from .calibration import STEPS, Batch, in_pieces

HIDDEN = 0.1


def distance_by_piece(original: DraftHead, student: DraftHead, batch: Batch) -> Iterator[Tensor]:
    """Yield what the pieces of a batch (`in_pieces`) add to a head's distance from the original over it.

    Each is a scalar with a graph of its own: with its backward called before the next is asked for, one piece's
    logits are held at a time, and the gradients add up to those of the whole batch.

    Returns:
        Parts of the distance in nats, mean over positions and draft steps; their sum is that of the batch.
    """
    pieces = list(in_pieces([batch], original.spec.draft_vocab))
    places = batch.tokens.shape[0] * count_chains(batch.tokens.shape[1], STEPS)
    # The hidden state's error is relative to its size over the whole batch, which the first piece needs already.
    sizes = _sizes(original, pieces[1:])
    for index, piece in enumerate(pieces):
        with torch.no_grad():
            goals = list(unroll(original, piece.tokens, piece.captured, STEPS))
        if index == 0:
            sizes = [size + goal.returned.square().sum() for size, goal in zip(sizes, goals, strict=True)]
        total = torch.zeros((), device=piece.tokens.device)
        steps = unroll(student, piece.tokens, piece.captured, STEPS)
        for goal, step, size in zip(goals, steps, sizes, strict=True):
            p, q = goal.logits.float().log_softmax(-1), step.logits.float().log_softmax(-1)
            kl = (p.exp() * (p - q)).sum(-1).sum() / places
            apart = (step.returned - goal.returned).square().sum() / size
            total = total + kl + HIDDEN * apart
        yield total / STEPS


@torch.no_grad()
def _sizes(head: DraftHead, pieces: Sequence[Batch]) -> list[float | Tensor]:
    """Return the sum of squares of the hidden states that a head hands on, by draft step."""
    sizes: list[float | Tensor] = [0.0] * STEPS
    for piece in pieces:
        for k, step in enumerate(unroll(head, piece.tokens, piece.captured, STEPS)):
            sizes[k] = sizes[k] + step.returned.square().sum()
    return sizes
