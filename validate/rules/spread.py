"""How a matrix's rows and columns spread."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Norms of rows and columns that spread by no more than this beyond what independent numbers do.
LIKENESS = 0.5
# Kurtosis of a uniform and a normal distribution is 1.8 and 3.
INITIALIZERS = (1.7, 3.3)


@dataclass(frozen=True)
class Spread:
    """How the norms of a matrix's rows and columns spread, as shares of what those of independent numbers do.

    Attributes:
        rows, columns: standard deviation over mean, measured over expected.
        kurtosis: of all values; 1.8 for a uniform, 3 for a normal distribution.
    """

    rows: float
    columns: float
    kurtosis: float

    @property
    def is_initial(self) -> bool:
        """Whether the matrix looks like independent numbers of one distribution, as initializers draw them."""
        alike = all(abs(share - 1) < LIKENESS for share in (self.rows, self.columns))
        return alike and INITIALIZERS[0] < self.kurtosis < INITIALIZERS[1]


def measure_spread(matrix: torch.Tensor) -> Spread | None:
    """Measure a matrix `[rows, columns]`; None where it is constant or too small to tell."""
    values = matrix.double()
    square = values.square()
    if min(values.shape) < 16 or not torch.isfinite(values).all() or square.mean() == 0:
        return None
    kurtosis = float(square.square().mean() / square.mean() ** 2)

    def share(dim: int) -> float:
        # The mean of n independent squares spreads by sqrt((kurtosis - 1) / n), and its root by half of that.
        norms = square.mean(dim).sqrt()
        expected = ((kurtosis - 1) / values.shape[dim]) ** 0.5 / 2
        return float(norms.std() / norms.mean()) / expected if expected else float("inf")

    return Spread(share(1), share(0), kurtosis)


def spread_ids(count: int, most: int) -> torch.Tensor:
    """Return row numbers, `[min(count, most)]`, spread evenly over all of `count`."""
    return torch.linspace(0, count - 1, min(count, most)).long()
