"""Acceptance over many sequences, with its uncertainty.

Positions of one sequence hang together, so the sequences are what is independent, and errors are taken over them. An
acceptance length is 1 + R, with R = (accepted tokens) / (drafts) over all sequences: a ratio of two sums, in which a
sequence i moves R by about e_i = (a_i - R n_i) / N. So the variance of R over m sequences is m / (m - 1) * sum(e_i^2)
(the linearized variance of a ratio under cluster sampling: Cochran, Sampling Techniques, 3rd ed., section 6.4). Two
drafters on the same sequences are compared by the differences of their e_i, whatever the two have in common being gone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..head.chain import Acceptance


def influences(parts: Sequence[Acceptance]) -> Tensor:
    """Return by how much each sequence moves the pooled figures: `[m, K + 1]`, each place's rate and then the length.

    Args:
        parts: the acceptance on each of m sequences, of the same K.
    """
    accepted = torch.tensor([part.accepted for part in parts], dtype=torch.float64)
    drafts = torch.tensor([part.drafts for part in parts], dtype=torch.float64)[:, None]
    accepted = torch.cat([accepted, accepted.sum(1, keepdim=True)], dim=1)
    rates = accepted.sum(0) / drafts.sum()
    return (accepted - rates * drafts) / drafts.sum()


def standard_errors(moved: Tensor) -> list[float | None]:
    """Return the standard error of each pooled figure, from `influences`; None where there is but one sequence.

    For two drafters on the same sequences, the difference of their influences gives the paired standard errors.
    """
    count = len(moved)
    if count < 2:
        return [None] * moved.shape[1]
    return (moved.square().sum(0) * (count / (count - 1))).sqrt().tolist()
