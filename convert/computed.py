"""Tensors of an output that are computed rather than copied: in blocks, each when its turn comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from ..checkpoint.bytes import INTEGERS, ROWS, row_bytes, stream
from ..checkpoint.header import TensorInfo, byte_size
from ..checkpoint.values import cast_floats
from ..errors import TensorValue
from ..lines import counted

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True)
class Computed:
    """A computed tensor.

    Attributes:
        reason: what it is and why, in one sentence for the manifest.
        chunks: computes its bytes, in order and in whole elements.
    """

    dtype: str
    shape: tuple[int, ...]
    reason: str
    chunks: Callable[[], Iterable[bytes | memoryview]]


def from_blocks(dtype: str, shape: tuple[int, ...], reason: str, blocks: Callable[[], Iterable[Tensor]]) -> Computed:
    """Return a tensor that torch computes, in consecutive blocks along its first dim."""

    def chunks() -> Iterator[memoryview]:
        from ..checkpoint.tensors import to_bytes

        return map(to_bytes, blocks())

    return Computed(dtype, shape, reason, chunks)


def from_values(values: Tensor, reason: str) -> Computed:
    """Return a small tensor that is in memory."""
    from ..checkpoint.tensors import NAMES

    return from_blocks(NAMES[values.dtype], tuple(values.shape), reason, lambda: [values])


def from_integers(values: np.ndarray, reason: str) -> Computed:
    """Return a map or a mask that is in memory."""
    dtype = next(name for name, its in INTEGERS.items() if values.dtype == its)
    return Computed(dtype, values.shape, reason, lambda: [values.tobytes()])


def from_target(info: TensorInfo, reason: str) -> Computed:
    """Return a matrix of the target, unchanged."""
    return Computed(info.dtype, info.shape, reason, lambda: stream(info))


def zeros(dtype: str, shape: tuple[int, ...]) -> Computed:
    """Return a matrix of zeros."""

    def chunks() -> Iterator[bytes]:
        rows, *rest = shape
        return (bytes(byte_size(dtype, (min(ROWS, rows - begin), *rest))) for begin in range(0, rows, ROWS))

    return Computed(dtype, shape, "engines need it; with zeros the drafter drafts the same", chunks)


def chosen_rows(matrix: TensorInfo, ids: np.ndarray, reason: str) -> Computed:
    """Return the rows `ids` of a stored matrix, in this order."""

    def chunks() -> Iterator[bytes]:
        return (row_bytes(matrix, ids[begin : begin + ROWS]).tobytes() for begin in range(0, len(ids), ROWS))

    return Computed(matrix.dtype, (len(ids), matrix.shape[1]), reason, chunks)


def spread_rows(matrix: TensorInfo, ids: np.ndarray, vocab: int, filler: Tensor, reason: str) -> Computed:
    """Return a matrix of `vocab` rows: row k of the stored one at `ids[k]`, the filler everywhere else."""

    def blocks() -> Iterator[Tensor]:
        import torch

        from ..checkpoint.tensors import read_rows

        row_of = torch.full((vocab,), -1).index_copy(0, torch.from_numpy(ids), torch.arange(len(ids)))
        for rows in torch.split(row_of, ROWS):
            block = filler.repeat(len(rows), 1)
            trained = rows >= 0
            block[trained] = read_rows(matrix, rows[trained])
            yield block

    return from_blocks(matrix.dtype, (vocab, matrix.shape[1]), reason, blocks)


def rounded(info: TensorInfo, dtype: str) -> Computed:
    """Return a stored weight rounded to the nearest value of another dtype, ties to even.

    A value beyond the other dtype's range is a TensorValue, raised by `chunks`.
    """

    def chunks() -> Iterator[memoryview]:
        for chunk in stream(info):
            found, beyond = cast_floats(chunk, info.dtype, dtype)
            if beyond:
                raise TensorValue(
                    f"{info.name} has {counted(beyond, 'value')} beyond the range of {dtype}",
                    where=info.file,
                    fix="Remove --dtype.",
                )
            yield found.data.cast("B")

    return Computed(dtype, info.shape, f"{info.dtype} rounded to the nearest {dtype}, ties to even", chunks)


def stacked(parts: Iterable[Computed], shape: tuple[int, ...], reason: str) -> Computed:
    """Return tensors of one dtype, one after the other."""
    parts = list(parts)
    (dtype,) = {part.dtype for part in parts}
    return Computed(dtype, shape, reason, lambda: chain.from_iterable(part.chunks() for part in parts))
