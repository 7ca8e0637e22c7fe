"""Heads side by side. What belongs here: which figures of several files can be compared, and why the others cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import AcceptanceInvalid
from ..validate.acceptance import Acceptance, Row, differences
from .evidence import NOT_STATED
from .plots import draw_bars
from .tables import describe


@dataclass(frozen=True)
class Shared:
    """Figures of one method.

    Attributes:
        method: what they were measured with, in a sentence.
        lines: what each line is about, and a row for each head, None where it has none.
    """

    method: str
    lines: tuple[tuple[str, tuple[Row | None, ...]], ...]


@dataclass(frozen=True)
class Apart:
    """A figure that compares with none of another head's: whose it is, what it is about, and why."""

    head: str
    about: str
    figure: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    """What came of comparing.

    Attributes:
        heads: in the order of the files; columns of each table.
        tables: one for each method that two heads or more share.
        apart: the rest.
    """

    heads: tuple[str, ...]
    tables: tuple[Shared, ...]
    apart: tuple[Apart, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as one JSON object."""
        return {
            "heads": self.heads,
            "tables": [
                {
                    "method": table.method,
                    "lines": [
                        {"about": about, "figures": [row and row.value for row in rows]} for about, rows in table.lines
                    ],
                }
                for table in self.tables
            ],
            "incomparable": [vars(apart) for apart in self.apart],
        }


def compare(files: Sequence[Acceptance]) -> Comparison:
    """Put the figures of several heads side by side where their keys are equal.

    Raises:
        AcceptanceInvalid: fewer than two files, or two about one head.
    """
    heads = tuple(file.head for file in files)
    if len(set(heads)) < max(2, len(heads)):
        raise AcceptanceInvalid(
            f"{len(set(heads))} head(s) in {len(heads)} file(s) are nothing to compare",
            fix="Give one acceptance.json for each of two heads or more.",
        )
    groups: dict[tuple, dict[tuple, list[Row | None]]] = {}
    apart: list[Apart] = []
    for place, file in enumerate(files):
        others = [row for at, other in enumerate(files) if at != place for row in other.rows]
        for row in file.rows:
            if any(not differences(row, other) for other in others):
                lines = groups.setdefault(tuple(row.method.values()), {})
                lines.setdefault(tuple(row.line.values()), [None] * len(files))[place] = row
            else:
                apart.append(Apart(file.head, about(row), row.shown, _reason(row, others)))
    tables = tuple(
        Shared(
            describe(_first(next(iter(lines.values())))).rsplit("; ", 1)[0],
            tuple((about(_first(rows)), tuple(rows)) for rows in lines.values()),
        )
        for lines in groups.values()
    )
    return Comparison(heads, tables, tuple(apart))


def about(row: Row) -> str:
    """Say what a figure is about: data set and category."""
    return f"{row.dataset} ({row.category})" if row.category else row.dataset


def draw(comparison: Comparison, file: Path) -> None:
    """Draw the first table's figures as bars.

    Raises:
        AcceptanceInvalid: there is nothing comparable.
        MissingExtra: matplotlib is not installed.
    """
    if not comparison.tables:
        raise AcceptanceInvalid("no figure of one head compares with another's", fix="See the reasons in the table.")
    table = comparison.tables[0]
    series = [
        (head, [row.value if (row := rows[at]) else None for _, rows in table.lines])
        for at, head in enumerate(comparison.heads)
    ]
    tops = [row.draft_tokens + 1.0 for _, rows in table.lines for row in rows if row and row.draft_tokens]
    labels = [name for name, _ in table.lines]
    draw_bars(file, "Acceptance length (bonus token included)", labels, series, max(tops, default=None))


def _first(rows: Sequence[Row | None]) -> Row:
    return next(row for row in rows if row)


def _reason(row: Row, others: Sequence[Row]) -> str:
    """Say what keeps a figure from the nearest of another head's."""
    same = [other for other in others if (other.dataset, other.category) == (row.dataset, row.category)]
    if not same:
        return f"no other head has a figure on {about(row)}"
    nearest: Mapping[str, tuple[Any, Any]] = min((differences(row, other) for other in same), key=len)
    told = []
    for name, (own, theirs) in nearest.items():
        name = name.replace("_", " ")
        if own is None and theirs is None:
            told.append(f"{name} {NOT_STATED} by either")
        else:
            told.append(
                f"{name} {NOT_STATED if own is None else own} here, {NOT_STATED if theirs is None else theirs} there"
            )
    return "; ".join(told)
