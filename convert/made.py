"""Tensors of an output that are computed, in blocks, when their turn comes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..checkpoint.header import TensorInfo
from ..checkpoint.tensors import NAMES, ROWS, read_rows


class Made(Protocol):
    """A tensor that no source holds, in whole or in slots: what it will be, and how it is computed."""

    @property
    def dtype(self) -> str:
        """Its safetensors dtype."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dims."""
        ...

    @property
    def reason(self) -> str:
        """What it is and why, one sentence for the manifest."""
        ...

    def make(self) -> Iterator[Tensor]:
        """Compute it, in consecutive blocks along its first dim."""
        ...


@dataclass(frozen=True)
class Values:
    """A small tensor that is at hand."""

    values: Tensor
    reason: str

    @property
    def dtype(self) -> str:
        return NAMES[self.values.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def make(self) -> Iterator[Tensor]:
        yield self.values


@dataclass(frozen=True)
class Pruned:
    """The rows `ids` of a stored matrix, in this order."""

    matrix: TensorInfo
    ids: Tensor
    reason: str

    @property
    def dtype(self) -> str:
        return self.matrix.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.ids), self.matrix.shape[1])

    def make(self) -> Iterator[Tensor]:
        for ids in self.ids.split(ROWS):
            yield read_rows(self.matrix, ids)


@dataclass(frozen=True)
class Expanded:
    """A matrix of `vocab` rows: row k of the stored one at `ids[k]`, the filler at each other place."""

    matrix: TensorInfo
    ids: Tensor
    vocab: int
    filler: Tensor
    reason: str

    @property
    def dtype(self) -> str:
        return self.matrix.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.vocab, self.matrix.shape[1])

    def make(self) -> Iterator[Tensor]:
        row_of = torch.full((self.vocab,), -1).index_copy(0, self.ids, torch.arange(len(self.ids)))
        for rows in row_of.split(ROWS):
            block = self.filler.repeat(len(rows), 1)
            trained = rows >= 0
            block[trained] = read_rows(self.matrix, rows[trained])
            yield block
