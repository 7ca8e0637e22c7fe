"""Acceptance figures as tables.

A column holds figures of one method and one source, a line those about the same prompts (`spots`); what nobody
published or measured stands in its line as that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..bench.acceptance import METHOD, OVERALL, Acceptance, Row
from .evidence import NOT_STATED
from .spots import Spot, tell_apart

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
    """One line of a table.

    Attributes:
        spot: what it is about.
        category, benchmark, prompts: the same as it is shown.
        rows: a figure for each column, None where there is none.
        cells: the same as it is shown.
    """

    spot: Spot
    category: str
    benchmark: str
    prompts: str
    rows: tuple[Row | None, ...]
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table of figures.

    Attributes:
        columns: heads of the figures' columns.
        keys: for each column, what its figures were measured with.
        lines: in the order of the rows.
    """

    columns: tuple[str, ...]
    keys: tuple[str, ...]
    lines: tuple[Line, ...]

    @property
    def bars(self) -> dict[str, dict[str, float]]:
        """What a chart shows: of each column of acceptance lengths, the figures by what they are about."""
        held = [line for line in self.lines if any(line.rows)]
        spots = [line.spot for line in held]
        several = len({spot.dataset for spot in spots}) > 1
        names = [" ".join(filter(None, (s.dataset if several or not s.category else "", s.category))) for s in spots]
        labels = [name + told for name, told in zip(names, tell_apart(names, spots), strict=True)]
        drawn: dict[str, dict[str, float]] = {}
        for place, column in enumerate(self.columns):
            for label, line in zip(labels, held, strict=True):
                if (row := line.rows[place]) and row.metric == "al_incl_bonus":
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
    columns = _columns(rows)
    spots = list(dict.fromkeys(Spot.of(row) for row in rows))
    for dataset, categories in wanted.items():
        held = {spot.category for spot in spots if spot.dataset == dataset}
        lacking = [c for c in (*categories, *([] if held or categories else [OVERALL])) if c not in held]
        # Beside their like, and the whole of a data set behind its parts.
        at = next((i for i, s in enumerate(spots) if (s.dataset, s.category) == (dataset, OVERALL)), len(spots))
        spots[at:at] = [Spot(dataset, category) for category in lacking]
    if not spots:
        return None
    absent = {(d, c) for d, categories in wanted.items() for c in (*categories, OVERALL)}
    named = [(s.domain or s.category or "all", s.name if s.domain else s.dataset, _or(s.prompts)) for s in spots]
    lines = [
        Line(
            spot=spot,
            category=category,
            benchmark=benchmark + told,
            prompts=prompts,
            rows=tuple(own.get(spot) for own in columns),
            cells=tuple(_cell(own, spot, absent) for own in columns) or ("not published",),
        )
        for spot, (category, benchmark, prompts), told in zip(spots, named, tell_apart(named, spots), strict=True)
    ]
    return Table(
        columns=tuple(_heads([next(iter(own.values())) for own in columns])) or ("Acceptance length",),
        keys=tuple(describe(*own.values()) for own in columns),
        lines=tuple(lines),
    )


def _columns(rows: Iterable[Row]) -> list[dict[Spot, Row]]:
    """Return the figures of each column by what they are about; one measured again has a column of its own."""
    columns: dict[tuple, dict[Spot, Row]] = {}
    often: Counter[tuple] = Counter()
    for row in dict.fromkeys(rows):
        key, spot = (*row.method.values(), row.url, row.date), Spot.of(row)
        often[key, spot] += 1
        columns.setdefault((*key, often[key, spot]), {})[spot] = row
    return list(columns.values())


def describe(*rows: Row) -> str:
    """Return what figures of one column were measured with and by whom; what is not known stands as that."""
    row = rows[0]
    source = (
        f"quoted from {row.url}, date {_or(row.date)}"
        if row.measured_by == "quoted"
        else f"measured by kconv, {row.date}"
    )
    called = f', there called "{row.published_as}"' if row.published_as else ""
    note = f" {row.note[0].upper()}{row.note[1:]}." if row.note else ""
    return f"{describe_method(*rows)}; {source}{called}.{note}"


def describe_method(*rows: Row) -> str:
    """Return what figures of one method were measured with, and at which revision each data set."""
    row = rows[0]
    revisions = dict.fromkeys((each.dataset, _or(each.revision)) for each in rows)
    one = len({revision for _, revision in revisions}) == 1
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
        f"revision: {_or(row.revision)}" if one else f"revisions: {', '.join(map(' '.join, revisions))}",
    ]
    return "; ".join(parts)


def _or(value: object, form: str = "{}") -> str:
    return NOT_STATED if value is None else form.format(value)


def _heads(firsts: Sequence[Row]) -> Iterator[str]:
    """Yield the heads of columns by their first figures: what tells each from the others, and only that."""
    apart = [n for n in METHOD if n != "metric" and len({str(row[n]) for row in firsts}) > 1]
    sources = {(row.url, row.date) for row in firsts}
    dates = {date for _, date in sources}
    often: Counter[str] = Counter()
    for row in firsts:
        told = [WAYS[row.averaging] if n == "averaging" else f"{n.replace('_', ' ')} {_or(row[n])}" for n in apart]
        if len(sources) > 1:
            told.append(_or(row.date))
        if len(dates) < len(sources) and row.url:
            told.append(row.url)
        head = f"{HEADS[row.metric]} ({', '.join(told)})" if told else HEADS[row.metric]
        often[head] += 1
        yield f"{head}, no. {often[head]}" if often[head] > 1 else head


def _cell(own: Mapping[Spot, Row], spot: Spot, absent: set[tuple[str, str]]) -> str:
    if row := own.get(spot):
        interval = row.interval
        return row.shown + (f" [{interval.low:.3f}, {interval.high:.3f}]" if interval else "")
    about = (spot.dataset, spot.category)
    # On other prompts there may be one, in a line of its own.
    lacks = about in absent and about not in {(held.dataset, held.category) for held in own}
    return ABSENT[next(iter(own.values())).measured_by] if lacks else ""
