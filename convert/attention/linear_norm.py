"""A normed latent as a linear map.

`n(Wx) = g * Wx / rms(Wx)` is a linear map times a number that differs from token to token, so no linear map equals
it: the number multiplies each key and value (a temperature per key), or each query (a temperature per query), and
the softmax cancels neither. What is nearest depends on the data:

* `s * g * W` with one number s, fitted: the right direction, the wrong length;
* least squares from x to n(Wx), drawn towards the former by a ridge: it takes up whatever of the length can be told
  from x linearly. The ridge is the one under which rows that were not fitted come out best.

Without data there is no s to begin with: a guess of it keeps half of the acceptance (docs/attention.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...head.attention import rms_norm
from .moments import Moments

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


@dataclass(frozen=True)
class Latent:
    """A latent of an MLA head: `[rank, attn_in]` and the gain `[rank]` of its norm."""

    down: Tensor
    gain: Tensor
    eps: float

    @property
    def scaled(self) -> Tensor:
        """The map without the norm, `g * W`."""
        return self.gain[:, None] * self.down

    def normed(self, x: Tensor) -> Tensor:
        """Return n(Wx) of rows `[N, attn_in]`, as the head computes it."""
        return rms_norm(F.linear(x, self.down.to(x.dtype)), self.gain.to(x.dtype), self.eps)


@dataclass(frozen=True)
class Linearized:
    """A linear map in place of a normed latent, and how far it is from it on rows it was not fitted on.

    Attributes:
        map: `[rank, attn_in]`.
        constant: s, the one number that fits best.
        ridge: the chosen one; infinite for the constant alone.
        error: relative error of the latent, `|Lx - n(Wx)| / |n(Wx)|`, root mean square.
        constant_error: the same of `s * g * W`.
    """

    map: Tensor
    constant: float
    ridge: float
    error: float
    constant_error: float


def gather(rows: Iterable[Tensor], latents: Sequence[Latent]) -> list[Moments]:
    """Sum up inputs `[N, attn_in]` against each latent's normed values, in one pass."""
    width = latents[0].down.shape[1]
    ranks = [len(latent.gain) for latent in latents]
    moments = Moments(width, sum(ranks), latents[0].down.device)
    for x in rows:
        moments.add(x, torch.cat([latent.normed(x) for latent in latents], dim=-1))
    return moments.split(ranks)


def linearize(latent: Latent, moments: Moments, rows: Iterable[Tensor], ridges: Sequence[float] = RIDGES) -> Linearized:
    """Return the linear map that stands in for a normed latent.

    Args:
        latent: the latent.
        moments: of the rows to fit on, as `gather` gives them.
        rows: other rows, `[N, attn_in]` each, which choose the ridge; gone through once.
        ridges: to choose from; empty for the constant alone.
    """
    plain = latent.scaled.to(moments.xx.dtype)
    constant = float((plain * moments.xy.T).sum() / ((plain @ moments.xx) * plain).sum())
    prior = constant * plain
    maps = {math.inf: prior} | {ridge: moments.solve(prior, ridge) for ridge in ridges}
    apart, whole = dict.fromkeys(maps, 0.0), 0.0
    for x in rows:
        wanted = latent.normed(x)
        whole += float(wanted.double().square().sum())
        for ridge, linear in maps.items():
            apart[ridge] += float((F.linear(x, linear.to(x.dtype)) - wanted).double().square().sum())
    errors = {ridge: (lost / whole) ** 0.5 for ridge, lost in apart.items()}
    best = min(errors, key=lambda ridge: errors[ridge])
    return Linearized(maps[best], constant, best, errors[best], errors[math.inf])
