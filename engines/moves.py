"""How canonical slots become stored tensors, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Same:
    """One slot, stored unchanged."""

    def stored_shape(self, parts: Sequence[Shape]) -> Shape:
        """Return the stored tensor's shape, given the slots' shapes."""
        return parts[0]


@dataclass(frozen=True)
class Stack:
    """Several slots, concatenated along the output dim (dim 0), like fused linear layers."""

    def stored_shape(self, parts: Sequence[Shape]) -> Shape:
        return (sum(part[0] for part in parts), *parts[0][1:])


# Both put the slots' bytes one after the other, so a slot is read and copied by where it lies.
Move = Same | Stack
