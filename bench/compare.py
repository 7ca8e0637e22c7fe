"""Compare heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import AcceptanceInvalid
from ..lines import Line, Part, Table
from .acceptance import AcceptanceFile, AcceptanceRow, differences, suite_name
from .tables import NOT_STATED, Benchmark, describe_method, draw_bars, tell_apart


@dataclass(frozen=True)
class ComparedFigures:
    """Figures of one method.

    Attributes:
        lines: the subject of each line, and a row for each head, None if it has none.
    """

    method: str
    lines: tuple[tuple[str, tuple[AcceptanceRow | None, ...]], ...]


@dataclass(frozen=True)
class Incomparable:
    """A figure outside the tables: its head, its subject, and the reason."""

    head: str
    about: str
    figure: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        heads: in the order of the files; columns of each table.
        tables: one for each method that two or more heads share.
    """

    heads: tuple[str, ...]
    tables: tuple[ComparedFigures, ...]
    apart: tuple[Incomparable, ...]

    def to_json(self) -> dict[str, Any]:
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

    def lines(self) -> Iterator[Part]:
        """Yield tables of comparable figures, then the others with the reason."""
        for shared in self.tables:
            yield Line(shared.method)
            yield Table(
                ("", *self.heads),
                [(about, *(row.words if row else "" for row in rows)) for about, rows in shared.lines],
            )
            yield ""
        if self.apart:
            columns = ("head", "figure of", "", "not comparable because")
            yield Table(columns, [(one.head, one.about, one.figure, one.reason) for one in self.apart])
        if not self.tables:
            yield "nothing is comparable"


def compare(files: Sequence[AcceptanceFile]) -> Comparison:
    """Compare the figures of several heads with equal keys.

    Raises:
        AcceptanceInvalid: there are fewer than two files, or two are about the same head.
    """
    heads = tuple(file.head for file in files)
    if len(set(heads)) < max(2, len(heads)):
        raise AcceptanceInvalid(
            f"the files are about {', '.join(heads)}, but a comparison needs at least two heads, each once",
            fix="Pass one acceptance.json for each of at least two heads.",
        )
    groups: dict[tuple, dict[Benchmark, list[AcceptanceRow | None]]] = {}
    apart: list[Incomparable] = []
    for place, file in enumerate(files):
        others = [row for at, other in enumerate(files) if at != place for row in other.rows]
        for row in file.rows:
            if all(differences(row, other) for other in others):
                apart.append(Incomparable(file.head, Benchmark.of(row).name, row.shown, _reason(row, others)))
                continue
            # Every field of its key is stated here; domains belong to cards, not to keys.
            about = Benchmark(**row.line)
            figures = groups.setdefault(tuple(row.method.values()), {}).setdefault(about, [None] * len(files))
            if first := figures[place]:
                told = f"the table has {first.shown} with the same key from {first.url}; this one is from {row.url}"
                apart.append(Incomparable(file.head, about.name, row.shown, told))
            else:
                figures[place] = row
    return Comparison(heads, tuple(_shared(lines) for lines in groups.values()), tuple(apart))


def _shared(lines: Mapping[Benchmark, Sequence[AcceptanceRow | None]]) -> ComparedFigures:
    benchmarks, names = list(lines), [about.name for about in lines]
    abouts = [name + told for name, told in zip(names, tell_apart(names, benchmarks), strict=True)]
    held = [row for rows in lines.values() for row in rows if row]
    figures = zip(abouts, map(tuple, lines.values()), strict=True)
    return ComparedFigures(describe_method(*held), tuple(figures))


def draw(comparison: Comparison, file: Path) -> None:
    """Draw the first table's figures as bars.

    Raises:
        AcceptanceInvalid: nothing is comparable.
        MissingExtra: matplotlib is not installed.
    """
    if not comparison.tables:
        raise AcceptanceInvalid(
            "there is nothing to draw: no figures of two heads are comparable",
            where="--chart",
            fix="Run it without --chart, which lists the reasons.",
        )
    table = comparison.tables[0]
    series = [
        (head, [row.value if (row := rows[at]) else None for _, rows in table.lines])
        for at, head in enumerate(comparison.heads)
    ]
    tops = [row.draft_tokens + 1.0 for _, rows in table.lines for row in rows if row and row.draft_tokens]
    labels = [name for name, _ in table.lines]
    draw_bars(file, "Acceptance length (bonus token included)", labels, series, max(tops, default=None))


def _reason(row: AcceptanceRow, others: Sequence[AcceptanceRow]) -> str:
    """Return what separates a figure from the nearest one of another head."""
    about = (suite_name(row.dataset), row.category)
    same = [other for other in others if (suite_name(other.dataset), other.category) == about]
    if not same:
        return f"no other head has a figure on {Benchmark.of(row).name}"
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
