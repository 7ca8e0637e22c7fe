"""o_proj, fitted again.

The converted heads give somewhat other values than the original's. A linear map from them to the attention output
that the original gave on the same inputs takes back what it can of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.nn.functional as F
from torch import Tensor

from ...head.forward import DraftHead
from .calibration import Calibration
from .moments import Moments
from .trace import run_both

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
