"""The `lm_head` row for a token that a head cannot draft.

A reduced head that must have a row for each token of the target needs rows for tokens that it was never trained on.
`lm_head` has no bias, so a row of zeros does not mean "never": its logit is 0, the greatest one wherever all others
are negative. No row is below all others for every state either, since the logit of the negated state is the negated
logit. But a row inside the convex hull of the trained rows w_1 .. w_m is never *above* all of them. Let
r = sum_j a_j w_j with all a_j > 0 and sum_j a_j = 1. Then for every state n

    r.n = sum_j a_j (w_j.n) <= max_j w_j.n,

with equality only where all trained logits are equal. So r is never the only argmax. The mean (a_j = 1/m) is such a
row, and so is the midpoint between it and any w_k. Leaning towards a token that never occurs in text, such as
padding, lowers r.n, since training has pushed that token's logit down.

The stored row is rounded, and must lie inside the hull too. So a search looks for a_j > 0 that give the stored row:
it starts from r's own a_j and takes steps W (W^T W)^-1 d, where W is the rows minus their mean and d the remaining
difference. Such a step keeps sum_j a_j, and reaches the stored row at once if no a_j has to be kept positive. If d
becomes 0, the stored row itself is a convex combination, and the inequality holds for it without rounding. If the rows
do not span the space (m <= hidden), a part of d remains, and then
r.n <= max_j w_j.n + |d| |n|. `Filler.excess` is this |d|, a valid bound however far the search came.

The inequality is about exact logits. Engines round theirs, which is harmless unless the margin
max_j w_j.n - r.n is as small as the rounding; `measure_margin` measures it.

Sampling is different: a token with this row has exp(r.n - max_j w_j.n) times the probability of the most likely
token. That is small but not 0, and as many tokens have this row as are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

Blocks = Callable[[], Iterable[Tensor]]

# As a share of the mean diagonal, added to the diagonal of W^T W, which is singular for m <= hidden: the square root
# of fp32's precision, so that neither the addition nor the rounding spoils a step.
RIDGE = 3e-4
LEAN = 0.5  # share of the way from the mean to an unlikely token's row
LEAST = 0.05  # no weight falls below this share of 1/m
ROUNDS = 30
CLOSE = 1e-13  # of |row|, at which the search ends


@dataclass(frozen=True)
class Filler:
    """One row that all tokens without their own row get.

    Attributes:
        row: `[hidden]`, in the dtype of the trained rows.
        excess: the filler's logit is at most `excess * |n|` above the greatest trained logit, for every state n
            of Euclidean norm |n|. 0 up to fp64's rounding where the row lies in the hull.
    """

    row: Tensor
    excess: float

    def bound(self, gain: Tensor) -> float:
        """Return the most by which the filler's logit can exceed the greatest trained one, for any state of a head.

        Args:
            gain: `[hidden]`, the weight of the RMSNorm before `lm_head`; |n| <= sqrt(hidden) * max|gain|.
        """
        return self.excess * gain.numel() ** 0.5 * float(gain.abs().max())


def make_filler(blocks: Blocks, unlikely: int | None = None) -> Filler:
    """Return the row for tokens without one, rounded to the trained rows' dtype, with the proven bound.

    Takes 2 * m * hidden^2 flops and 2 * hidden^2 * 4 bytes.

    Args:
        blocks: called for each pass; yields the rows `[m, hidden]` in consecutive blocks.
        unlikely: index of the row to lean towards, of a token that never occurs in text; the mean if None.
    """
    total, towards, count, dtype = torch.zeros((), dtype=torch.float64), None, 0, torch.float32
    for block in blocks():
        if unlikely is not None and count <= unlikely < count + len(block):
            towards = block[unlikely - count].double()
        total, count, dtype = total + block.double().sum(dim=0), count + len(block), block.dtype
    mean = total / count
    weights, centre = torch.ones(count, dtype=torch.float64), mean
    if towards is not None:
        weights.mul_(1 - LEAN)[unlikely] += LEAN * count
        centre = mean + LEAN * (towards - mean)
    row = centre.to(dtype)
    return Filler(row, _bound_distance(blocks, mean, row.double(), weights, row.double() - centre))


def _bound_distance(blocks: Blocks, mean: Tensor, row: Tensor, weights: Tensor, missing: Tensor) -> float:
    """Return |d|: the distance of `row` from the nearest convex combination found.

    Args:
        blocks: yields the trained rows.
        mean: the mean of the trained rows.
        row: the filler as it is stored.
        weights: `[m]`, the initial a_j, in units of 1/m; changed in place.
        missing: `row` minus the combination with these weights.
    """
    gram = torch.zeros(len(mean), len(mean))
    for block in blocks():
        centred = (block.double() - mean).float()
        gram.addmm_(centred.T, centred)
    ridge, distance = RIDGE * float(gram.diagonal().mean()), _length(missing)
    if ridge == 0.0:
        return distance  # all rows are equal
    gram.diagonal().add_(ridge)
    factors = cast(tuple[Tensor, Tensor], torch.linalg.lu_factor(gram))
    for _ in range(ROUNDS):
        step = cast(Tensor, torch.linalg.lu_solve(*factors, missing[:, None].float()))[:, 0].double()
        weights += 1.0 - weights.mean()  # spread what was added to keep them positive over all weights
        combination, at = torch.zeros_like(mean), 0
        for block in blocks():
            centred, own = block.double() - mean, weights[at : at + len(block)]
            own.add_(centred @ step, alpha=len(weights)).clamp_(min=LEAST)
            combination += centred.T @ own
            at += len(block)
        missing = row - mean - combination / weights.sum()
        distance = min(distance, _length(missing))
        if distance <= CLOSE * _length(row):
            break
    return distance


def _length(vector: Tensor) -> float:
    return float(cast(Tensor, vector.norm()))


@dataclass(frozen=True)
class Margin:
    """How far the filler stays below the greatest trained logit, over some states.

    Attributes:
        worst, median: of max_j w_j.n - r.n, in logits.
        leak: mean share of probability, at temperature 1, of all tokens with the filler's row.
        states: number of states.
    """

    worst: float
    median: float
    leak: float
    states: int


def measure_margin(blocks: Blocks, row: Tensor, fillers: int, states: Tensor) -> Margin:
    """Measure the filler against the trained rows.

    Args:
        blocks: yields the trained rows `[m, hidden]` in consecutive blocks.
        row: `[hidden]`, the filler.
        fillers: how many tokens have it.
        states: `[N, hidden]`, inputs of `lm_head`; computed in their dtype.
    """
    greatest = torch.full((len(states),), -torch.inf, dtype=states.dtype)
    mass = greatest.clone()
    for block in blocks():
        logits = states @ block.to(states.dtype).T
        greatest = torch.maximum(greatest, logits.amax(dim=1))
        mass = torch.logaddexp(mass, logits.logsumexp(dim=1))
    filler = states @ row.to(states.dtype)
    margins = greatest - filler
    leak = torch.sigmoid(filler + torch.log(torch.tensor(float(fillers))) - mass)
    return Margin(float(margins.min()), float(margins.median()), float(leak.mean()), len(states))


def random_states(gain: Tensor, count: int, seed: int = 0) -> Tensor:
    """Return `[count, hidden]` fp32 outputs of an RMSNorm with this weight, for inputs in random directions."""
    inputs = torch.randn(count, gain.numel(), generator=torch.Generator().manual_seed(seed))
    return inputs / inputs.square().mean(dim=1, keepdim=True).sqrt() * gain.float()
