"""The row for a token that a head cannot draft. What belongs here: making it, and proving that it never wins.

A reduced head that must have a row for each token of the target needs rows for the tokens it was never
trained on. `lm_head` has no bias, so a row of zeros does not mean "never": its logit is 0, which is the
greatest one wherever all others are negative. No row is below all others for every state either, as the
logit of a state's negative is the negative logit. But a row inside the convex hull of the trained rows
w_1 .. w_m is never *above* all of them. Let r = sum_j a_j w_j with all a_j > 0 and sum_j a_j = 1. Then for
every state n

    r.n = sum_j a_j (w_j.n) <= max_j w_j.n,

with equality only where all trained logits are equal. So r never is the sole argmax. The mean (a_j = 1/m) is
such a row. Stored, it is r + e with a rounding error e, and what is stored must be inside too: with W the rows
minus their mean, x = (W^T W)^-1 e and a_j = 1/m + (W x)_j give sum_j a_j w_j = r + e, and sum_j a_j = 1, as W's
columns sum to 0. If these a_j are positive, the stored row itself is a convex combination and the inequality
holds with no rounding in it. Where the rows do not span the space (m <= hidden), a part d of e stays
outside, and what remains is r.n <= max_j w_j.n + |d| |n|. That |d| is what `Filler.excess` states.

The inequality is one of exact logits. Engines round theirs, which is harmless as long as the margin
max_j w_j.n - r.n is not as small as the rounding; `measure_margin` says how large it is.

Sampling is another matter: a token with this row has exp(r.n - max_j w_j.n) times the probability of
the likeliest token, which is small but not 0, and there are as many of them as tokens are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

Blocks = Callable[[], Iterable[Tensor]]

# Of the mean square of W, added to the diagonal of W^T W, as it is singular where m <= hidden. It only
# steers x; what x achieves is measured afterwards.
RIDGE = 1e-12


@dataclass(frozen=True)
class Filler:
    """A row that stands for each token without one of its own.

    Attributes:
        row: `[hidden]`, in the dtype of the trained rows.
        excess: the filler's logit is at most `excess * |n|` above the greatest trained logit, for every state n
            of Euclidean norm |n|. Below 1e-12 it is fp64's own noise: the row lies in the hull.
    """

    row: Tensor
    excess: float

    def bound(self, gain: Tensor) -> float:
        """Return the most that the filler's logit can be above the greatest trained one, for any state of a head.

        Args:
            gain: `[hidden]`, the weight of the RMSNorm before `lm_head`; |n| <= sqrt(hidden) * max|gain|.
        """
        return self.excess * gain.numel() ** 0.5 * float(gain.abs().max())


def make_filler(blocks: Blocks) -> Filler:
    """Return the mean of the trained rows, rounded to their dtype, with the proof's figure.

    Takes 2 * m * hidden^2 flops and 2 * hidden^2 * 8 bytes.

    Args:
        blocks: called for each pass; gives the rows `[m, hidden]` in consecutive blocks.
    """
    total, count = sum((block.double().sum(0) for block in blocks()), torch.zeros(())), 0
    count = sum(len(block) for block in blocks())
    mean = total / count
    dtype = next(iter(blocks())).dtype
    row = mean.to(dtype)
    return Filler(row, _distance_to_hull(blocks, mean, row.double() - mean, count))


def _distance_to_hull(blocks: Blocks, mean: Tensor, error: Tensor, count: int) -> float:
    """Return |d|: how far `mean + error` is at most from a convex combination of the rows."""
    gram = torch.zeros(len(mean), len(mean), dtype=torch.float64)
    for block in blocks():
        centred = block.double() - mean
        gram.addmm_(centred.T, centred)
    gram.diagonal().add_(RIDGE * gram.diagonal().mean() + torch.finfo(torch.float64).tiny)
    x = torch.cholesky_solve(error[:, None], torch.linalg.cholesky(gram))[:, 0]
    outside, least = error.clone(), 1.0 / count
    for block in blocks():
        centred = block.double() - mean
        moved = centred @ x
        outside -= centred.T @ moved
        least = min(least, float(moved.min()) + 1.0 / count)
    # With a weight that is not positive the proof does not hold; the mean's own does, short of all of `error`.
    return float((outside if least > 0 else error).norm())


@dataclass(frozen=True)
class Margin:
    """How far the filler stays below the greatest trained logit, over some states.

    Attributes:
        worst, median: of max_j w_j.n - r.n, in logits.
        leak: mean share of the probability, at temperature 1, that tokens with the filler's row take.
        states: number of states.
    """

    worst: float
    median: float
    leak: float
    states: int


def measure_margin(blocks: Blocks, row: Tensor, fillers: int, states: Tensor) -> Margin:
    """Measure the filler against the trained rows.

    Args:
        blocks: gives the trained rows `[m, hidden]` in consecutive blocks.
        row: `[hidden]`, the filler.
        fillers: how many tokens have it.
        states: `[N, hidden]`, what `lm_head` is applied to; computed in their dtype.
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
    """Return `[count, hidden]` fp32 outputs of an RMSNorm with this weight, for inputs of every direction alike."""
    inputs = torch.randn(count, gain.numel(), generator=torch.Generator().manual_seed(seed))
    return inputs / inputs.square().mean(dim=1, keepdim=True).sqrt() * gain.float()
