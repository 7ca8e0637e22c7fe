"""How much of its acceptance length a head retains, how much it must retain, and the manifest's record of it."""

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
"""Share of the acceptance length that a head must retain after its attention is converted or it is quantized."""
# Greedy acceptance is yes or no at each position, so its share is known less exactly: a loss within this many standard
# errors does not count.
GREEDY_SIGMAS = 2.0
# A share known less exactly than this, or than the allowed loss, says nothing about that loss. Chance alone moves short
# texts by less than a percent.
LEAST_LOSS = 0.01


@dataclass(frozen=True)
class Retention:
    """A converted or quantized head compared with the original.

    Attributes:
        context: tokens of the longest sequence.
        steps: K.
        before, after: sampled acceptance lengths, including the bonus token.
        trained: the original's after the same training as the other head; None if that head was not trained.
        kept: after / trained, or after / before. Training gains acceptance beyond what the conversion kept, so only a
            head with the same training shows the loss.
        kept_error: its paired standard error.
        gained: after / before.
        greedy_before, greedy_after, greedy_trained: lengths where a draft counts if it is the target's own most likely
            token, at every position of the same text.
        greedy_kept, greedy_kept_error, greedy_gained: the same ratios and error for these.
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
    gained: float
    greedy_before: float = math.nan
    greedy_after: float = math.nan
    greedy_kept: float = math.nan
    greedy_kept_error: float = math.nan
    greedy_gained: float = math.nan
    trained: float | None = None
    greedy_trained: float | None = None

    @property
    def against(self) -> str:
        """What the head is compared with, as the end of "of ..."."""
        return "the original's" if self.trained is None else "the equally trained original's"


def check_retention(figures: Retention, least: float, instead: str = "") -> None:
    """Refuse a head that retains less of the acceptance length than required.

    Sampled acceptance is judged by its mean, and greedy acceptance only if it is clearly below.

    Args:
        instead: a sentence about what would retain more; empty if nothing is known to.

    Raises:
        ConversionInaccurate: it retains less.
    """
    if not figures.kept_error <= max(1 - least, LEAST_LOSS):
        raise ConversionInaccurate(
            f"the head retains {figures.kept:.2%} ± {figures.kept_error:.2%} of {figures.against} acceptance length on "
            f"{figures.sequences} held-out sequences, which is too uncertain to tell a loss of {1 - least:.2%}",
            fix="Use more text: more prompts, or states of more prompts.",
        )
    # In this order, since NaN does not compare as less either.
    if not figures.kept >= least:
        raise _keeps_too_little(figures, "", figures.kept, figures.kept_error, least, instead)
    if figures.greedy_kept + GREEDY_SIGMAS * figures.greedy_kept_error < least:
        greedy = replace(
            figures, before=figures.greedy_before, after=figures.greedy_after, trained=figures.greedy_trained
        )
        raise _keeps_too_little(greedy, "greedy ", figures.greedy_kept, figures.greedy_kept_error, least, instead)


def _keeps_too_little(
    figures: Retention, kind: str, kept: float, error: float, least: float, instead: str
) -> ConversionInaccurate:
    accept = f" To accept the loss, pass --min-retention {kept - 0.005:.2f}." if kept > 0.01 else ""
    return ConversionInaccurate(
        f"the head retains {kept:.2%} ± {error:.2%} of {figures.against} {kind}acceptance length on "
        f"{figures.sequences} held-out sequences ({figures.after:.3f} of {figures.trained or figures.before:.3f} at "
        f"K={figures.steps}), but {least:.2%} is required",
        fix=f"{instead} Calibrating on more text like your traffic may help.{accept}".lstrip(),
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
    """Return the manifest's record of an approximation: what was done, on what text, and what it retained.

    Args:
        method: the steps, in one sentence.
        rows: rows in the fit, chains times draft steps.
        fingerprint: of the measured head; see `drafters.fingerprint`.
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
