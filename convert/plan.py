"""What becomes what, decided before a byte is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..checkpoint.folder import read_json
from ..checkpoint.header import TensorInfo, byte_size
from ..checkpoint.manifest import Action, ConversionRecord
from ..engines.layout import Layout, Stored, stored
from ..errors import LayoutCannot
from ..head.contract import FLOATS
from ..head.slots import needs
from ..head.spec import HeadSpec
from .beside import left_slots, refuse_target
from .cast import Cast
from .config import carry, refuse_unstated
from .quantized import CONFIG_KEY, add_scales, names_beside, refuse_renaming
from .read import Head, read_slot
from .shared import Lent, Shared

if TYPE_CHECKING:
    import torch

    from .made import Made


@dataclass(frozen=True)
class Source:
    """A stored tensor that a step reads, and the row that says what it holds."""

    row: Stored
    info: TensorInfo


@dataclass(frozen=True)
class Step:
    """How one tensor of the output comes to be.

    Attributes:
        name: its name in the output.
        sources: the stored tensors it is made of.
        row: the output's row.
        action: "carried" (same name), "renamed" (same bytes, other name), "re-packed" (the slots' bytes,
            in another arrangement), or what was done to compute it.
        made: the computed tensor; None where the bytes or slots of the sources are the output's.
    """

    name: str
    sources: tuple[Source, ...]
    row: Stored
    action: Action
    made: Made | None = None

    @property
    def is_copy(self) -> bool:
        """Whether the bytes stay as they are."""
        return self.action in ("carried", "renamed")

    @property
    def size(self) -> int:
        """Bytes that it takes in the output."""
        if self.made is not None:
            return byte_size(self.made.dtype, self.made.shape)
        return byte_size(self.sources[0].info.dtype, self.row.expected.shape)


@dataclass(frozen=True)
class Wishes:
    """What a user asks for beside the layout.

    Attributes:
        target: the target's embedding and lm_head, where they are at hand.
        drop_shared: leave out what equals the target's, byte for byte, and engines share.
        dtype: safetensors name of the dtype to round the weights to; empty to keep each tensor's own.
    """

    target: Shared | None = None
    drop_shared: bool = False
    dtype: str = ""


@dataclass(frozen=True)
class Plan:
    """A conversion, decided.

    Attributes:
        source: the head that is read.
        layout: the layout that is written.
        spec: what the output is.
        config: the output's config.json.
        steps: one for each tensor of the output.
        dropped: source tensors that are not in the output, with the reason.
        target: the target's embedding and lm_head, where they are at hand.
        conversion: how the attention was turned into the other kind, where it was.
    """

    source: Head
    layout: Layout
    spec: HeadSpec
    config: Mapping[str, Any]
    steps: tuple[Step, ...]
    dropped: Mapping[str, str]
    target: Shared | None = None
    conversion: ConversionRecord | None = None


def plan(head: Head, layout: Layout, wishes: Wishes | None = None) -> Plan:
    """Plan a head's conversion into another layout of the same attention.

    Args:
        head: the source. One whose weights are still on the Hub drops nothing for being the target's.
        layout: the layout to write.
        wishes: what the user asks for beside it.

    Raises:
        LayoutCannot: the layout, or the engine behind it, has no place for something this head has.
        ConfigInvalid: the head's config does not state what the output's would; see `refuse_unstated`.
        TargetInvalid: the target does not hold what the layout needs of it.
        KconvError: the target holds it, and it cannot be had; see `Shared.find`.
    """
    refuse_unstated(head.read)
    wishes = wishes or Wishes()
    spec = replace(head.spec, dtype=wishes.dtype) if wishes.dtype else head.spec
    if layout.write_config is None:
        raise LayoutCannot(
            f"{layout.name} is read, not written", fix="Write portable, or one engine's: trtllm, vllm, sglang."
        )
    for limit in layout.limits:
        if limit.applies(spec, head.places):
            raise LayoutCannot(limit.what, where=limit.source, fix=limit.fix)
    refuse_target(head, layout, wishes.target)
    shared = left_slots(head, layout, wishes.target) if wishes.drop_shared else {}
    rows = _rows_to_write(head, layout, spec)
    steps = tuple(
        _cast(step_of(name, row, head), head, wishes.dtype)
        for name, row in rows.items()
        if all(slot in head.places and slot not in shared for slot in row.slots)
    )
    lacking = {slot: why for slot, why in layout.needs.items() if slot not in head.places}
    steps += tuple(
        _lent(name, row, lacking, spec, wishes.target) for name, row in rows.items() if lacking.keys() & set(row.slots)
    )
    used = {source.info.name for step in steps for source in step.sources}
    dropped = dict(head.ignored) | {head.places[slot][1].name: why for slot, why in shared.items()}
    for name, row in head.twins.items():
        if name not in used:
            dropped[name] = f"repeats {', '.join(dict.fromkeys(head.places[slot][1].name for slot in row.slots))}"
    lost = head.checkpoint.tensors.keys() - used - dropped.keys()
    if lost:
        raise LayoutCannot(
            f"{layout.name} has no place for {', '.join(sorted(lost))}",
            where=head.checkpoint.folder,
            fix="Choose another layout.",
        )
    _check_renaming(head, steps)
    config = carry(layout.write_config(spec), head.read.carried)
    return Plan(head, layout, spec, config, steps, dropped, wishes.target)


def _rows_to_write(head: Head, layout: Layout, spec: HeadSpec) -> dict[str, Stored]:
    """Return the layout's rows, those of quantized linears as the source stores them."""
    rows = stored(layout, spec)
    held: dict[str, TensorInfo] = {}
    for name, row in rows.items():
        for slot in row.slots:
            beside = names_beside(slot, name, head.places)
            if beside:
                held |= {name: head.places[slot][1]} | {n: head.places[s][1] for s, n in beside.items()}
    return add_scales(rows, held)


def step_of(name: str, row: Stored, head: Head) -> Step:
    """Return the step that makes one tensor of the output from the source's slots, bit by bit."""
    sources: list[Source] = []
    for slot in row.slots:
        source = Source(*head.places[slot])
        if source not in sources:
            sources.append(source)
    same = len(sources) == 1 and (sources[0].row.slots, sources[0].row.move) == (row.slots, row.move)
    action: Action = ("carried" if sources[0].info.name == name else "renamed") if same else "re-packed"
    return Step(name, tuple(sources), row, action)


def _cast(step: Step, head: Head, dtype: str) -> Step:
    """Return a step that rounds too, where it makes a weight of another dtype; scales keep theirs."""
    info, is_weight = step.sources[0].info, step.row.slots[0] in needs(head.spec)
    if not dtype or not is_weight or info.dtype not in FLOATS or info.dtype == dtype:
        return step
    from ..checkpoint.tensors import read_tensor, row_blocks

    def blocks() -> Iterable[torch.Tensor]:
        if not step.is_copy:
            return [step.row.move.pack([read_slot(head, slot) for slot in step.row.slots])]
        return row_blocks(info) if len(info.shape) == 2 else [read_tensor(info)]

    shape = step.row.expected.shape
    made = Cast(step.name, dtype, shape, f"{info.dtype} rounded to the nearest {dtype}, ties to even", blocks)
    return replace(step, action="cast", made=made)


def _lent(name: str, row: Stored, reasons: Mapping[str, str], spec: HeadSpec, target: Shared | None) -> Step:
    (slot,) = row.slots
    if target is None:
        raise LayoutCannot(
            f"the head has no {slot} of its own: {reasons[slot]}",
            where=name,
            fix="Say --target: the target's is added, as it is.",
        )
    info = target.lend(slot, spec)
    return Step(name, (), row, "added", Lent(info, f"{info.name} of the target {target.name}: {reasons[slot]}"))


def _check_renaming(head: Head, steps: Iterable[Step]) -> None:
    renamed = {step.sources[0].info.name: step.name for step in steps if step.action == "renamed"}
    if head.is_quantized and renamed:
        stated = {CONFIG_KEY: head.read.carried.get(CONFIG_KEY)}
        side = {"side": read_json(head.side_file)} if head.side_file else {}
        refuse_renaming(stated | side, renamed)
