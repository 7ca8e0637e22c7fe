"""Acceptance figures as tables. What belongs here: which figures share a column, and how lines and columns are named.

A column holds figures of one method and one source; what nobody published or measured stands in its line as that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..validate.acceptance import METHOD, OVERALL, Acceptance, Row
from .evidence import NOT_STATED

METRICS = {
    "al_incl_bonus": "acceptance length, tokens per verify step with the bonus token",
    "draft_accept_rate": "share of drafted tokens that were accepted",
    "teacher_forced_accuracy": "teacher-forced accuracy, which is no acceptance",
}
HEADS = {
    "al_incl_bonus": "Acceptance length",
    "draft_accept_rate": "Acceptance rate",
    "teacher_forced_accuracy": "Accuracy",
}
WAYS = {
    "micro_steps": "mean over verify steps",
    "macro_request": "mean over requests",
    "macro_category": "mean of the categories",
    "micro_positions": "mean over positions",
    None: "kind of mean not stated",
}
ABSENT = {"quoted": "not published", "self": "not measured"}


@dataclass(frozen=True)
class Line:
    """One line: what it is about, and a cell for each column."""

    category: str
    benchmark: str
    prompts: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table of figures.

    Attributes:
        columns: heads of the figures' columns.
        keys: for each column, what its figures were measured with.
        lines: in the order of the rows.
        rows: of each column, for a chart; by what they are about.
    """

    columns: tuple[str, ...]
    keys: tuple[str, ...]
    lines: tuple[Line, ...]
    rows: tuple[tuple[Row, ...], ...]

    @property
    def bars(self) -> dict[str, dict[str, float]]:
        """What a chart shows: of each column of acceptance lengths, the figures by what they are about."""
        several = len({row.dataset for own in self.rows for row in own}) > 1
        drawn: dict[str, dict[str, float]] = {}
        for column, own in zip(self.columns, self.rows, strict=False):
            for row in own:
                if row.metric == "al_incl_bonus":
                    label = " ".join(filter(None, (row.dataset if several or not row.category else "", row.category)))
                    drawn.setdefault(column, {})[label] = row.value
        return drawn


def table_of(acceptances: Iterable[Acceptance], expected: Mapping[str, Sequence[str]]) -> Table | None:
    """Lay out all figures about one head.

    Args:
        acceptances: files about it.
        expected: categories of data sets that were looked for, beside those that the files name.

    Returns:
        The table, None where there is nothing to show, nor anything that is missing.
    """
    files = tuple(acceptances)
    rows = [row for file in files for row in file.rows]
    wanted = {suite.dataset: tuple(suite.categories) for file in files for suite in file.suites}
    wanted |= {dataset: tuple(categories) for dataset, categories in expected.items()}
    columns: dict[tuple, list[Row]] = {}
    for row in rows:
        columns.setdefault((*row.method.values(), row.url, row.date), []).append(row)
    spots = list(dict.fromkeys((row.domain, row.dataset, row.category, row.prompts) for row in rows))
    for dataset, categories in wanted.items():
        held = {category for _, name, category, _ in spots if name == dataset}
        lacking = [c for c in (*categories, *([] if held or categories else [OVERALL])) if c not in held]
        # Beside their like, and the whole of a data set behind its parts.
        at = next((i for i, spot in enumerate(spots) if spot[1] == dataset and spot[2] == OVERALL), len(spots))
        spots[at:at] = [("", dataset, category, None) for category in lacking]
    if not spots:
        return None
    absent = {(d, c) for d, categories in wanted.items() for c in (*categories, OVERALL)}
    lines = [
        Line(
            category=domain or category or "all",
            benchmark=f"{dataset} ({category})" if domain and category else dataset,
            prompts=NOT_STATED if prompts is None else str(prompts),
            cells=tuple(_cell(own, (domain, dataset, category, prompts), absent) for own in columns.values())
            or ("not published",),
        )
        for domain, dataset, category, prompts in spots
    ]
    return Table(
        columns=tuple(_head(own[0], list(columns.values())) for own in columns.values()) or ("Acceptance length",),
        keys=tuple(describe(own[0]) for own in columns.values()),
        lines=tuple(lines),
        rows=tuple(tuple(own) for own in columns.values()),
    )


def describe(row: Row) -> str:
    """Return what a column's figures were measured with, in a sentence; what is not known stands as that."""
    parts = [
        METRICS[row.metric],
        f"K = {_or(row.draft_tokens)}",
        f"tree: {_or(row.tree)}",
        WAYS[row.averaging],
        f"engine: {_or(row.engine)}, version {_or(row.engine_version)}",
        f"target: {_or(row.target)}, precision {_or(row.precision)}",
        f"temperature: {_or(row.temperature, '{:g}')}",
        f"reasoning: {_or(row.reasoning)}",
        f"answers of at most {row.max_tokens} tokens" if row.max_tokens else f"answers' limit: {NOT_STATED}",
        f"revision: {_or(row.revision)}",
    ]
    source = (
        f"quoted from {row.url}, date {_or(row.date)}"
        if row.measured_by == "quoted"
        else f"measured by kconv, {row.date}"
    )
    called = f', there called "{row.published_as}"' if row.published_as else ""
    note = f" {row.note[0].upper()}{row.note[1:]}." if row.note else ""
    return f"{'; '.join(parts)}; {source}{called}.{note}"


def _or(value: object, form: str = "{}") -> str:
    return NOT_STATED if value is None else form.format(value)


def _head(row: Row, columns: Sequence[Sequence[Row]]) -> str:
    """Return a column's head: what tells it from the others, and only that."""
    head = HEADS[row.metric]
    firsts = [own[0] for own in columns]
    apart = [n for n in METHOD if n != "metric" and len({str(other[n]) for other in firsts}) > 1]
    told = [WAYS[row.averaging] if n == "averaging" else f"{n.replace('_', ' ')} {_or(row[n])}" for n in apart]
    if len({(other.url, other.date) for other in firsts}) > 1:
        told.append(_or(row.date))
    return f"{head} ({', '.join(told)})" if told else head


def _cell(own: Sequence[Row], spot: tuple, absent: set[tuple[str, str]]) -> str:
    domain, dataset, category, prompts = spot
    for row in own:
        if (row.domain, row.dataset, row.category, row.prompts) == (domain, dataset, category, prompts):
            interval = row.interval
            return row.shown + (f" [{interval.low:.3f}, {interval.high:.3f}]" if interval else "")
    return ABSENT[own[0].measured_by] if (dataset, category) in absent else ""
