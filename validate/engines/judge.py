"""An engine's figures beside kconv's own."""

from __future__ import annotations

from math import sqrt

from ..figures import EngineFigures
from ..report import Finding

OUTPUT, COUNTS, UNREACHED = "K701", "K702", "K703"
# How far near ties, decided otherwise by another dtype, may take an acceptance length: this share of it, or as many
# standard errors of the difference of two texts' lengths where there are so few drafts that these are more.
SHARE, ERRORS = 0.1, 3.0
SHOWN = 8


def counts_agree(figures: EngineFigures) -> bool:
    """Say whether the engine counted what kconv's chain says; in all, where it does not count by place."""
    if figures.per_position is not None:
        return (figures.drafts, figures.per_position) == (figures.expected_drafts, figures.expected_per_position)
    return (figures.drafts, figures.accepted) == (figures.expected_drafts, all_accepted(figures))


def all_accepted(figures: EngineFigures) -> int:
    """Return how many accepted tokens the engine must count in all."""
    cut = figures.expected_accepted
    return sum(figures.expected_per_position) if cut is None else cut


def beyond_ties(figures: EngineFigures) -> bool:
    """Say whether an acceptance length is further from kconv's than another text of the same target can take it."""
    drafts, places = figures.expected_drafts, figures.expected_per_position
    # places[i] of the drafts have i + 1 tokens accepted or more, so the mean of the squares is a sum over them too.
    squares = sum((2 * i + 1) * count for i, count in enumerate(places)) / drafts
    variance = squares - (sum(places) / drafts) ** 2
    spread = sqrt(variance * (1 / drafts + 1 / figures.drafts))
    return abs(figures.length - figures.expected_length) > max(SHARE * figures.expected_length, ERRORS * spread)


def judge(figures: EngineFigures, *, strict: bool, read_as: tuple[int, ...] | None = None) -> list[Finding]:
    """Return what is wrong with an engine's figures.

    Args:
        figures: the figures.
        strict: whether both sides compute the same numbers, in fp32: differences are errors then. A server of
            another dtype may decide a near tie otherwise, and its drafts after that are of another text: other counts
            are a warning then, as long as the acceptance length is one that this can give.
        read_as: the captured layers, as outputs, with which the chain gives the engine's counts, where these are not
            the head's own.
    """
    findings = []
    if figures.unreached:
        findings.append(
            Finding(
                rule=UNREACHED,
                severity="error",
                where=figures.engine,
                message=f"no tensor of the folder reached {len(figures.unreached)} of the head's parameters: "
                f"{', '.join(figures.unreached[:SHOWN])}{' …' if len(figures.unreached) > SHOWN else ''}; the engine "
                "says nothing, and serves what its memory holds there",
                fix="Look for the tensors that these are filled from: kconv inspect shows which the folder has, and "
                "kconv validate what the engine calls them.",
                engines=(figures.engine,),
            )
        )
    if figures.same_output < figures.prompts:
        findings.append(
            Finding(
                rule=OUTPUT,
                severity="error" if strict else "warning",
                where=figures.engine,
                message=f"{figures.prompts - figures.same_output} of {figures.prompts} greedy continuations are not "
                f"those of {figures.reference}",
                fix="Do not serve this: speculation may not change the output. Look for the engine's own fault first."
                if strict
                else "Compare with the server's own output without speculation; its dtype alone may be the cause.",
                engines=(figures.engine,),
            )
        )
    if not counts_agree(figures):
        counted, expected = figures.per_position or figures.accepted, figures.expected_per_position
        findings.append(
            Finding(
                rule=COUNTS,
                severity="error" if strict or beyond_ties(figures) else "warning",
                where=figures.engine,
                message=f"the engine counted {figures.drafts} drafts and accepted {counted}, acceptance length "
                f"{figures.length:.3f}; kconv's chain gives {figures.expected_drafts} and "
                f"{expected if figures.per_position is not None else all_accepted(figures)}, "
                f"{figures.expected_length:.3f}"
                + (f". Fed the outputs of layers {list(read_as)}, it gives the engine's own counts" if read_as else ""),
                fix=f"The engine misreads this folder's list of captured layers: convert the "
                f"head (kconv to-{figures.engine}), which lists them as the engine counts, and serve that."
                if read_as
                else "The engine reads the head differently than its config says (captured layers, RoPE, norms), or "
                "not all of its tensors: run kconv validate on it, and read the engine's log.",
                engines=(figures.engine,),
            )
        )
    return findings
