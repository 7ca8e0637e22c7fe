"""How much of its acceptance length a head keeps, how much it must, and what the manifest says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConversionInaccurate

if TYPE_CHECKING:
    from ..checkpoint.manifest import ConversionRecord
    from .batches import Calibration

MIN_RETENTION = 0.97
"""Share of the acceptance length that must be left of a head, given another attention or quantized."""


@dataclass(frozen=True)
class Retention:
    """How a head that was converted or quantized compares with the original.

    Attributes:
        sequences, positions: how much was measured on.
        context: tokens of the longest sequence.
        steps: K.
        before, after: sampled acceptance lengths, the bonus token included.
        kept: after / before.
        kept_error: its paired standard error.
        kl: mean KL(original || converted) per draft step, nats.
        attention_error: relative error of the attention's output, root mean square.
    """

    sequences: int
    positions: int
    context: int
    steps: int
    before: float
    after: float
    kept: float
    kept_error: float
    kl: tuple[float, ...]
    attention_error: float


def check_retention(figures: Retention, least: float, instead: str = "") -> None:
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
    accept = f"; --min-retention {figures.kept - 0.005:.2f} accepts the loss by name" if figures.kept > 0.01 else ""
    raise ConversionInaccurate(
        f"the head keeps {figures.kept:.2%} ± {figures.kept_error:.2%} of the original's acceptance length on "
        f"{figures.sequences} held-out sequences ({figures.after:.3f} of {figures.before:.3f} at K={figures.steps}), "
        f"and {least:.2%} was asked for",
        fix=f"{instead} Calibrating on more text of the kind that is served may help{accept}.".lstrip(),
    )


def conversion_record(
    calibration: Calibration,
    held_out: Retention,
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
    from ..checkpoint.manifest import ConversionRecord
    from .batches import digest_rows

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
