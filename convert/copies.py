"""Rows of a head's lm_head that are its target's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoint.header import TensorInfo
from ..checkpoint.tensors import ROWS, read_rows
from ..head.vocab import target_ids


@dataclass(frozen=True)
class Copies:
    """How many rows of lm_head are the target's, bit for bit, after a cast to the head's dtype.

    Attributes:
        rows: number of rows.
        by_offset: rows i that equal the target's row `i + d2t[i]` (row i where there is no map).
        by_id: rows i that equal the target's row `d2t[i]`; as `by_offset` where there is no map.
    """

    rows: int
    by_offset: int
    by_id: int


def count_copies(lm_head: TensorInfo, reference: TensorInfo, d2t: Tensor | None) -> Copies | None:
    """Compare a head's lm_head with its target's.

    Args:
        lm_head: [draft_vocab, hidden].
        reference: the target's lm_head, [vocab, target_hidden].
        d2t: [draft_vocab] integers; None where there is no map.

    Returns:
        None where the widths differ.
    """
    rows = lm_head.shape[0]
    if lm_head.shape[1:] != reference.shape[1:] or (d2t is not None and len(d2t) != rows):
        return None
    if d2t is None:
        equal = _count_equal(lm_head, reference, torch.arange(rows))
        return Copies(rows, equal, equal)
    return Copies(rows, _count_equal(lm_head, reference, target_ids(d2t)), _count_equal(lm_head, reference, d2t.long()))


def _count_equal(lm_head: TensorInfo, reference: TensorInfo, ids: Tensor) -> int:
    equal = 0
    for own in torch.arange(len(ids)).split(ROWS):
        own = own[(ids[own] >= 0) & (ids[own] < reference.shape[0])]
        rows = read_rows(lm_head, own)
        equal += int((rows == read_rows(reference, ids[own]).to(rows.dtype)).all(dim=1).sum())
    return equal
