"""Judge measured figures of a head against its manifest, the required share, and drafters without a network.

Each judgment allows for its standard error, so that a few prompts refuse nothing by chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..checkpoint.manifest import MANIFEST, ConversionRecord
from ..drafters.fingerprint import TOLERANCE
from ..measure.drafting import Measured
from ..measure.figures import AcceptanceFigures
from ..measure.retention import GREEDY_SIGMAS
from ..rule import Found
from .report import Finding
from .rules.comparisons import RULE

OUTPUT, BIGRAM, LOOKUP = "output", "bigram", "prompt lookup"
BASELINES = (BIGRAM, LOOKUP)
# How large a loss must be to count.
SIGMAS = 3.0
# Text of another kind than the calibration's retains slightly more or less of the acceptance.
OTHER_TEXT = 0.01
# Texts on which a head is compared with drafters without a network; a small target's greedy text runs in circles, which
# prompt lookup drafts better than any head.
OPEN_TEXTS = ("held-out", "sampled")


@dataclass(frozen=True)
class Claim:
    """A manifest's statement of how much of its source's sampled acceptance length an approximate head retains."""

    kept: float
    error: float

    @classmethod
    def of(cls, record: ConversionRecord | None) -> Claim | None:
        """Return a record's value; None if it is missing or not a number."""
        held_out = record.held_out if record else {}
        # The source is compared as it is, so what training gained counts here.
        kept, error = held_out.get("gained"), held_out.get("kept_error")
        if not isinstance(kept, int | float):
            return None
        return cls(float(kept), float(error) if isinstance(error, int | float) else 0.0)


def judge_retention(measured: Iterable[Measured], claim: Claim | None, least: float | None) -> Iterator[Finding]:
    """Compare the acceptance that an approximate head retains with its manifest's claim, and with the required share.

    Args:
        measured: both heads on each text.
        claim: the manifest's statement; None if it has none.
        least: share that must be retained, sampled and greedy; None to require nothing.
    """
    for one in measured:
        parity = one.parity
        if parity is None or parity.kept is None or parity.kept_se is None:
            continue
        kept, error = parity.kept, parity.kept_se
        said = f"on {one.text.kind} text the head retains {kept:.2%} ± {error:.2%} of its source's acceptance length"
        if claim is not None and one.text.kind in OPEN_TEXTS:
            # What healing gained beyond the source is training, and other text need not show it.
            short, apart = min(claim.kept, 1.0) - kept, SIGMAS * (error**2 + claim.error**2) ** 0.5
            # NaN does not agree.
            if not short <= max(apart, OTHER_TEXT):
                stated = f"{MANIFEST} states {claim.kept:.2%} ± {claim.error:.2%}"
                yield RULE["K360"].finding(Found(MANIFEST, f"{said}, but {stated}"))
        if least is not None and not kept + GREEDY_SIGMAS * error >= least:
            yield RULE["K361"].finding(Found(one.text.kind, f"{said}, but {least:.2%} is required"))


def judge_fingerprint(apart: float | None) -> Iterator[Finding]:
    """Find a folder that does not compute what the measured head did; see `drafters.fingerprint`."""
    if apart is not None and not apart <= TOLERANCE:
        said = f"its logits on fixed inputs differ by {apart:.1e} from those of the head in {MANIFEST}"
        yield RULE["K362"].finding(Found(MANIFEST, f"{said}, but rounding explains at most {TOLERANCE:.0e}"))


def judge_baselines(rows: Sequence[AcceptanceFigures]) -> Iterator[Finding]:
    """Find a head that drafts worse than drafters without a network, in total or at a position of the draft.

    Args:
        rows: acceptance of the head and of `BASELINES`, on each text and for all prompts.
    """
    for text in OPEN_TEXTS:
        own = {row.drafter: row for row in rows if row.text == text and not row.category}
        if (head := own.get(OUTPUT)) is None:
            continue
        for name in BASELINES:
            if (base := own.get(name)) is None:
                continue
            if _is_below(head.length, head.standard_error, base.length, base.standard_error):
                said = f"its acceptance length is {head.length:.3f}, that of {_article(name)} is {base.length:.3f}"
                message = f"the head drafts worse than {_article(name)} on {text} text: {said}"
                yield RULE["K363"].finding(Found(text, message))
            elif place := _worse_place(head, base):
                at = f"{head.rates[place - 1]:.1%} of its drafts are accepted up to token {place}"
                message = (
                    f"the head drafts worse than {_article(name)} on {text} text from token {place} on: {at}, but "
                )
                yield RULE["K363"].finding(Found(text, message + f"{base.rates[place - 1]:.1%} of the other's"))


def without_network(rows: Iterable[AcceptanceFigures]) -> float:
    """Return the largest acceptance length of a drafter without a network, on texts that do not loop."""
    return max((row.length for row in rows if row.text in OPEN_TEXTS and row.drafter in BASELINES), default=0.0)


def _is_below(one: float, its_error: float | None, other: float, other_error: float | None) -> bool:
    """Return whether a figure is clearly below another; NaN is. Assumes unpaired errors, which is cautious."""
    if its_error is None or other_error is None:
        return False
    return not one >= other - SIGMAS * (its_error**2 + other_error**2) ** 0.5


def _worse_place(head: AcceptanceFigures, base: AcceptanceFigures) -> int:
    """Return the first position, from 1, up to which clearly fewer drafts are accepted; 0 for none."""
    for place, (one, other) in enumerate(zip(head.rates, base.rates, strict=True)):
        if _is_below(one, head.rate_errors[place], other, base.rate_errors[place]):
            return place + 1
    return 0


def _article(name: str) -> str:
    return f"a {name}" if name == BIGRAM else name
