"""How much of its acceptance length a head must keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import ConversionInaccurate

if TYPE_CHECKING:
    from .held_out import HeldOut

KEEP = 0.97
"""Share of the acceptance length that must be left of a head, given another attention or quantized."""


def check_kept(figures: HeldOut, least: float, instead: str = "") -> None:
    """Refuse a head that keeps less of the acceptance length than was asked for.

    Args:
        figures: of the head beside its original.
        least: share that was asked for.
        instead: a sentence that says what would keep more; empty where nothing is known to.

    Raises:
        ConversionInaccurate: it keeps less.
    """
    # In this order, as NaN is not less either.
    if figures.kept >= least:
        return
    accept = f"; --keep {figures.kept - 0.005:.2f} accepts the loss by name" if figures.kept > 0.01 else ""
    raise ConversionInaccurate(
        f"the head keeps {figures.kept:.2%} ± {figures.kept_error:.2%} of the original's acceptance length on "
        f"{figures.sequences} held-out sequences ({figures.after:.3f} of {figures.before:.3f} at K={figures.steps}), "
        f"and {least:.2%} was asked for",
        fix=f"{instead} Calibrating on more text of the kind that is served may help{accept}.".lstrip(),
    )
