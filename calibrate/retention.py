"""How much of its acceptance length a head keeps, how much it must, and what the manifest says of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import ConversionInaccurate

if TYPE_CHECKING:
    from ..checkpoint.manifest import ConversionRecord
    from .batches import Calibration

MIN_RETENTION = 0.97
"""Share of the acceptance length that must be left of a head, given another attention or quantized."""
# Greedy acceptance is yes or no at each place, so its share is known less well: what so many standard errors leave open
# is no loss.
GREEDY_SIGMAS = 2.0


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
        greedy_before, greedy_after: lengths where a draft counts that is the target's own likeliest token, at every
            place of the same text.
        greedy_kept, greedy_kept_error: of these, as above.
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
    greedy_before: float = math.nan
    greedy_after: float = math.nan
    greedy_kept: float = math.nan
    greedy_kept_error: float = math.nan


def check_retention(figures: Retention, least: float, instead: str = "") -> None:
    """Refuse a head that keeps less of the acceptance length than was asked for.

    Sampled acceptance is judged by its mean, and greedy acceptance where it is clearly below.

    Args:
        figures: of the head beside its original.
        least: share that was asked for.
        instead: a sentence that says what would keep more; empty where nothing is known to.

    Raises:
        ConversionInaccurate: it keeps less.
    """
    # In this order, as NaN is not less either.
    if not figures.kept >= least:
        raise _keeps_too_little(figures, "", figures.kept, figures.kept_error, least, instead)
    if figures.greedy_kept + GREEDY_SIGMAS * figures.greedy_kept_error < least:
        greedy = replace(figures, before=figures.greedy_before, after=figures.greedy_after)
        raise _keeps_too_little(greedy, "greedy ", figures.greedy_kept, figures.greedy_kept_error, least, instead)


def _keeps_too_little(
    figures: Retention, kind: str, kept: float, error: float, least: float, instead: str
) -> ConversionInaccurate:
    accept = f" To accept the loss, give --min-retention {kept - 0.005:.2f}." if kept > 0.01 else ""
    return ConversionInaccurate(
        f"the head retains {kept:.2%} ± {error:.2%} of the original's {kind}acceptance length on "
        f"{figures.sequences} held-out sequences ({figures.after:.3f} of {figures.before:.3f} at K={figures.steps}), "
        f"but {least:.2%} is required",
        fix=f"{instead} Calibrating on more text of the kind that is served may help.{accept}".lstrip(),
    )


def conversion_record(
    calibration: Calibration,
    held_out: Retention,
    *,
    method: str,
    rows: int,
    details: Mapping[str, Any],
    heal_steps: int = 0,
    fingerprint: tuple[float, ...] = (),
) -> ConversionRecord:
    """Return what the manifest says of an approximation: what was done, on what, and what that kept.

    Args:
        calibration: what it was fitted or scaled on.
        held_out: figures on text that neither saw.
        method: the steps, one sentence.
        rows: what was fitted on, chains times draft steps.
        details: choices that the fit made.
        heal_steps: steps towards the original.
        fingerprint: of the head that the figures are of; see `head.fingerprint`.
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
        fingerprint=fingerprint,
    )
