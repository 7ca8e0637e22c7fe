"""Tensors of an output that are computed rather than copied: in blocks, each when its turn comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..checkpoint.header import TensorInfo
from ..errors import TensorValue

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Computed:
    """A computed tensor.

    Attributes:
        reason: what it is and why, in one sentence for the manifest.
        blocks: computes it, in consecutive blocks along its first dim.
    """

    dtype: str
    shape: tuple[int, ...]
    reason: str
    blocks: Callable[[], Iterable[Tensor]]


def from_values(values: Tensor, reason: str) -> Computed:
    """Return a small tensor that is in memory."""
    from ..checkpoint.tensors import NAMES

    return Computed(NAMES[values.dtype], tuple(values.shape), reason, lambda: [values])


def from_target(info: TensorInfo, reason: str) -> Computed:
    """Return a matrix of the target, unchanged."""

    def blocks() -> Iterator[Tensor]:
        from ..checkpoint.tensors import row_blocks

        return row_blocks(info)

    return Computed(info.dtype, info.shape, reason, blocks)


def zeros(dtype: str, shape: tuple[int, ...]) -> Computed:
    """Return a matrix of zeros."""

    def blocks() -> Iterator[Tensor]:
        import torch

        from ..checkpoint.tensors import ROWS, TORCH

        rows, *rest = shape
        return (torch.zeros(min(ROWS, rows - begin), *rest, dtype=TORCH[dtype]) for begin in range(0, rows, ROWS))

    return Computed(dtype, shape, "engines need it; with zeros the drafter drafts the same", blocks)


def chosen_rows(matrix: TensorInfo, ids: Tensor, reason: str) -> Computed:
    """Return the rows `ids` of a stored matrix, in this order."""

    def blocks() -> Iterator[Tensor]:
        import torch

        from ..checkpoint.tensors import ROWS, read_rows

        return (read_rows(matrix, some) for some in torch.split(ids, ROWS))

    return Computed(matrix.dtype, (len(ids), matrix.shape[1]), reason, blocks)


def spread_rows(matrix: TensorInfo, ids: Tensor, vocab: int, filler: Tensor, reason: str) -> Computed:
    """Return a matrix of `vocab` rows: row k of the stored one at `ids[k]`, the filler everywhere else."""

    def blocks() -> Iterator[Tensor]:
        import torch

        from ..checkpoint.tensors import ROWS, read_rows

        row_of = torch.full((vocab,), -1).index_copy(0, ids, torch.arange(len(ids)))
        for rows in torch.split(row_of, ROWS):
            block = filler.repeat(len(rows), 1)
            trained = rows >= 0
            block[trained] = read_rows(matrix, rows[trained])
            yield block

    return Computed(matrix.dtype, (vocab, matrix.shape[1]), reason, blocks)


def rounded(name: str, own: str, dtype: str, shape: tuple[int, ...], read: Callable[[], Iterable[Tensor]]) -> Computed:
    """Return a tensor rounded to the nearest value of another dtype, ties to even.

    `own` names its dtype; `read` reads it, in consecutive blocks along its first dim. A value beyond the other dtype's
    range is a TensorValue, raised by `blocks`.
    """

    def blocks() -> Iterator[Tensor]:
        import torch

        from ..checkpoint.tensors import TORCH

        for block in read():
            found = block.to(TORCH[dtype])
            beyond = int((torch.isinf(found) & ~torch.isinf(block)).sum())
            if beyond:
                raise TensorValue(
                    f"{beyond} values of {name} exceed the range of {dtype}", where=name, fix="Remove --dtype."
                )
            yield found

    return Computed(dtype, shape, f"{own} rounded to the nearest {dtype}, ties to even", blocks)
