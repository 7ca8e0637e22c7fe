"""A head beside its target."""

from __future__ import annotations

from ..engines.layout import Layout
from ..errors import LayoutCannot, TargetInvalid
from ..head.slots import needs
from .read import Head
from .shared import SLOTS, Shared, same_bytes


def refuse_target(head: Head, layout: Layout, target: Shared | None) -> None:
    """Refuse a layout whose engine would serve a head otherwise beside this target.

    Raises:
        LayoutCannot: by a captured layer, or by the target's embedding in place of the head's own.
    """
    if target is None:
        return
    for limit in layout.target_limits:
        if limit.hits(head.spec, target):
            raise LayoutCannot(limit.what, where=limit.source, fix=limit.fix)
    for slot, why in layout.replaces.items() if not head.checkpoint.headers_only else ():
        if slot in head.places and target.has_another(slot, head.places[slot][1], head.spec):
            raise LayoutCannot(
                f"the head has another {slot} than the target, and would be served with the target's: {why}",
                where=head.places[slot][1].name,
                fix="Serve this head with vLLM, or train one with the target's embedding.",
            )


def taken_slots(head: Head, layout: Layout) -> set[str]:
    """Return the slots whose tensor of the target is added to the head, or compared with the head's own."""
    held = head.places.keys()
    return (layout.needs.keys() - held) | (layout.replaces.keys() & held)


def left_slots(head: Head, layout: Layout, target: Shared | None) -> dict[str, str]:
    """Return the slots that can be left to the target, with the reason; none where bytes of either are on the Hub.

    Raises:
        TargetInvalid: there is no target.
        KconvError: the target has a tensor that cannot be had; see `Shared.find`.
    """
    if target is None:
        raise TargetInvalid("there is no target to compare with", fix="Say --target, a folder with its weights.")
    if head.checkpoint.headers_only or target.headers_only:
        return {}
    known = needs(head.spec)
    return {
        slot: f"equal, byte for byte, to {theirs.name} of the target {target.name}, which engines share"
        for slot in SLOTS
        if slot in head.places and slot not in layout.needs and known[slot].slot.absent_when(head.spec)
        if (theirs := target.find(slot)) is not None and same_bytes(head.places[slot][1], theirs)
    }
