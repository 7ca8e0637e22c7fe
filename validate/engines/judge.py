"""An engine's figures beside kconv's own. What belongs here: which differences are findings, and how bad they are."""

from __future__ import annotations

from ..report import EngineFigures, Finding

OUTPUT, COUNTS = "K701", "K702"


def judge(figures: EngineFigures, *, strict: bool) -> list[Finding]:
    """Return what is wrong with an engine's figures.

    Args:
        figures: the figures.
        strict: whether both sides compute the same numbers, in fp32: differences are errors then. A server of
            another dtype may decide a near tie otherwise, and its drafts after that are of another text.
    """
    severity = "error" if strict else "warning"
    findings = []
    if figures.same_output < figures.prompts:
        findings.append(
            Finding(
                rule=OUTPUT,
                severity=severity,
                where=figures.engine,
                message=f"{figures.prompts - figures.same_output} of {figures.prompts} greedy continuations are not "
                f"those of {figures.reference}",
                fix="Do not serve this: speculation may not change the output. Look for the engine's own fault first."
                if strict
                else "Compare with the server's own output without speculation; its dtype alone may be the cause.",
                engines=(figures.engine,),
            )
        )
    counted = (figures.drafts, figures.per_position or figures.accepted)
    places = figures.expected_per_position
    expected = (figures.expected_drafts, places if figures.per_position is not None else sum(places))
    if counted != expected:
        findings.append(
            Finding(
                rule=COUNTS,
                severity=severity,
                where=figures.engine,
                message=f"the engine counted {counted[0]} drafts and accepted {counted[1]}, acceptance length "
                f"{figures.length:.3f}; kconv's chain gives {expected[0]} and {expected[1]}, "
                f"{figures.expected_length:.3f}",
                fix="The engine reads the head otherwise than its config says (captured layers, RoPE, norms), or "
                "not all of its tensors: run kconv validate on it, and read the engine's log.",
                engines=(figures.engine,),
            )
        )
    return findings
