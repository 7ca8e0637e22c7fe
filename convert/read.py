"""A checkpoint read as a head. What belongs here: layout found, spec read, every tensor claimed by a slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..checkpoint.folder import Checkpoint
from ..checkpoint.header import TensorInfo
from ..checkpoint.tensors import read_tensor
from ..errors import UnknownLayout
from ..head.contract import FLOATS, check_d2t, compare
from ..head.slots import needs
from ..head.spec import HeadSpec
from .captured import Hints
from .config import ReadConfig, read_config
from .layout import Layout, Stored, stored, unclaimed
from .layouts import detect


@dataclass(frozen=True)
class Head:
    """A head on disk, with each tensor claimed by a row of its layout.

    Attributes:
        checkpoint: the folder.
        layout: the layout it is in.
        read: what its config says.
        places: stored tensor and header entry, by each slot that is present.
    """

    checkpoint: Checkpoint
    layout: Layout
    read: ReadConfig
    places: Mapping[str, tuple[Stored, TensorInfo]]

    @property
    def spec(self) -> HeadSpec:
        """What the head is."""
        return self.read.spec


def read_head(checkpoint: Checkpoint, *, layout: Layout | None = None, hints: Hints | None = None) -> Head:
    """Read a checkpoint as a head, looking at config and headers, and at the values of d2t alone.

    Args:
        checkpoint: an opened folder.
        layout: the layout it is in; found by its marks if None.
        hints: what the user says where the config is silent or ambiguous.

    Raises:
        UnknownLayout, ConfigInvalid, ConfigUnsupported, CapturedUndecided: the config cannot be read.
        TensorMissing, TensorUnknown, TensorShape, TensorValue: the tensors are not what it demands.
    """
    layout = layout or detect(checkpoint.config, checkpoint.tensors)
    read = read_config(checkpoint.config, checkpoint.tensors, dtype=weight_dtype(checkpoint), hints=hints or Hints())
    rows = stored(layout, read.spec)
    breaches = compare(
        {name: row.expected for name, row in rows.items()},
        checkpoint.tensors,
        ignored=layout.ignored,
        unclaimed=unclaimed(layout, read.spec),
    )
    if breaches:
        raise breaches[0].error()
    places = {
        slot: (row, checkpoint.tensors[name])
        for name, row in rows.items()
        if name in checkpoint.tensors
        for slot in row.slots
    }
    head = Head(checkpoint, layout, read, places)
    if "d2t" in places:
        for breach in check_d2t(read.spec, read_slot(head, "d2t"), places["d2t"][0].name):
            raise breach.error()
    return head


def read_slot(head: Head, slot: str) -> torch.Tensor:
    """Read one slot's tensor, unpacked from wherever the layout keeps it.

    Raises:
        KeyError: the head does not hold the slot.
    """
    row, info = head.places[slot]
    known = needs(head.spec)
    return row.move.unpack(read_tensor(info), [known[s].shape for s in row.slots])[row.slots.index(slot)]


def read_weights(head: Head) -> dict[str, torch.Tensor]:
    """Read every slot that the head holds into memory."""
    return {slot: read_slot(head, slot) for slot in head.places}


def weight_dtype(checkpoint: Checkpoint) -> str:
    """Return the dtype that most of a checkpoint's weight bytes are in.

    Raises:
        UnknownLayout: it holds no floating-point weights.
    """
    sizes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        if info.dtype in FLOATS:
            sizes[info.dtype] += info.size
    if not sizes:
        raise UnknownLayout(
            "the checkpoint holds no BF16, F16 or F32 weights",
            where=checkpoint.folder,
            fix="Give the unquantized head.",
        )
    return sizes.most_common(1)[0][0]
