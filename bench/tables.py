"""Acceptance figures as tables.

A column holds figures of one method and one source, a line those for the same prompts (`Benchmark`); what nobody
published or measured is marked as such.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple, Self

from ..charts import chart
from ..engines.registry import engines
from ..errors import MissingExtra
from ..installed import install_command
from .acceptance import (
    AS_PUBLISHED,
    LENGTHS,
    LINE,
    MAY_BE_UNSAID,
    METHOD,
    OVERALL,
    AcceptanceFile,
    AcceptanceRow,
    suite_name,
)

NOT_STATED = "not stated"
METRICS = {
    "al_incl_bonus": "acceptance length in tokens per verify step with the bonus token",
    AS_PUBLISHED: "acceptance length in tokens per verify step",
    "draft_accept_rate": "share of drafted tokens that were accepted",
    "teacher_forced_accuracy": "teacher-forced accuracy, which is not acceptance",
}
HEADS = {
    **dict.fromkeys(LENGTHS, "Acceptance length"),
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
NOT_PUBLISHED, UNKNOWN = "not published", "unknown"
LEGEND = {UNKNOWN: "*unknown*: only a part of the source was read; the rest may have the figure."}
EXCERPT = "Only a part of the source was read; the rest may have more figures."
# The line of a figure that is one for all categories, beside a column of another mean.
OF_CATEGORIES = "mean of the categories"

# Of a digest of prompts, what a sentence shows.
DIGEST = "sha256:"
SHOWN = len(DIGEST) + 12

# Bars of a chart, up to which each has room for its figure.
MOST_LABELED = 24

# What distinguishes lines that read alike, in this order.
FURTHER = {"prompts": "N = {}", "revision": "revision {}", "prompts_sha256": "prompts' sha256 {}", "source": "of {}"}


@dataclass(frozen=True)
class Benchmark:
    """The subject of one line's figures.

    Attributes:
        source: URL and date of the figures, if their source omits the revision or the number of prompts; None if it
            states both.
    """

    dataset: str
    category: str
    revision: str | None = None
    prompts: int | None = None
    prompts_sha256: str | None = None
    domain: str = ""
    source: str | None = None

    @classmethod
    def of(cls, row: AcceptanceRow) -> Self:
        unsaid = any(row[name] is None for name in LINE if name not in MAY_BE_UNSAID)
        source = ", ".join(filter(None, (row.url, row.date))) if unsaid else None
        return cls(**row.line, domain=row.domain, source=source)

    @property
    def name(self) -> str:
        """Dataset and category, e.g. "MT-Bench (math)"."""
        return f"{self.dataset} ({self.category})" if self.category else self.dataset


@dataclass(frozen=True)
class Line:
    """One line of a table.

    Attributes:
        category, benchmark, prompts: the text shown for its subject.
        rows: a figure for each column, None if there is none.
        cells: the text shown for them.
    """

    about: Benchmark
    category: str
    benchmark: str
    prompts: str
    rows: tuple[AcceptanceRow | None, ...]
    cells: tuple[str, ...]


class Key(NamedTuple):
    """How and by whom figures were measured, in parts: the conditions; then what is not stated, the source, a note."""

    conditions: tuple[str, ...]
    origin: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join((", ".join(self.conditions), *self.origin))

    def __contains__(self, part: object) -> bool:
        return part in self.conditions or part in self.origin

    def but(self, *without: Iterable[str]) -> Key:
        """Return it without the parts that any of these holds."""
        conditions, origin = (
            tuple(part for part in parts if not any(part in other for other in without)) for parts in self
        )
        return Key(conditions, origin)


@dataclass(frozen=True)
class Table:
    """A table of figures.

    Attributes:
        keys: for each column, how its figures were measured.
        excerpt: whether lines were left out of which nothing is known.
    """

    columns: tuple[str, ...]
    keys: tuple[Key, ...]
    lines: tuple[Line, ...]
    excerpt: bool = False

    @property
    def sentence(self) -> str:
        """How the figures were measured: what holds for all columns, then for each what its heading does not say."""
        if not self.keys:
            return ""
        first = self.keys[0]
        apart = [part for parts in first for part in parts if not all(part in key for key in self.keys)]
        shared = first.but(apart)
        own = [(column, key.but(shared.conditions, shared.origin, column))
               for column, key in zip(self.columns, self.keys, strict=False)]  # fmt: skip
        said = "; ".join([str(shared), *(f"{column}: {', '.join((*key.conditions, *key.origin))}"
                                         for column, key in own if any(key))])  # fmt: skip
        return f"{said[:1].upper()}{said[1:]}."

    def is_like(self, other: Table) -> bool:
        """Return whether all figures of both tables were measured in one way, but for K."""
        rows = [row for table in (self, other) for line in table.lines for row in line.rows if row]
        return len({(*(row.method | {"draft_tokens": None}).values(), row.revision, row.url) for row in rows}) == 1

    @property
    def counted(self) -> bool:
        """Whether a line states its number of prompts."""
        return any(line.prompts for line in self.lines)

    @property
    def legend(self) -> list[str]:
        """The meaning of its cells, where they do not state it themselves."""
        intervals = {row.interval.level: row.interval.over for line in self.lines for row in line.rows
                     if row and row.interval}  # fmt: skip
        cells = {cell for line in self.lines for cell in line.cells}
        said = [f"In brackets: the {level:.0%} confidence interval, by bootstrap over {over}."
                for level, over in intervals.items()]  # fmt: skip
        return said + [text for word, text in LEGEND.items() if word in cells] + [EXCERPT] * self.excerpt

    @property
    def bars(self) -> dict[str, dict[str, float]]:
        """The content of a chart: for each column of acceptance lengths, the figures by subject."""
        held = [line for line in self.lines if any(line.rows)]
        shown = [line.about for line in held]
        several = len({about.dataset for about in shown}) > 1
        names = [" ".join(filter(None, (b.dataset if several else "", b.category))) or "all" for b in shown]
        labels = [name + told for name, told in zip(names, tell_apart(names, shown), strict=True)]
        drawn: dict[str, dict[str, float]] = {}
        for place, column in enumerate(self.columns):
            for label, line in zip(labels, held, strict=True):
                if (row := line.rows[place]) and row.metric in LENGTHS:
                    drawn.setdefault(column, {})[label] = row.value
        return drawn


def table_of(
    acceptances: Iterable[AcceptanceFile], expected: Mapping[str, Sequence[str]], partly: Collection[str] = ()
) -> Table | None:
    """Arrange all figures about one head in a table; None if there is nothing to show and nothing missing.

    Args:
        expected: categories of datasets that were expected, in addition to those in the files.
        partly: datasets of which only a part of the prompts was used.
    """
    files = tuple(acceptances)
    rows = [row for file in files for row in file.rows]
    wanted = {suite_name(suite.dataset): tuple(suite.categories) for file in files for suite in file.suites}
    wanted |= {suite_name(dataset): tuple(categories) for dataset, categories in expected.items()}
    # Only for a completely read source is it known that something is missing.
    whole = (suite.dataset for file in files for suite in file.suites if suite.source == "whole")
    read = {suite_name(dataset) for dataset in (*whole, *expected)}
    columns = _columns(rows)
    benchmarks = list(
        dict.fromkeys(about for row in rows for own in columns for about, one in own.items() if one is row)
    )
    for dataset, categories in wanted.items():
        held = {about.category for about in benchmarks if about.dataset == dataset}
        lacking = [c for c in (*categories, *([] if held or categories else [OVERALL])) if c not in held]
        # Next to similar lines, and the whole of a dataset after its parts.
        overall = (i for i, b in enumerate(benchmarks) if (b.dataset, b.category) == (dataset, OVERALL))
        at = next(overall, len(benchmarks))
        benchmarks[at:at] = [Benchmark(dataset, category) for category in lacking]
    if not benchmarks:
        return None
    absent = {
        (d, c): NOT_PUBLISHED if d in read else UNKNOWN
        for d, categories in wanted.items()
        for c in (*categories, OVERALL)
    }
    named = [
        (
            s.domain or s.category or "all",
            "part of " * (s.dataset in partly) + (s.name if s.domain else s.dataset),
            str(s.prompts or ""),
        )
        for s in benchmarks
    ]
    lines = [
        Line(
            about=about,
            category=category,
            benchmark=benchmark + told,
            prompts=prompts,
            rows=tuple(own.get(about) for own in columns),
            cells=tuple(_cell(own, about, absent) for own in columns) or (NOT_PUBLISHED,),
        )
        for about, (category, benchmark, prompts), told in zip(
            benchmarks, named, tell_apart(named, benchmarks), strict=True
        )
    ]
    lines = [line for line in lines if any(line.cells)]
    # A line that says nothing but that nothing is known is none.
    known = [line for line in lines if any(cell and cell != UNKNOWN for cell in line.cells)]
    return Table(
        columns=tuple(_heads([next(iter(own.values())) for own in columns])) or ("Acceptance length",),
        keys=tuple(describe(*own.values()) for own in columns),
        lines=tuple(known),
        excerpt=len(known) < len(lines),
    )


def _columns(rows: Iterable[AcceptanceRow]) -> list[dict[Benchmark, AcceptanceRow]]:
    """Return the figures of each column by subject; a repeated measurement gets its own column."""
    columns: dict[tuple, dict[Benchmark, AcceptanceRow]] = {}
    often: Counter[tuple] = Counter()
    for row in dict.fromkeys(rows):
        key, about = (*row.method.values(), row.url, row.date), Benchmark.of(row)
        often[key, about] += 1
        columns.setdefault((*key, often[key, about]), {})[about] = row
    return _means_as_lines(columns.values())


def _means_as_lines(columns: Iterable[dict[Benchmark, AcceptanceRow]]) -> list[dict[Benchmark, AcceptanceRow]]:
    """Move means of the categories, one figure for all of them, into a line of the column with the other mean."""
    kept: list[dict[Benchmark, AcceptanceRow]] = []
    for own in sorted(columns, key=lambda own: next(iter(own.values())).averaging == "macro_category"):
        first = next(iter(own.values()))
        of_all = first.averaging == "macro_category" and not any(about.category for about in own)
        beside = (other for other in kept if of_all and _but_mean(next(iter(other.values()))) == _but_mean(first))
        if (other := next(beside, None)) is None:
            kept.append(own)
        else:
            other |= {replace(about, category=OF_CATEGORIES): row for about, row in own.items()}
    return kept


def _but_mean(row: AcceptanceRow) -> dict[str, object]:
    return row.method | {"averaging": None, "url": row.url, "date": row.date}


def describe(*rows: AcceptanceRow) -> Key:
    """Return how and by whom one column's figures were measured; unknown conditions are marked."""
    row, key = rows[0], _method(*rows)
    source = (
        f"quoted from {row.url} ({row.date or 'no date'})"
        if row.measured_by == "quoted"
        else f"measured by kconv, {row.date}"
    )
    return key._replace(origin=(*key.origin, f"{source}{_called(rows)}", *([row.note] if row.note else [])))


def _called(rows: Sequence[AcceptanceRow]) -> str:
    """Return the source's name for the figures, and which figures have it if there are several names."""
    names: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.published_as:
            names.setdefault(row.published_as, {})[Benchmark.of(row).name] = None
    if len(names) < 2:
        return "".join(f', where it is called "{name}"' for name in names)
    first, *others = names
    also = "".join(f', and "{name}" of {" and ".join(names[name])}' for name in others)
    return f', where it is called "{first}"{also}'


def describe_method(*rows: AcceptanceRow) -> str:
    """Return how figures of one method were measured, as a text."""
    return str(_method(*rows))


def _method(*rows: AcceptanceRow) -> Key:
    """Return how figures of one method were measured, with each dataset's revision."""
    row = rows[0]
    revisions = dict.fromkeys((each.dataset, _short(_or(each.revision))) for each in rows)
    one = len({revision for _, revision in revisions}) == 1
    parts: dict[str, object] = {
        "bonus token": None if row.metric == AS_PUBLISHED else "",
        "K": None if row.draft_tokens is None else f"K = {row.draft_tokens}",
        "tree": row.tree and ("a chain of drafts" if row.tree == "chain" else f"a tree of drafts ({row.tree})"),
        "kind of mean": row.averaging and WAYS[row.averaging],
        "engine": row.engine and " ".join(filter(None, (_titles().get(row.engine, row.engine), row.engine_version))),
        "engine version": row.engine_version and "",
        "target": row.target and f"target {' in '.join(filter(None, (row.target, row.precision)))}",
        "precision": row.precision and "",
        "temperature": None if row.temperature is None else f"temperature {row.temperature:g}",
        "reasoning": row.reasoning and f"{row.reasoning} reasoning",
        "draft_sample_method": row.draft_sample_method and f"{row.draft_sample_method} drafts",
        "rejection_sample_method": row.rejection_sample_method and f"{row.rejection_sample_method} rejection",
        "answers' limit": row.max_tokens and f"answers of at most {row.max_tokens} tokens",
        "revision": (row.revision and f"prompts of revision {_short(row.revision)}")
        if one
        else f"prompts of revisions {' and '.join(map(' '.join, revisions))}",
    }
    # Details of another part have no words of their own.
    stated = [str(part) for part in parts.values() if part]
    unsaid = [name for name, part in parts.items() if part is None and name not in MAY_BE_UNSAID]
    return Key((METRICS[row.metric], *stated), (f"{NOT_STATED}: {', '.join(unsaid)}",) if unsaid else ())


@cache
def _titles() -> dict[str, str]:
    return {engine.name: engine.title for engine in engines()}


def _short(revision: str) -> str:
    """Return a revision as a reader needs it: acceptance.json has all digits of a digest."""
    return f"{revision[:SHOWN]}…" if revision.startswith(DIGEST) and len(revision) > SHOWN else revision


def _or(value: object, form: str = "{}") -> str:
    return NOT_STATED if value is None else form.format(value)


def _heads(firsts: Sequence[AcceptanceRow]) -> Iterator[str]:
    """Yield the headings of columns by their first figures: only what distinguishes each from the others."""
    apart = [n for n in METHOD if n != "metric" and len({str(row[n]) for row in firsts}) > 1]
    sources = {(row.url, row.date) for row in firsts}
    dates = {date for _, date in sources}
    often: Counter[str] = Counter()
    for row in firsts:
        told = [_told(row, n) for n in apart]
        if len(sources) > 1:
            told.append(_or(row.date))
        if len(dates) < len(sources) and row.url:
            told.append(row.url)
        head = f"{HEADS[row.metric]} ({', '.join(told)})" if told else HEADS[row.metric]
        often[head] += 1
        yield f"{head}, no. {often[head]}" if often[head] > 1 else head


def _told(row: AcceptanceRow, name: str) -> str:
    if name == "averaging":
        return WAYS[row.averaging]
    return f"K = {_or(row[name])}" if name == "draft_tokens" else f"{name.replace('_', ' ')} {_or(row[name])}"


def _cell(own: Mapping[Benchmark, AcceptanceRow], about: Benchmark, absent: Mapping[tuple[str, str], str]) -> str:
    if row := own.get(about):
        interval = row.interval
        return row.shown + (f" [{interval.low:.3f}, {interval.high:.3f}]" if interval else "")
    prompts = (about.dataset, about.category)
    # For other prompts there may be one, in a separate line.
    lacks = prompts in absent and prompts not in {(held.dataset, held.category) for held in own}
    if not lacks:
        return ""
    # What kconv did not measure is left out; of a publisher's table it is said what it lacks.
    row = next(iter(own.values()))
    return "" if row.measured_by == "self" or row.averaging == "macro_category" else absent[prompts]


def tell_apart(names: Sequence[Hashable], benchmarks: Sequence[Benchmark]) -> list[str]:
    """Return what to add to the names of lines so that no two read alike, e.g. ", revision main"; "" for a unique one.

    Args:
        benchmarks: the subject of each; no two are equal.
    """
    told = [""] * len(names)
    for field, words in FURTHER.items():
        values = [getattr(about, field) for about in benchmarks]
        held: dict[tuple[Hashable, str], set[object]] = defaultdict(set)
        for name, before, value in zip(names, told, values, strict=True):
            held[name, before].add(value)
        told = [
            f"{before}, {words.format(NOT_STATED if value is None else value)}"
            if len(held[name, before]) > 1
            else before
            for name, before, value in zip(names, told, values, strict=True)
        ]
    return told


def draw_bars(
    file: Path,
    title: str,
    labels: Sequence[str],
    series: Sequence[tuple[str, Sequence[float | None]]],
    top: float | None,
) -> None:
    """Draw a group of bars for each label.

    Args:
        series: a name and a value for each label, None if there is none.
        top: the end of the axis; K + 1 for acceptance lengths.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    width = 0.8 / len(series)
    try:
        # At most twice as wide as high: a card shows it 700 points wide.
        width_in = min(10.0, max(6.0, 0.45 * len(labels) * len(series) + 2.0))
        with chart(file, width=width_in, height=max(3.6, width_in / 2)) as (figure, [axes]):
            for number, (name, values) in enumerate(series):
                places = [at + (number - (len(series) - 1) / 2) * width for at, v in enumerate(values) if v is not None]
                heights = [value for value in values if value is not None]
                bars = axes.bar(places, heights, 0.92 * width, label=name)
                if len(labels) * len(series) <= MOST_LABELED:
                    axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
            slanted = {"rotation": 30, "ha": "right"} if len(labels) > 4 else {}
            axes.set_xticks(range(len(labels)), labels, **slanted)
            axes.set_ylabel("tokens per verify step")
            axes.set_title(title, loc="left")
            axes.set_ylim(1.0, top)
            axes.grid(False, axis="x")
            if len(series) > 1:
                figure.legend(loc="outside lower left", ncols=min(3, len(series)))
    except ImportError as fault:
        raise MissingExtra(
            "drawing a chart needs matplotlib", fix=f"Run {install_command('plots')}, or add --no-chart."
        ) from fault
