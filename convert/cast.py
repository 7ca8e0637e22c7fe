"""Weights in another dtype, asked for by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import TensorValue

if TYPE_CHECKING:
    from torch import Tensor

# What a user may ask for, by torch's name.
DTYPES = {"bfloat16": "BF16"}


@dataclass(frozen=True)
class Cast:
    """A stored or packed tensor, rounded to the nearest value of another dtype, ties to even.

    Attributes:
        name: of the tensor, for messages.
        dtype: safetensors name of the dtype it becomes.
        shape: its dims.
        reason: for the manifest.
        blocks: reads it, in consecutive blocks along its first dim.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    reason: str
    blocks: Callable[[], Iterable[Tensor]]

    def make(self) -> Iterator[Tensor]:
        """Yield the rounded blocks.

        Raises:
            TensorValue: a value is beyond the dtype's range.
        """
        import torch

        from ..checkpoint.tensors import TORCH

        for block in self.blocks():
            rounded = block.to(TORCH[self.dtype])
            beyond = int((torch.isinf(rounded) & ~torch.isinf(block)).sum())
            if beyond:
                raise TensorValue(
                    f"{beyond} values of {self.name} are beyond the range of {self.dtype}",
                    where=self.name,
                    fix="Leave --dtype out.",
                )
            yield rounded
