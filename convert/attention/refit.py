"""o_proj, fitted again. What belongs here: the last linear map of a converted attention, made to fit what it now gets.

The converted heads give somewhat other values than the original's. A linear map from them to the attention output
that the original gave on the same inputs takes back what it can of that.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    unseen = list(run_both(original, converted, calibration.part("choose")))
    return choose(moments, own.double(), [(pair.heads, pair.original) for pair in unseen], RIDGES)


def choose(moments: Moments, prior: Tensor, unseen: Sequence[tuple[Tensor, Tensor]], ridges: Sequence[float]) -> Tensor:
    """Return the solution, or the prior, that is nearest to y on rows `(x [N, n], y [N, m])` that were not fitted."""

    def error(linear: Tensor) -> float:
        return sum(float((x.double() @ linear.T.double() - y.double()).square().sum()) for x, y in unseen)

    return min([prior, *(moments.solve(prior, ridge) for ridge in ridges)], key=error)
