"""Plan an output before a byte is written.

One planner serves everything made from a head: another layout, another attention, another vocabulary, quantized linear
layers. An operation passes what it computes as a `Change`; every other tensor keeps its bytes, and each source tensor
is accounted for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..checkpoint.formats import CONFIG_KEY, HEAD_SCALES, SIDE_FILE
from ..checkpoint.header import TensorInfo, byte_size
from ..checkpoint.manifest import EXACT, Action, ConversionRecord
from ..drafters.base import Spec
from ..drafters.contract import FLOATS, Expected
from ..drafters.slots import needs
from ..engines.layout import Layout, Stored, stored
from ..engines.moves import Same
from ..engines.registry import writable
from ..errors import LayoutCannot
from .computed import Computed, from_target, rounded, stacked, zeros
from .config import carry, refuse_unstated
from .quantized import add_scales, names_beside, refuse_renaming
from .read import Head, find_part, rows_of
from .shared import SharedTensors, omitted_slots, refuse_target


@dataclass(frozen=True)
class SourceTensor:
    """A stored tensor that another one is made from, and the row that describes it."""

    row: Stored
    info: TensorInfo


@dataclass(frozen=True)
class Step:
    """How one tensor of the output is made.

    Attributes:
        row: the output's row.
        action: "copied" (same name), "renamed" (same bytes, other name), "repacked" (the slots' bytes, in another
            arrangement), or how it was computed.
        computed: the data to write; None if the output has the sources' bytes or slots.
    """

    name: str
    sources: tuple[SourceTensor, ...]
    row: Stored
    action: Action
    computed: Computed | None = None

    @property
    def is_copy(self) -> bool:
        """Whether the bytes stay as they are."""
        return self.action in ("copied", "renamed")

    @property
    def dtype(self) -> str:
        return self.computed.dtype if self.computed else self.sources[0].info.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.computed.shape if self.computed else self.row.expected.shape

    @property
    def size(self) -> int:
        return byte_size(self.dtype, self.shape)


@dataclass(frozen=True)
class WriteOptions:
    """The user's options besides the layout.

    Attributes:
        drop_shared: omit tensors that are byte-identical to the target's and that engines share.
        dtype: safetensors name of the dtype to round the weights to; empty to keep each tensor's own.
    """

    target: SharedTensors | None = None
    drop_shared: bool = False
    dtype: str = ""


@dataclass(frozen=True)
class Replaced:
    """A computed tensor of a slot, how it was computed, and the stored tensors that it is computed from."""

    computed: Computed
    action: Action
    sources: tuple[SourceTensor, ...] = ()


@dataclass(frozen=True)
class Change:
    """The changes that an operation makes to a head, besides its layout.

    Attributes:
        spec: the spec of the output.
        replaced: the computed tensors by slot; a slot `<slot>.<suffix>` is a scale of a quantized weight.
        config: keys of config.json to set.
        dropped: source tensors that the output does not keep, with the reason.
    """

    spec: Any
    replaced: Mapping[str, Replaced] = field(default_factory=dict[str, Replaced])
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    dropped: Mapping[str, str] = field(default_factory=dict[str, str])
    conversion: ConversionRecord | None = None


@dataclass(frozen=True)
class Plan:
    """A decided conversion of a head, with one step for each tensor of the output.

    Attributes:
        spec, config: the spec and the config.json of the output.
        dropped: source tensors that are not in the output, with the reason.
        left: those of them that engines take from the target instead, by slot.
        conversion: what was approximated, if anything.
    """

    source: Head
    layout: Layout
    spec: Any
    config: Mapping[str, Any]
    steps: tuple[Step, ...]
    dropped: Mapping[str, str]
    target: SharedTensors | None = None
    conversion: ConversionRecord | None = None
    left: Mapping[str, TensorInfo] = field(default_factory=dict[str, TensorInfo])

    @cached_property
    def exact(self) -> bool:
        """Whether every weight is byte-identical to the source's, or to the target's if it was added from there."""
        integers = {name for name, need in needs(self.spec).items() if need.slot.dtype}
        return all(
            step.computed is None or step.action in EXACT or integers.issuperset(step.row.slots) for step in self.steps
        )


def plan(head: Head, layout: Layout, options: WriteOptions | None = None, change: Change | None = None) -> Plan:
    """Plan the output of a head in a layout.

    If the head's weights are still on the Hub, no tensor is dropped for being the target's.

    Raises:
        LayoutCannot: the layout, or an engine that reads it, does not support something in the output, or would serve
            it differently with this target.
        ConfigInvalid: the head's config does not state what the output's would; see `refuse_unstated`.
        TargetInvalid: the target lacks a tensor that the layout needs.
        KconvError: the target has the tensor, but it cannot be read; see `SharedTensors.find`.
    """
    refuse_unstated(head.read)
    options, change = options or WriteOptions(), change or Change(head.spec)
    spec = replace(change.spec, dtype=options.dtype) if options.dtype else change.spec
    given, spec = spec, layout.becomes(spec)
    more = {slot: need for slot, need in needs(spec).items() if slot not in needs(given)}
    filled = {slot: Replaced(zeros(spec.dtype, need.shape), "zeros") for slot, need in more.items()}
    change = replace(change, replaced={**_rounded(head, options.dtype), **change.replaced, **filled})
    write_config = check_layout(spec, layout, {**head.places, **change.replaced})
    refuse_target(head, layout, options.target)
    omitted = omitted_slots(head, layout, options.target) if options.drop_shared else {}
    held = head.places.keys() | change.replaced.keys()
    rows = _rows_to_write(head, layout, spec)
    steps: list[Step] = []
    for name, row in rows.items():
        if not all(slot in held and slot not in omitted for slot in row.slots):
            continue
        if any(slot in change.replaced for slot in row.slots):
            steps += _computed(name, row, head, change)
        else:
            steps.append(_exact(name, row, head))
    lacking = {slot: why for slot, why in layout.needs.items() if slot not in held}
    steps += [
        _added(name, row, lacking, spec, options.target)
        for name, row in rows.items()
        if lacking.keys() & set(row.slots)
    ]
    used = {source.info.name for step in steps for source in step.sources}
    dropped = dict(head.ignored) | {head.places[slot][1].name: why for slot, why in omitted.items()}
    dropped |= change.dropped
    for name, row in head.twins.items():
        if name not in used:
            dropped[name] = f"repeats {', '.join(dict.fromkeys(head.places[slot][1].name for slot in row.slots))}"
    _check_lost(head, layout, steps, dropped)
    _check_renaming(head, steps)
    target = options.target
    if target is not None and target.model_type and layout.write_beside:
        written = layout.write_beside(spec, target)
    else:
        written = write_config(spec)
    config = {**carry(written, head.read.carried, head.drafter.nested), **change.config}
    left = {slot: head.places[slot][1] for slot in omitted}
    return Plan(head, layout, spec, config, tuple(steps), dropped, options.target, change.conversion, left)


def plan_in_place(head: Head, change: Change) -> Plan:
    """Plan the output of a head with its own names, config and layout, even if that layout is only read.

    The change's `config` is set in the source's own config.
    """
    tensors = head.checkpoint.tensors
    before, after = rows_of(head.layout, head.spec, tensors), rows_of(head.layout, change.spec, tensors)
    steps: list[Step] = []
    for name, row in after.items():
        if any(slot in change.replaced for slot in row.slots):
            # A stored slot keeps its names; a new one gets the layout's own.
            if name in tensors or not any(slot in head.places for slot in row.slots):
                steps += _computed(name, row, head, change)
        elif name in tensors:
            steps.append(Step(name, (SourceTensor(before[name], tensors[name]),), row, "copied"))
    used = {source.info.name for step in steps for source in step.sources}
    reasons = {**head.ignored, **change.dropped}
    dropped = {name: why for name, why in reasons.items() if name in tensors and name not in used}
    _check_lost(head, head.layout, steps, dropped)
    source = replace(head, read=replace(head.read, dropped=()))  # the config is copied whole
    config = {**head.checkpoint.config, **change.config}
    return Plan(source, head.layout, change.spec, config, tuple(steps), dropped, None, change.conversion)


def check_layout(spec: Spec, layout: Layout, slots: Iterable[str]) -> Callable[[Spec], dict[str, Any]]:
    """Return the function that writes a layout's config, or refuse what it does not support, before hours of work.

    The slots are the output's, including scales.

    Raises:
        LayoutCannot: kconv does not write the layout, or an engine that reads it does not support something.
    """
    if layout.write_config is None:
        raise LayoutCannot(
            f"kconv reads {layout.name} but cannot write it", fix=f"Choose one of {', '.join(writable())}."
        )
    for limit in layout.limits:
        if limit.applies(spec, slots):
            raise LayoutCannot(limit.what, where="config.json", fix=limit.fix, see=limit.source)
    return layout.write_config


def _rows_to_write(head: Head, layout: Layout, spec: Spec) -> dict[str, Stored]:
    """Return the layout's rows, with quantized linear layers as the source stores them."""
    rows = stored(layout, spec)
    held: dict[str, TensorInfo] = {}
    for name, row in rows.items():
        for slot in row.slots:
            beside = names_beside(slot, name, head.places)
            if beside:
                held |= {name: head.places[slot][1]} | {n: head.places[s][1] for s, n in beside.items()}
    return add_scales(rows, held)


def _exact(name: str, row: Stored, head: Head) -> Step:
    """Return the step that makes one output tensor from the source's slots, bit for bit.

    Raises:
        LayoutCannot: they have several dtypes, and the output tensor has one.
    """
    sources = tuple(dict.fromkeys(SourceTensor(*head.places[slot]) for slot in row.slots))
    if len(dtypes := {source.info.dtype for source in sources}) > 1:
        names = " and ".join(source.info.name for source in sources)
        raise LayoutCannot(
            f"{name} fuses {names}, which are {' and '.join(sorted(dtypes))}",
            where=head.checkpoint.folder,
            fix="Pass --dtype bfloat16, which rounds all weights to one.",
        )
    same = len(sources) == 1 and (sources[0].row.slots, sources[0].row.move) == (row.slots, row.move)
    action: Action = ("copied" if sources[0].info.name == name else "renamed") if same else "repacked"
    return Step(name, sources, row, action)


def _computed(name: str, row: Stored, head: Head, change: Change) -> list[Step]:
    """Return the steps of a row with a replaced slot: for its tensor, and for that tensor's scales."""
    first = next(change.replaced[slot] for slot in row.slots if slot in change.replaced)
    if len(row.slots) == 1 and isinstance(row.move, Same):
        computed, sources = first.computed, first.sources
        expected = replace(row.expected, shape=computed.shape, dtypes=(computed.dtype,))
        steps = [Step(name, sources, replace(row, expected=expected), first.action, computed)]
        for suffix in HEAD_SCALES:
            slot, scale = f"{row.slots[0]}.{suffix}", f"{name.removesuffix('.weight')}.{suffix}"
            if slot in change.replaced:
                one = change.replaced[slot]
                expected = Expected(scale, one.computed.shape, (one.computed.dtype,), may_be_absent=True)
                steps.append(Step(scale, one.sources, Stored(expected, (slot,), Same()), one.action, one.computed))
        return steps
    own = [SourceTensor(*head.places[slot]) for slot in row.slots if slot in head.places]
    more = [source for slot in row.slots if slot in change.replaced for source in change.replaced[slot].sources]

    dtype, reason = first.computed.dtype, first.computed.reason
    parts = [
        change.replaced[slot].computed if slot in change.replaced else rounded(find_part(head, slot), dtype)
        for slot in row.slots
    ]
    return [
        Step(name, tuple(dict.fromkeys([*own, *more])), row, first.action, stacked(parts, row.expected.shape, reason))
    ]


def _rounded(head: Head, dtype: str) -> dict[str, Replaced]:
    """Return the weights that another dtype changes; scales keep theirs."""
    found: dict[str, Replaced] = {}
    for slot in needs(head.spec).keys() & head.places.keys() if dtype else ():
        row, info = head.places[slot]
        if info.dtype in FLOATS and info.dtype != dtype:
            found[slot] = Replaced(rounded(find_part(head, slot), dtype), "cast", (SourceTensor(row, info),))
    return found


def _added(name: str, row: Stored, reasons: Mapping[str, str], spec: Spec, target: SharedTensors | None) -> Step:
    (slot,) = row.slots
    if target is None:
        raise LayoutCannot(
            f"the head has no {slot} of its own: {reasons[slot]}",
            where=name,
            fix="Pass --target; kconv then adds the target's tensor unchanged.",
        )
    info = target.matching(slot, spec)
    return Step(name, (), row, "added", from_target(info, f"{info.name} of the target {target.name}: {reasons[slot]}"))


def _check_lost(head: Head, layout: Layout, steps: Iterable[Step], dropped: Mapping[str, str]) -> None:
    used = {source.info.name for step in steps for source in step.sources}
    lost = head.checkpoint.tensors.keys() - used - dropped.keys()
    if lost:
        raise LayoutCannot(
            f"{layout.name} has no place for {', '.join(sorted(lost))}",
            where=head.checkpoint.folder,
            fix="Choose another layout.",
        )


def _check_renaming(head: Head, steps: Iterable[Step]) -> None:
    renamed = {step.sources[0].info.name: step.name for step in steps if step.action == "renamed"}
    if head.is_quantized and renamed:
        refuse_renaming({CONFIG_KEY: head.read.carried.get(CONFIG_KEY), SIDE_FILE: head.side_values}, renamed)
