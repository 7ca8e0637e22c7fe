"""A checkpoint read as a head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.folder import Checkpoint
from ..checkpoint.formats import CONFIG_KEY, SIDE_FILE
from ..checkpoint.header import TensorInfo
from ..engines import detect
from ..engines.layout import Layout, Stored, ignorable, readable, unclaimed
from ..errors import ConfigInvalid, ConfigUnsupported, LayoutCannot, TensorTwins, TensorUnknown, UnknownLayout
from ..head.contract import FLOATS, Breach, check_d2t, compare, summarize
from ..head.slots import INTEGER, needs
from ..head.spec import HeadSpec
from .captured import Hints
from .config import ReadConfig, read_config
from .quantized import add_scales, has_scales

if TYPE_CHECKING:
    import torch

NO_MAP = "a full vocabulary needs no map, and this one leads each token to itself"


@dataclass(frozen=True)
class Head:
    """A head on disk, with each tensor claimed by a row of its layout.

    Attributes:
        checkpoint: the folder.
        layout: the layout it is in.
        read: what its config says.
        places: stored tensor and header entry, by each slot that is present.
        twins: tensors that repeat what others hold under another name; name and the others' slots.
        ignored: tensors that carry nothing, with the reason.
        hints: what the user said where the config is silent or ambiguous.
    """

    checkpoint: Checkpoint
    layout: Layout
    read: ReadConfig
    places: Mapping[str, tuple[Stored, TensorInfo]]
    twins: Mapping[str, Stored] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    hints: Hints = field(default_factory=Hints)

    @property
    def spec(self) -> HeadSpec:
        """What the head is."""
        return self.read.spec

    @property
    def is_quantized(self) -> bool:
        """Whether a linear is stored with scales."""
        return has_scales(self.places)

    @property
    def side_file(self) -> Path | None:
        """The file beside config.json that says how to read the scales, where there is one."""
        file = self.checkpoint.folder / SIDE_FILE
        return file if self.is_quantized and not self.checkpoint.headers_only and file.is_file() else None


def read_head(checkpoint: Checkpoint, *, layout: Layout | None = None, hints: Hints | None = None) -> Head:
    """Read a checkpoint as a head, looking at config and headers, and at the values of maps and twins alone.

    Args:
        checkpoint: an opened folder.
        layout: the layout it is in; found by its marks if None.
        hints: what the user says where the config is silent or ambiguous.

    Raises:
        UnknownLayout, ConfigInvalid, ConfigUnsupported, CapturedUndecided: the config cannot be read.
        TensorMissing, TensorUnknown, TensorShape, TensorValue: the tensors are not what it demands.
        TensorTwins: two tensors hold the same weight, and differ.
    """
    head = claim_tensors(checkpoint, layout=layout, hints=hints)
    _check_twins(head)
    _check_idle_maps(head)
    if "d2t" in head.places:
        for breach in check_d2t(head.spec, read_slot(head, "d2t"), head.places["d2t"][0].name):
            raise breach.error()
    return head


def claim_tensors(checkpoint: Checkpoint, *, layout: Layout | None = None, hints: Hints | None = None) -> Head:
    """Read a checkpoint as a head like `read_head`, but look at no value: d2t may be no map at all.

    Raises:
        As `read_head`, but TensorValue.
    """
    layout, tensors = layout or detect(checkpoint.config, checkpoint.tensors), checkpoint.tensors
    hints = hints or Hints()
    read = read_config(checkpoint.config, tensors, dtype=weight_dtype(checkpoint), hints=hints, table=layout.config)
    rows = rows_of(layout, read.spec, tensors)
    breaches = find_breaches(layout, read.spec, tensors)
    if breaches:
        raise summarize(breaches).error()
    ignored = ignorable(layout, tensors) | _idle_maps(read.spec, tensors)
    held = {name: row for name, row in rows.items() if name in tensors}
    places = {slot: (row, tensors[name]) for name, row in held.items() for slot in row.slots}
    for slot, need in needs(read.spec).items():
        if slot not in places and not need.slot.absent_when(read.spec):
            raise LayoutCannot(
                f"{layout.name} has no place for {slot}, which the config demands",
                where="config.json",
                fix="Name the layout that the head is in with --from.",
            )
    twins = {name: row for name, row in held.items() if any(places[slot][1].name != name for slot in row.slots)}
    head = Head(checkpoint, layout, read, places, twins, ignored, hints)
    _check_quantization(head)
    return head


def rows_of(layout: Layout, spec: HeadSpec, tensors: Mapping[str, TensorInfo]) -> dict[str, Stored]:
    """Return each tensor that a head of this spec has or may have, by the names and in the formats that are there."""
    return add_scales(readable(layout, spec, tensors), tensors)


def find_breaches(layout: Layout, spec: HeadSpec, tensors: Mapping[str, TensorInfo]) -> list[Breach]:
    """Return every way in which a checkpoint's headers are not what a head of this spec has in a layout.

    Raises:
        LayoutCannot, TensorMissing: a quantized linear that cannot be read; see `convert.quantized`.
    """
    return compare(
        {name: row.expected for name, row in rows_of(layout, spec, tensors).items()},
        tensors,
        ignored=ignorable(layout, tensors) | _idle_maps(spec, tensors),
        unclaimed=unclaimed(layout, spec),
    )


def _idle_maps(spec: HeadSpec, tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Return the maps that trainers save with a full vocabulary; vLLM refuses such a head."""
    dtypes = {"d2t": INTEGER, "t2d": ("BOOL",)}
    return {
        name: NO_MAP
        for name in dtypes.keys() & tensors.keys()
        if spec.draft_vocab == spec.vocab
        and tensors[name].shape == (spec.vocab,)
        and tensors[name].dtype in dtypes[name]
    }


def _check_idle_maps(head: Head) -> None:
    for name, why in head.ignored.items():
        if why == NO_MAP:
            from ..checkpoint.tensors import read_tensor

            values = read_tensor(head.checkpoint.tensors[name])
            if values.any() if name == "d2t" else not values.all():
                raise TensorUnknown(
                    f"the vocabulary is full, and {name} does not lead each token to itself",
                    where=name,
                    fix="Correct draft_vocab_size if the head is reduced; remove the map if it is not.",
                )


def _check_twins(head: Head) -> None:
    for name, row in head.twins.items():
        for slot, part in zip(row.slots, _unpack(head, row, head.checkpoint.tensors[name]), strict=True):
            other = head.places[slot][1]
            if other.name != name and not _same_bits(part, read_slot(head, slot)):
                raise TensorTwins(
                    f"{name} and {other.name} hold the same weight under two names, and differ",
                    where=name,
                    fix="Find out which of them the head was trained with, and remove the other.",
                )


def _check_quantization(head: Head) -> None:
    stated = CONFIG_KEY in head.read.carried or head.side_file is not None or head.checkpoint.headers_only
    if head.is_quantized and not stated:
        raise ConfigInvalid(
            f"the weights are quantized, and neither {CONFIG_KEY} in the config nor {SIDE_FILE} says how",
            where=head.checkpoint.folder,
            fix="Export the head again; engines would take its packed bytes for weights.",
        )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    # As bytes: NaN equals itself, and 0.0 is not -0.0.
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def read_slot(head: Head, slot: str) -> torch.Tensor:
    """Read one slot's tensor, unpacked from wherever the layout keeps it.

    Raises:
        KeyError: the head does not hold the slot.
    """
    row, info = head.places[slot]
    return next(part for s, part in zip(row.slots, _unpack(head, row, info), strict=True) if s == slot)


def _unpack(head: Head, row: Stored, info: TensorInfo) -> Iterator[torch.Tensor]:
    from ..checkpoint.tensors import read_tensor

    known, stored = needs(head.spec), read_tensor(info)
    # A scale is no slot of the spec, and never packed with others.
    shapes = [known[slot].shape if slot in known else info.shape for slot in row.slots]
    return iter(row.move.unpack(stored, shapes))


def read_weights(head: Head) -> dict[str, torch.Tensor]:
    """Read every slot that the head holds into memory.

    Raises:
        ConfigUnsupported: the head is quantized, and cannot be computed with.
    """
    if head.is_quantized:
        raise ConfigUnsupported(
            "the head is quantized, and kconv computes with unquantized weights",
            where=head.checkpoint.folder,
            fix="Give the head that it was quantized from.",
        )
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
