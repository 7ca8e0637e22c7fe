"""Reversible packings between canonical slots and stored tensors.

Here, and in planning and executing, only the code that computes imports torch: the import takes more than a
second, half the time of copying a head that is only renamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Same:
    """One slot, stored unchanged."""

    def stored_shape(self, parts: Sequence[Shape]) -> Shape:
        """Return the stored tensor's shape, given the slots' shapes."""
        return parts[0]

    def pack(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Build the stored tensor from the slots' tensors."""
        return parts[0]

    def unpack(self, stored: torch.Tensor, parts: Sequence[Shape]) -> list[torch.Tensor]:
        """Split the stored tensor into the slots' tensors, of the given shapes."""
        return [stored]


@dataclass(frozen=True)
class Stack:
    """Several slots, concatenated along the output dim (dim 0), like fused linear layers."""

    def stored_shape(self, parts: Sequence[Shape]) -> Shape:
        return (sum(part[0] for part in parts), *parts[0][1:])

    def pack(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        return torch.cat(list(parts), dim=0)

    def unpack(self, stored: torch.Tensor, parts: Sequence[Shape]) -> list[torch.Tensor]:
        import torch

        return list(torch.split(stored, [part[0] for part in parts], dim=0))


# How slots become one stored tensor and are restored from it, bit for bit. Both put the slots' bytes one after the
# other, so a slot is read and copied by where it lies.
Move = Same | Stack
