"""Where a head's parameters come from."""

from __future__ import annotations

from math import prod

from ..checkpoint.manifest import Parameters
from ..head.slots import needs
from .plan import Plan, Step
from .read import read_slot
from .shared import SLOTS, Lent


def count_parameters(plan: Plan) -> Parameters:
    """Count an output's weights by where they come from; scales of quantized linears are none.

    The embedding and lm_head are the target's as far as their rows are, bit for bit; without a target to compare
    with, no one can tell.
    """
    known, counted = needs(plan.spec), set[str]()
    trained = copied = unknown = 0
    for step in plan.steps:
        for slot in step.row.slots:
            if slot in counted or slot not in known or known[slot].slot.dtype:
                continue
            counted.add(slot)
            size = prod(known[slot].shape)
            share = _share(plan, step, slot) if slot in SLOTS else 0.0
            if share is None:
                unknown += size
            else:
                copied += round(share * size)
                trained += size - round(share * size)
    return Parameters(trained=trained, copied_from_target=copied, unknown=unknown)


def _share(plan: Plan, step: Step, slot: str) -> float | None:
    """Return which part of a tensor's rows is the target's; None where that cannot be told."""
    if isinstance(step.made, Lent):
        return 1.0
    reference = plan.target.tensors.get(slot) if plan.target else None
    if reference is None or slot not in plan.source.places:
        return None
    from .copies import count_copies

    ids = read_slot(plan.source, "d2t") if slot == "lm_head" and "d2t" in plan.source.places else None
    copies = count_copies(plan.source.places[slot][1], reference, ids)
    return copies.by_offset / copies.rows if copies else None
