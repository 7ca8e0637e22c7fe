"""What a head may share with its target: the embedding and lm_head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..checkpoint.bytes import stream
from ..checkpoint.header import TensorInfo
from ..errors import KconvError, TargetInvalid
from ..head.contract import FLOATS
from ..head.slots import needs
from ..head.spec import HeadSpec

if TYPE_CHECKING:
    from torch import Tensor

SLOTS = ("lm_head", "embed_tokens")


@dataclass(frozen=True)
class Shared:
    """The target's tensors that a head may share.

    Attributes:
        name: of the target, as the user gave it.
        tensors: header entries of those of `SLOTS` that were found, by slot.
        headers_only: their bytes are on the Hub.
        layers: number of its decoder layers; None where that is not known.
        model_type: of its text model, e.g. "kimi_k2"; empty where that is not known.
        absent: why a slot's tensor cannot be had though the target has one, e.g. as its shard is not there.
    """

    name: str
    tensors: Mapping[str, TensorInfo]
    headers_only: bool = False
    layers: int | None = None
    model_type: str = ""
    absent: Mapping[str, KconvError] = field(default_factory=dict)

    def find(self, slot: str) -> TensorInfo | None:
        """Return the tensor that the target has for a slot; None where it has none.

        Raises:
            KconvError: it has one, which cannot be had.
        """
        if slot in self.absent:
            raise self.absent[slot]
        return self.tensors.get(slot)

    @property
    def lm_head(self) -> TensorInfo:
        """The target's own lm_head, whose vocabulary may be larger than a head's.

        Raises:
            TargetInvalid: it has none.
            KconvError: see `find`.
        """
        info = self.find("lm_head")
        if info is None:
            raise TargetInvalid(
                "the target has no lm_head, which its logits are made with",
                where=self.name,
                fix="Give the target that the head was trained on.",
            )
        return info

    def lend(self, slot: str, spec: HeadSpec) -> TensorInfo:
        """Return the tensor that fills a head's slot.

        Raises:
            TargetInvalid: the target does not hold it, or not in the shape and dtype that the head needs.
            KconvError: see `find`.
        """
        info, shape = self.find(slot), needs(spec)[slot].shape
        if info is None or info.shape != shape or info.dtype not in FLOATS:
            found = f"{info.name} {info.dtype} {list(info.shape)}" if info else "none"
            raise TargetInvalid(
                f"the head needs the target's {slot} of shape {list(shape)}, and the target has {found}",
                where=self.name,
                fix="Give the unquantized target that the head was trained on.",
            )
        return info

    def has_another(self, slot: str, own: TensorInfo, spec: HeadSpec) -> bool:
        """Say whether the target's tensor would fit a head's slot, and is another than the head's own.

        Compared row by row, in the head's dtype; a tensor of which the bytes are on the Hub is not said to be another.

        Raises:
            KconvError: see `find`.
        """
        theirs = self.find(slot)
        if theirs is None or self.headers_only or theirs.dtype not in FLOATS or own.dtype not in FLOATS:
            return False
        from .copies import count_copies

        fits = needs(spec)[slot].slot.absent_when(spec)
        copies = count_copies(own, theirs, None) if fits else None
        return copies is not None and copies.by_offset < copies.rows


@dataclass(frozen=True)
class Lent:
    """A tensor of the target, as it is."""

    info: TensorInfo
    reason: str

    @property
    def dtype(self) -> str:
        return self.info.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    def make(self) -> Iterator[Tensor]:
        from ..checkpoint.tensors import row_blocks

        yield from row_blocks(self.info)


def same_bytes(one: TensorInfo, other: TensorInfo) -> bool:
    """Say whether two stored tensors are the same, byte by byte."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(a == b for a, b in zip(stream(one), stream(other), strict=True))
