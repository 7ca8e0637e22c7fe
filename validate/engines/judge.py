"""Compare an engine's figures with kconv's own."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

from ...engines.registry import asked
from ...measure.figures import EngineFigures
from ...rule import Found
from ..report import Finding
from ..rules.comparisons import RULE

OUTPUT, COUNTS, UNREACHED = "K701", "K702", "K703"
# How far near ties, decided differently in another dtype, may change an acceptance length: by this share, or by this
# many standard errors of the difference of two texts' lengths if few drafts make that larger.
SHARE, ERRORS = 0.1, 3.0
SHOWN = 8


def counts_agree(figures: EngineFigures) -> bool:
    """Return whether the engine counted what kconv's chain gives; only in total if it does not count by position."""
    if figures.per_position is not None:
        return (figures.drafts, figures.per_position) == (figures.expected_drafts, figures.expected_per_position)
    return (figures.drafts, figures.accepted) == (figures.expected_drafts, all_accepted(figures))


def all_accepted(figures: EngineFigures) -> int:
    """Return how many accepted tokens the engine must count in total."""
    cut = figures.expected_accepted
    return sum(figures.expected_per_position) if cut is None else cut


def beyond_ties(figures: EngineFigures) -> bool:
    """Return whether an acceptance length differs more from kconv's than another text of the same target explains."""
    drafts, places = figures.expected_drafts, figures.expected_per_position
    # places[i] drafts have i + 1 or more accepted tokens, so the mean of the squares is a sum over them too.
    squares = sum((2 * i + 1) * count for i, count in enumerate(places)) / drafts
    variance = squares - (sum(places) / drafts) ** 2
    spread = sqrt(variance * (1 / drafts + 1 / figures.drafts))
    return abs(figures.length - figures.expected_length) > max(SHARE * figures.expected_length, ERRORS * spread)


def judge(figures: EngineFigures, *, strict: bool, read_as: tuple[int, ...] | None = None) -> list[Finding]:
    """Return the findings about an engine's figures.

    Args:
        figures: the figures.
        strict: whether both sides compute the same numbers, in fp32: differences are then errors. A server with another
            dtype may decide a near tie differently, and its later drafts are for another text: different counts are
            then a warning, if such ties can explain the acceptance length.
        read_as: the captured layers, as outputs, with which the chain gives the engine's counts, if these are not the
            head's own.
    """
    runners, findings = asked().get(figures.engine, ()), []
    if figures.unreached:
        shown = f"{', '.join(figures.unreached[:SHOWN])}{' …' if len(figures.unreached) > SHOWN else ''}"
        message = (
            f"no tensor of the folder filled {len(figures.unreached)} of the head's parameters: {shown}; the engine "
            "reports nothing, and serves uninitialized memory there"
        )
        findings.append(RULE[UNREACHED].finding(Found(figures.engine, message, engines=runners)))
    if figures.same_output < figures.prompts:
        differ = f"{figures.prompts - figures.same_output} of {figures.prompts} greedy continuations differ"
        unsure = "Compare with the server's own output without speculation; a different dtype may be the cause."
        found = Found(figures.engine, f"{differ} from those of {figures.reference}", engines=runners)
        findings.append(RULE[OUTPUT].finding(found if strict else replace(found, fix=unsure, severity="warning")))
    if not counts_agree(figures):
        counted, expected = figures.per_position or figures.accepted, figures.expected_per_position
        message = (
            f"the engine counted {figures.drafts} drafts and accepted {counted}, acceptance length "
            f"{figures.length:.3f}; kconv's chain gives {figures.expected_drafts} and "
            f"{expected if figures.per_position is not None else all_accepted(figures)}, "
            f"{figures.expected_length:.3f}"
        )
        fix = ""
        if read_as:
            message += f". With the outputs of layers {list(read_as)}, the chain gives the engine's counts"
            fix = (
                f"The engine misreads this folder's list of captured layers. Convert the head (kconv "
                f"to-{figures.engine}), which writes the list as the engine counts, and serve that."
            )
        severity = None if strict or beyond_ties(figures) else "warning"
        findings.append(RULE[COUNTS].finding(Found(figures.engine, message, fix, runners, severity=severity)))
    return findings
