"""Second moments, streamed, and what least squares makes of them. What belongs here: sums over rows, one solve.

A linear map B from x to y that minimises `E|Bx - y|^2 + ridge * |B - prior|^2` needs only the sums `x^T x` and
`x^T y`, so rows come and go and the memory is that of the sums: 14,336 inputs of Kimi-K2's attention take 0.8 GB in
fp32, whatever the number of rows. Products of a block are added in fp64 below `WIDE` inputs, and in fp32 above.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDE = 8192
# What is added to the diagonal, relative to its mean, so that a direction which no row has does not divide by 0.
FLOOR = 1e-7


def working_dtype(width: int) -> torch.dtype:
    """Return what is computed in for an attention with this many inputs."""
    return torch.float64 if width < WIDE else torch.float32


class Moments:
    """Sums over rows.

    Attributes:
        xx: `[n, n]`, the sum of `x x^T`.
        xy: `[n, m]`, the sum of `x y^T`; of width 0 where no y is given.
        rows: how many.
    """

    def __init__(self, n: int, m: int = 0, device: torch.device | str = "cpu") -> None:
        dtype = working_dtype(n)
        self.xx = torch.zeros(n, n, dtype=dtype, device=device)
        self.xy = torch.zeros(n, m, dtype=dtype, device=device)
        self.rows = 0

    def add(self, x: Tensor, y: Tensor | None = None) -> None:
        """Take in rows `x [N, n]`, `y [N, m]`."""
        x = x.to(self.xx.dtype)
        self.xx.addmm_(x.T, x)
        if y is not None:
            self.xy.addmm_(x.T, y.to(x.dtype))
        self.rows += len(x)

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
        return torch.cholesky_solve(self.xy + strength * prior.T.to(self.xx.dtype), factor).T


def factor(mean: Tensor, floor: float = FLOOR) -> Tensor:
    """Return L with `L L^T = E[x x^T]`, so that `|W L|^2` is `E|W x|^2`; `[n, n]`."""
    return torch.linalg.cholesky(_add_to_diagonal(mean, floor * mean.diagonal().mean()))


def _add_to_diagonal(matrix: Tensor, value: Tensor) -> Tensor:
    """Return `matrix + value * I`, without an identity as large: at 14,336 inputs it is 0.8 GB."""
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
