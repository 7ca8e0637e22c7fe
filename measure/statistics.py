"""The uncertainty of measured acceptance: one statistic for each question.

Every acceptance has an uncertainty. Positions within a sequence are correlated, so errors are taken over sequences. An
acceptance length is 1 + R, with R = (accepted tokens) / (drafts) over all sequences: a ratio of two sums, in which a
sequence i moves R by about e_i = (a_i - R n_i) / N. So the variance of R over m sequences is m / (m - 1) * sum(e_i^2)
(the linearized variance of a ratio under cluster sampling: Cochran, Sampling Techniques, 3rd ed., section 6.4). Two
drafters on the same sequences are compared by the differences of their e_i, which removes what they have in common.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..drafters.chain import Acceptance, pool


def influences(parts: Sequence[Acceptance]) -> Tensor:
    """Return how much each sequence moves the pooled figures: `[m, K + 1]`, each position's rate, then the length."""
    accepted = torch.tensor([part.accepted for part in parts], dtype=torch.float64)
    drafts = torch.tensor([part.drafts for part in parts], dtype=torch.float64)[:, None]
    accepted = torch.cat([accepted, accepted.sum(1, keepdim=True)], dim=1)
    rates = accepted.sum(0) / drafts.sum()
    return (accepted - rates * drafts) / drafts.sum()


def standard_errors(moved: Tensor) -> list[float | None]:
    """Return the standard error of each pooled figure, from `influences`; None for a single sequence.

    For two drafters on the same sequences, the difference of their influences gives the paired standard errors.
    """
    count = len(moved)
    if count < 2:
        return [None] * moved.shape[1]
    return (moved.square().sum(0) * (count / (count - 1))).sqrt().tolist()


def share_kept(source: Sequence[Acceptance], output: Sequence[Acceptance]) -> tuple[float, float | None]:
    """Return the share of its source's acceptance length that a head retains, and its paired standard error.

    Args:
        source, output: the acceptance of each on the same sequences, in one order.
    """
    before, after = pool(source), pool(output)
    kept = after.length / before.length
    return kept, standard_errors((influences(output) - kept * influences(source)) / before.length)[-1]
