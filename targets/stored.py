"""A weight as a target stores it, read as plain numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from ..checkpoint.header import TensorInfo
from ..checkpoint.rows import read_span
from ..checkpoint.tensors import read_tensor

# Elements that are dequantized at a time: some ten MiB with all that comes between.
BLOCK = 1 << 21


class Stored(Protocol):
    """A weight in whatever form it is stored.

    Attributes:
        name: its name as a plain tensor, e.g. "model.layers.1.mlp.experts.0.up_proj.weight".
        shape: its dims as a plain tensor.
        dtype: safetensors name of what it is read as.
        form: of the stored form, as `target.source_formats` names it.
        infos: the tensors on disk that it is made of.
    """

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def form(self) -> str: ...
    @property
    def infos(self) -> tuple[TensorInfo, ...]: ...

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yield a matrix dequantized, in consecutive blocks of rows of about `BLOCK` elements."""
        ...

    def read(self) -> torch.Tensor:
        """Return it whole, dequantized, in memory of its own."""
        ...


@dataclass(frozen=True)
class Plain:
    """A tensor that is stored as what it is."""

    info: TensorInfo
    form = "plain"

    @property
    def name(self) -> str:
        """Its name on disk."""
        return self.info.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dims."""
        return self.info.shape

    @property
    def dtype(self) -> str:
        """Its dtype on disk."""
        return self.info.dtype

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        """Itself."""
        return (self.info,)

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yield a matrix in consecutive blocks of rows."""
        for begin, end in spans(self.shape):
            yield read_span(self.info, begin, end)

    def read(self) -> torch.Tensor:
        """Return it whole."""
        return read_tensor(self.info)


def spans(shape: tuple[int, ...], multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Yield the row ranges that cut a matrix into blocks of about `BLOCK` elements.

    Args:
        shape: [rows, columns].
        multiple: each range but the last is a multiple of it.
    """
    rows, columns = shape
    step = max(BLOCK // max(columns, 1) // multiple, 1) * multiple
    for begin in range(0, rows, step):
        yield begin, min(begin + step, rows)
