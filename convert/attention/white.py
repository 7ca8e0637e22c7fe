"""Matrices in coordinates where their inputs are white.

A head's inputs are far from even: all tokens share a mean, and a few directions hold most of the rest. A step that
has one size in every direction of a matrix then changes the output mostly along those, where it was right before.
With `L L^T = E[x x^T]` over the inputs x of a matrix W, `V = W L` computes the same from inputs `L^-1 x` that are
white; steps of V are even in what they do to the output. (Natural gradient with K-FAC's factor of the inputs,
arXiv 1503.05671, is the same change of coordinates.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...head.chain import unroll
from ...head.forward import DraftHead
from .calibration import STEPS, Batch, in_pieces
from .moments import Moments, factor

# Directions with less than this share of the mean are no finer. Less, and a step moves what only rare tokens read by
# much more than what all do: whole texts of such tokens then ended farther from the original than they began.
FLOOR = 0.1


class _Inputs(TorchFunctionMode):
    """Sums up what goes into the linear maps by some matrices."""

    def __init__(self, matrices: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(matrix): name for name, matrix in matrices.items()}
        self.moments = {name: Moments(m.shape[1], device=m.device) for name, m in matrices.items()}

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.linear and id(args[1]) in self._names:
            self.moments[self._names[id(args[1])]].add(args[0].flatten(0, -2))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Spread:
    """How a matrix's inputs spread, and how large what it makes of them is.

    Attributes:
        factor: L, lower triangular `[n, n]`.
        size: of an entry of V, root mean square: of what W gives, over the root of n. Entries of W that cancel on all
            inputs, as those behind a latent with too many entries do, have no part in it.
    """

    factor: Tensor
    size: float


@torch.no_grad()
def measure_spread(head: DraftHead, names: Iterable[str], batches: Iterable[Batch]) -> dict[str, Spread]:
    """Return the spread of the inputs of some of a head's matrices, K steps along the chain."""
    with _Inputs({name: head.weights[name] for name in names}) as watched:
        for piece in in_pieces(batches, head.spec.draft_vocab):
            for _ in unroll(head, piece.tokens, piece.captured, STEPS):
                pass
    # Each matrix's moments go as its factor comes: at Kimi-K2's size all of either are 5 GB.
    return {name: _spread(head.weights[name], watched.moments.pop(name)) for name in list(watched.moments)}


def _spread(weight: Tensor, moments: Moments) -> Spread:
    mean = moments.mean()
    given = (weight.to(mean.dtype) @ mean * weight).sum().clamp(min=0)
    return Spread(factor(mean, FLOOR).to(weight.dtype), float((given / weight.numel()).sqrt()))


def to_white(weight: Tensor, spread: Spread) -> Tensor:
    """Return V = W L."""
    return weight @ spread.factor


def from_white(weight: Tensor, spread: Spread) -> Tensor:
    """Return W = V L^-1."""
    return torch.linalg.solve_triangular(spread.factor, weight, upper=False, left=False)
