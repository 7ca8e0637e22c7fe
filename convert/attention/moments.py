"""Streamed second moments, and least squares from them.

A linear map B from x to y that minimizes `E|Bx - y|^2 + ridge * |B - prior|^2` needs only the sums `x^T x` and `x^T y`.
So rows are streamed, and memory holds only the sums: 1.6 GB for 14,336 inputs of Kimi-K2's attention, whatever the
number of rows.

Sums and factors are fp64 at every width. All tokens share a mean, so the largest eigenvalue of `x^T x` is a large part
of its trace: thousands of times the mean of the diagonal at such a width. The rounding of fp32 can then exceed the
smallest eigenvalues and the ridge, and such a sum has no Cholesky factor.

Refitting o_proj.

The converted heads give slightly different values from the original's. A linear map from them to the original's
attention output on the same inputs corrects what it can.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...drafters.forward import DraftHead
from ...measure.batches import Calibration
from ...measure.trace import run_both

# The dtype for converting an attention, until the head is assembled.
DTYPE = torch.float64
# Added to the diagonal, relative to its mean, so that a direction without rows does not divide by 0.
FLOOR = 1e-7


class Moments:
    """Sums over rows.

    Attributes:
        xx: `[n, n]`, the sum of `x x^T`.
        xy: `[n, m]`, the sum of `x y^T`; of width 0 without y.
        rows: number of rows.
    """

    def __init__(self, n: int, m: int = 0, device: torch.device | str = "cpu") -> None:
        self.xx = torch.zeros(n, n, dtype=DTYPE, device=device)
        self.xy = torch.zeros(n, m, dtype=DTYPE, device=device)
        self.rows = 0

    def add(self, x: Tensor, y: Tensor | None = None) -> None:
        """Add rows `x [N, n]`, `y [N, m]`."""
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
        """Return the map `[m, n]` that fits y from x, regularized towards a prior of that shape.

        The ridge is relative to the mean of `x x^T`'s diagonal.
        """
        strength = (ridge + FLOOR) * self.xx.diagonal().mean()
        factor = torch.linalg.cholesky(_add_to_diagonal(self.xx, strength))
        return torch.cholesky_solve(self.xy + strength * prior.T.to(DTYPE), factor).T


def factor(mean: Tensor, floor: float = FLOOR) -> Tensor:
    """Return L with `L L^T = E[x x^T]`, so that `|W L|^2` is `E|W x|^2`; `[n, n]`."""
    return torch.linalg.cholesky(_add_to_diagonal(mean, floor * mean.diagonal().mean()))


def _add_to_diagonal(matrix: Tensor, value: Tensor) -> Tensor:
    """Return `matrix + value * I` without building the identity: at 14,336 inputs it takes 1.6 GB."""
    raised = matrix.clone()
    raised.diagonal().add_(value)
    return raised


def root(matrix: Tensor, floor: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return the square root of Hermitian matrices `[..., n, n]` and its inverse.

    Eigenvalues below `floor` times the largest are raised to it: a direction that no query uses has no weight, and must
    not get an infinite one on the way back.
    """
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp(min=(floor * values[..., -1:]).clamp(min=torch.finfo(values.dtype).tiny)).sqrt()
    adjoint = vectors.mH
    return (vectors * values[..., None, :]) @ adjoint, (vectors / values[..., None, :]) @ adjoint


RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


def refit_output(original: DraftHead, converted: DraftHead, calibration: Calibration) -> Tensor:
    """Return the converted attention's o_proj `[hidden, attn_out]`, regularized towards the current one."""
    own = converted.weights["0.o_proj"]
    moments = Moments(own.shape[1], own.shape[0], own.device)
    for pair in run_both(original, converted, calibration.part("fit")):
        moments.add(pair.heads, pair.original)
    unseen = run_both(original, converted, calibration.part("choose"))
    return choose(moments, own, ((pair.heads, pair.original) for pair in unseen), RIDGES)


def choose(moments: Moments, prior: Tensor, unseen: Iterable[tuple[Tensor, Tensor]], ridges: Sequence[float]) -> Tensor:
    """Return the least squares map of one of the ridges, or the prior: the nearest on rows outside the fit.

    The prior is `[m, n]`. `unseen` yields those other rows, `(x [N, n], y [N, m])`, and is read once.
    """
    maps = [prior.to(moments.xx.dtype), *(moments.solve(prior, ridge) for ridge in ridges)]
    errors = [0.0] * len(maps)
    for x, y in unseen:
        for index, linear in enumerate(maps):
            errors[index] += float((F.linear(x.to(linear.dtype), linear) - y).square().sum())
    return maps[errors.index(min(errors))]
