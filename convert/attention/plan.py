"""A conversion of the attention as a plan like any other.

The plan is carried out by `convert.execute`: what is not converted keeps its bytes, and each source tensor is
accounted for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.manifest import ConversionRecord
from ...checkpoint.tensors import TORCH
from ...engines.layout import Layout, Stored, stored
from ...engines.registry import writable
from ...errors import LayoutCannot
from ...head.forward import DraftHead
from ...head.slots import needs
from ...head.spec import HeadSpec
from ..beside import refuse_target
from ..config import carry, refuse_unstated
from ..plan import Plan, Source, Step, step_of
from ..read import Head
from ..shared import SLOTS, Lent, Shared
from .calibration import Calibration, digest_rows
from .held_out import HeldOut


@dataclass(frozen=True)
class Converted:
    """A converted head.

    Attributes:
        head: in the dtype of the source's weights, computed with in fp32.
        slots: what is not the source's.
        method: the steps, one sentence.
        rows: what was fitted on.
        heal_steps: steps towards the original.
        held_out: figures on text that neither the fit nor the healing saw.
        details: what was chosen on the way.
    """

    head: DraftHead
    slots: frozenset[str]
    method: str
    rows: int
    heal_steps: int
    held_out: HeldOut
    details: Mapping[str, Any]


@dataclass(frozen=True)
class Computed:
    """A converted tensor, packed from its slots when its turn comes."""

    row: Stored
    weights: Mapping[str, Tensor]
    dtype: str
    reason: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.row.expected.shape

    def make(self) -> Iterator[Tensor]:
        dtype = TORCH[self.dtype]
        yield self.row.move.pack([self.weights[slot].detach().cpu().to(dtype) for slot in self.row.slots]).contiguous()


def as_stored(head: DraftHead, dtype: str) -> DraftHead:
    """Return a head whose weights are rounded to what will be stored, computed with as before.

    The embedding and lm_head stay as they are: they are no part of a conversion, and may be the target's.
    """
    rounded = {
        name: w.to(TORCH[dtype]).to(w.dtype) if w.is_floating_point() and name not in SLOTS else w
        for name, w in head.weights.items()
    }
    return DraftHead(head.spec, rounded)


def changed_slots(original: DraftHead, converted: DraftHead) -> frozenset[str]:
    """Return the slots that the original has not, or has with other values."""
    own = original.weights
    return frozenset(
        name
        for name, weight in converted.weights.items()
        if name not in own or own[name].shape != weight.shape or not torch.equal(own[name], weight)
    )


def plan_converted(
    head: Head, layout: Layout, converted: Converted, calibration: Calibration, target: Shared | None = None
) -> Plan:
    """Plan a head with another attention.

    Args:
        head: the source.
        layout: the layout to write.
        converted: the head with the other attention.
        calibration: what it was calibrated on.
        target: the target's embedding and lm_head, where they are at hand.

    Raises:
        LayoutCannot: the layout, or the engine behind it, has no place for something that the output has, or would
            serve it otherwise beside this target.
        ConfigInvalid: the head's config does not state what the output's would; see `refuse_unstated`.
    """
    refuse_unstated(head.read)
    spec = check_layout(head.spec, converted.head.spec, layout, head.places)
    assert layout.write_config is not None
    refuse_target(head, layout, target)
    known, own = needs(head.spec), head.places
    attention = tuple(Source(row, info) for slot, (row, info) in own.items() if slot not in needs(spec))
    reason = (
        f"{converted.method}; keeps {converted.held_out.kept:.2%} of the sampled acceptance length on "
        f"{converted.held_out.sequences} held-out sequences"
    )
    steps: list[Step] = []
    for name, row in stored(layout, spec).items():
        if any(slot in converted.slots for slot in row.slots):
            mine = tuple(Source(*own[slot]) for slot in row.slots if slot in own)
            # A tensor of the new attention comes of the whole old one; what was healed, of itself too.
            is_new = any(slot not in known or slot == "0.o_proj" for slot in row.slots)
            sources = tuple(dict.fromkeys([*mine, *attention])) if is_new else mine
            made = Computed(row, converted.head.weights, spec.dtype, reason)
            steps.append(Step(name, sources, row, "converted", made))
        elif all(slot in own for slot in row.slots):
            steps.append(step_of(name, row, head))
        elif layout.needs.keys() & set(row.slots):
            (slot,) = row.slots
            if target is None:
                raise LayoutCannot(
                    f"the head has no {slot} of its own: {layout.needs[slot]}",
                    where=name,
                    fix="Say --target: the target's is added, as it is.",
                )
            info = target.lend(slot, spec)
            lent = Lent(info, f"{info.name} of the target {target.name}: {layout.needs[slot]}")
            steps.append(Step(name, (), row, "added", lent))
    used = {source.info.name for step in steps for source in step.sources}
    dropped = dict(head.ignored) | {
        name: "repeats another tensor" for name in head.twins if name not in used and name not in head.ignored
    }
    lost = head.checkpoint.tensors.keys() - used - dropped.keys()
    if lost:
        raise LayoutCannot(
            f"{layout.name} has no place for {', '.join(sorted(lost))}",
            where=head.checkpoint.folder,
            fix="Choose another layout.",
        )
    config = carry(layout.write_config(spec), head.read.carried)
    told = record(
        calibration,
        converted.held_out,
        method=converted.method,
        rows=converted.rows,
        details=converted.details,
        heal_steps=converted.heal_steps,
    )
    return Plan(head, layout, spec, config, tuple(steps), dropped, target, told)


def check_layout(source: HeadSpec, converted: HeadSpec, layout: Layout, slots: Mapping[str, object]) -> HeadSpec:
    """Return what the output is, or refuse what a layout cannot hold: before the hours of work, not behind them.

    Raises:
        LayoutCannot: as `plan.plan`.
    """
    spec = replace(converted, dtype=source.dtype)
    if layout.write_config is None:
        raise LayoutCannot(f"{layout.name} is read, not written", fix=f"Choose one of {', '.join(writable())}.")
    for limit in layout.limits:
        if limit.applies(spec, slots):
            raise LayoutCannot(limit.what, where=limit.source, fix=limit.fix)
    return spec


def record(
    calibration: Calibration,
    held_out: HeldOut,
    *,
    method: str,
    rows: int,
    details: Mapping[str, Any],
    heal_steps: int = 0,
) -> ConversionRecord:
    """Return what the manifest says of an approximation: what was done, on what, and what that kept.

    Args:
        calibration: what it was fitted or scaled on.
        held_out: figures on text that neither saw.
        method: the steps, one sentence.
        rows: what was fitted on, chains times draft steps.
        details: what was chosen on the way.
        heal_steps: steps towards the original.
    """
    return ConversionRecord(
        method=method,
        calibration=calibration.name,
        calibration_sha256=digest_rows(calibration),
        sequences=sum(len(batch.tokens) for batch in calibration.batches),
        context=max(batch.tokens.shape[1] for batch in calibration.batches),
        rows=rows,
        heal_steps=heal_steps,
        held_out=asdict(held_out),
        details=dict(details),
        prompts=tuple(sorted(set(calibration.prompts))),
    )
