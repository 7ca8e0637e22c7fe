"""What is let pass though a check speaks against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...validate.report import Finding

BEGIN, END = "<!-- kconv: exceptions -->", "<!-- kconv: end of exceptions -->"
TITLE = "## Published with exceptions"


@dataclass(frozen=True)
class Allowance:
    """A rule that is let pass, and the reason that the card gives."""

    rule: str
    why: str


def record_exceptions(card: str, passed: Sequence[tuple[Finding, Allowance]]) -> str:
    """Return the card with what was let pass, and why; with nothing of an earlier publication's.

    Args:
        card: README.md's text.
        passed: each finding that an allowance has let pass.
    """
    head, _, rest = card.partition(BEGIN)
    tail = rest.partition(END)[2]
    plain = head.rstrip("\n") + ("\n" + tail.lstrip("\n") if tail.strip() else "\n") if rest else card
    if not passed:
        return plain
    rows = [f"| {f.rule} | {_cell(f.message)} | {_cell(a.why)} |" for f, a in passed]
    table = ["| check | what it found | why it was let pass |", "|---|---|---|", *rows]
    return plain.rstrip("\n") + "\n\n" + "\n".join([BEGIN, TITLE, "", *table, END]) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
