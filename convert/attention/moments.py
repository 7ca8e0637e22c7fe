"""Second moments, streamed, and what least squares makes of them.

A linear map B from x to y that minimises `E|Bx - y|^2 + ridge * |B - prior|^2` needs only the sums `x^T x` and
`x^T y`, so rows come and go and the memory is that of the sums: 14,336 inputs of Kimi-K2's attention take 1.6 GB,
whatever the number of rows.

Sums and factors are fp64 at every width. All tokens share a mean, so the largest eigenvalue of `x^T x` is a good part
of its trace: thousands of times the mean of the diagonal at such a width. What fp32 rounds off can then be more than
the smallest eigenvalues and the ridge, and a sum so rounded has no Cholesky factor.

o_proj, fitted again.

The converted heads give somewhat other values than the original's. A linear map from them to the attention output
that the original gave on the same inputs takes back what it can of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...calibrate.batches import Calibration
from ...calibrate.measure import run_both
from ...head.forward import DraftHead

# What an attention's conversion is computed in, up to the head that is assembled of it.
DTYPE = torch.float64
# What is added to the diagonal, relative to its mean, so that a direction which no row has does not divide by 0.
FLOOR = 1e-7


class Moments:
    """Sums over rows.

    Attributes:
        xx: `[n, n]`, the sum of `x x^T`.
        xy: `[n, m]`, the sum of `x y^T`; of width 0 where no y is given.
        rows: how many.
    """

    def __init__(self, n: int, m: int = 0, device: torch.device | str = "cpu") -> None:
        self.xx = torch.zeros(n, n, dtype=DTYPE, device=device)
        self.xy = torch.zeros(n, m, dtype=DTYPE, device=device)
        self.rows = 0

    def add(self, x: Tensor, y: Tensor | None = None) -> None:
        """Take in rows `x [N, n]`, `y [N, m]`."""
        x = x.to(DTYPE)
        self.xx.addmm_(x.T, x)
        if y is not None:
            self.xy.addmm_(x.T, y.to(DTYPE))
        self.rows += len(x)

    def split(self, widths: Sequence[int]) -> list[Moments]:
        """Return the moments of the same rows with parts of y, `[n, width]` each; `xx` is shared."""
        parts = []
        for xy in self.xy.split(list(widths), dim=1):
            part = Moments(0)
            part.xx, part.xy, part.rows = self.xx, xy, self.rows
            parts.append(part)
        return parts

    def mean(self) -> Tensor:
        """Return `E[x x^T]`, `[n, n]`."""
        return self.xx / self.rows

    def solve(self, prior: Tensor, ridge: float) -> Tensor:
        """Return the map `[m, n]` that fits y from x, drawn towards a prior.

        Args:
            prior: `[m, n]`.
            ridge: strength, relative to the mean of `x x^T`'s diagonal.
        """
        strength = (ridge + FLOOR) * self.xx.diagonal().mean()
        factor = torch.linalg.cholesky(_add_to_diagonal(self.xx, strength))
        return torch.cholesky_solve(self.xy + strength * prior.T.to(DTYPE), factor).T


def factor(mean: Tensor, floor: float = FLOOR) -> Tensor:
    """Return L with `L L^T = E[x x^T]`, so that `|W L|^2` is `E|W x|^2`; `[n, n]`."""
    return torch.linalg.cholesky(_add_to_diagonal(mean, floor * mean.diagonal().mean()))


def _add_to_diagonal(matrix: Tensor, value: Tensor) -> Tensor:
    """Return `matrix + value * I`, without an identity as large: at 14,336 inputs it is 1.6 GB."""
    raised = matrix.clone()
    raised.diagonal().add_(value)
    return raised


def root(matrix: Tensor, floor: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return the square root of Hermitian matrices `[..., n, n]` and its inverse.

    Eigenvalues below `floor` times the largest are raised to it: a direction that no query asks for has no weight,
    and must not get an infinite one on the way back.
    """
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp(min=(floor * values[..., -1:]).clamp(min=torch.finfo(values.dtype).tiny)).sqrt()
    adjoint = vectors.mH
    return (vectors * values[..., None, :]) @ adjoint, (vectors / values[..., None, :]) @ adjoint


RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


def refit_output(original: DraftHead, converted: DraftHead, calibration: Calibration) -> Tensor:
    """Return the converted attention's o_proj `[hidden, attn_out]`, drawn towards the one it has."""
    own = converted.weights["0.o_proj"]
    moments = Moments(own.shape[1], own.shape[0], own.device)
    for pair in run_both(original, converted, calibration.part("fit")):
        moments.add(pair.heads, pair.original)
    unseen = run_both(original, converted, calibration.part("choose"))
    return choose(moments, own, ((pair.heads, pair.original) for pair in unseen), RIDGES)


def choose(moments: Moments, prior: Tensor, unseen: Iterable[tuple[Tensor, Tensor]], ridges: Sequence[float]) -> Tensor:
    """Return the least squares of one of the ridges, or the prior: which is nearest on rows that were not fitted.

    Args:
        moments: of the fitted rows.
        prior: `[m, n]`.
        unseen: other rows, `(x [N, n], y [N, m])`; gone through once.
        ridges: to choose from.
    """
    maps = [prior.to(moments.xx.dtype), *(moments.solve(prior, ridge) for ridge in ridges)]
    errors = [0.0] * len(maps)
    for x, y in unseen:
        for index, linear in enumerate(maps):
            errors[index] += float((F.linear(x.to(linear.dtype), linear) - y).square().sum())
    return maps[errors.index(min(errors))]
