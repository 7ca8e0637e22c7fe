"""acceptance.json: acceptance figures, each with its measuring conditions.

Published acceptance lengths cannot be compared, since they do not state their conditions: with or without the bonus
token, mean over requests or over verify steps, by which engine, on which target. Here a figure carries all of this.
Figures with different `method` never share a column, and an unstated condition is None, which equals nothing, not even
another None.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from ..checkpoint.schema import MAX_JSON, find_wrong, load_json, read_bounded
from ..errors import AcceptanceInvalid, NotACheckpoint
from ..lines import Line, Part, Result, Table
from ..measure.figures import ROUNDED
from ..strict import StrictModel

ACCEPTANCE = "acceptance.json"
OVERALL = ""  # the category of a figure over the whole of a dataset

Metric = Literal["al_incl_bonus", "al_as_published", "draft_accept_rate", "teacher_forced_accuracy"]
# An acceptance length whose source does not state whether the bonus token is in it: comparable with nothing.
AS_PUBLISHED = "al_as_published"
LENGTHS = ("al_incl_bonus", AS_PUBLISHED)
Averaging = Literal["micro_steps", "macro_request", "macro_category", "micro_positions"]
MeasuredBy = Literal["self", "quoted"]

# What must be equal for two figures to share a column; date, file and URL may differ.
METHOD = (
    "metric", "draft_tokens", "tree", "averaging", "engine", "engine_version", "target", "precision", "temperature",
    "reasoning", "max_tokens", "draft_sample_method", "rejection_sample_method", "measured_by",
)  # fmt: skip
# What must be equal for two figures to share a line.
LINE = ("dataset", "revision", "category", "prompts", "prompts_sha256")
# What kconv knows about its own measurements.
SAID_BY_SELF = ("draft_tokens", "averaging", "engine", "engine_version", "prompts", "date")
# One name per suite, however a card spells it.
SPELLINGS = {"mtbench": "MT-Bench", "speedbench": "SPEED-Bench", "humaneval": "HumanEval", "gsm8k": "GSM8K",
             "math500": "MATH500", "ceval": "CEval", "livecodebench": "LiveCodeBench", "mmstar": "MMStar"}  # fmt: skip
# Kinds of means, as headings.
WAYS = {
    "micro_steps": "steps",
    "macro_request": "requests",
    "macro_category": "categories",
    "micro_positions": "positions",
}
# Not every dataset has the first, and not every target the second.
MAY_BE_UNSAID = {"prompts_sha256", "reasoning", "draft_sample_method", "rejection_sample_method"}


def suite_name(dataset: str) -> str:
    """Return one name for a suite with several spellings, e.g. "MT-Bench" for "MTBench" and "mt_bench"."""
    return SPELLINGS.get(re.sub(r"[-_ ]", "", dataset).lower(), dataset)


def most_of(metric: str, draft_tokens: int | None) -> float:
    """Return the largest value of a metric with K draft tokens."""
    return (draft_tokens or float("inf")) + 1.0 if metric in LENGTHS else 1.0


class Interval(StrictModel):
    """A bootstrap confidence interval.

    Attributes:
        low, high: its ends, in the figure's unit.
        level: e.g. 0.95.
        over: what the bootstrap samples: "prompts", or "groups of N prompts" if N ran in parallel.
        units: their number.
    """

    low: float
    high: float
    level: float = 0.95
    over: str
    units: int


class Sanity(StrictModel):
    """The target's answers; repetitive text inflates every drafter's acceptance.

    Attributes:
        distinct_4grams: share of distinct 4-grams of words within an answer, mean over answers.
        mean_tokens: tokens per answer.
        cut: share of answers that ended at `max_tokens`.
    """

    distinct_4grams: float
    mean_tokens: float
    cut: float


class Speed(StrictModel):
    """Output tokens per second of wall clock, with and without speculation, on the same prompts.

    Attributes:
        tokens_per_second, baseline_tokens_per_second: of all requests together.
        speedup: the first over the second.
        same_answers: share of answers with identical text; greedy decoding should give nearly all.
    """

    tokens_per_second: float
    baseline_tokens_per_second: float
    speedup: float
    same_answers: float


class SpeedFigure(StrictModel):
    """A figure of speed, with its interval if there are two or more prompts."""

    value: float
    interval: Interval | None = None

    def words(self, factor: float, decimals: int) -> str:
        """Return the figure in another unit, e.g. "1.52 [1.40, 1.63]"."""
        ends = (self.interval.low, self.interval.high) if self.interval else ()
        said = ", ".join(f"{factor * end:.{decimals}f}" for end in ends)
        return f"{factor * self.value:.{decimals}f}" + (f" [{said}]" if said else "")


class SpeedRow(StrictModel):
    """Speed at one concurrency, with and without the draft; a speed-up applies only to that concurrency.

    Attributes:
        concurrency: dialogues in flight.
        tokens_per_second: output tokens of all of them by wall clock.
        ttft: seconds to the first token, mean over prompts.
        tpot: seconds per further token.
        baseline_tokens_per_second, baseline_ttft, baseline_tpot: the same without a draft; None if not measured.
        speedup: of tokens per second.
        same_answers: share of answers with identical text; greedy decoding should give nearly all.
        draft_tokens, tree, engine, engine_version, target, precision, temperature, max_tokens, dataset, revision,
            prompts, prompts_sha256, date: as in `AcceptanceRow`.
    """

    concurrency: int = Field(ge=1)
    tokens_per_second: SpeedFigure
    ttft: SpeedFigure
    tpot: SpeedFigure
    baseline_tokens_per_second: SpeedFigure | None = None
    baseline_ttft: SpeedFigure | None = None
    baseline_tpot: SpeedFigure | None = None
    speedup: SpeedFigure | None = None
    same_answers: float | None = None
    draft_tokens: int
    tree: str
    engine: str
    engine_version: str
    target: str
    precision: str | None = None
    temperature: float
    max_tokens: int
    dataset: str
    revision: str
    prompts: int
    prompts_sha256: str
    date: str

    @property
    def cells(self) -> tuple[str, ...]:
        """Its line of a table."""
        figures = ((self.tokens_per_second, 1, 1), (self.ttft, 1000, 1), (self.tpot, 1000, 2),
                   (self.baseline_tokens_per_second, 1, 1), (self.speedup, 1, 2))  # fmt: skip
        words = (figure.words(factor, decimals) if figure else "" for figure, factor, decimals in figures)
        return (str(self.draft_tokens), str(self.concurrency), *words)


class AcceptanceRow(StrictModel):
    """One figure with its full key.

    Attributes:
        metric: "al_incl_bonus" is the acceptance length, tokens per verify step with the bonus token;
            "al_as_published" a quoted one whose source does not state whether the bonus token is in it.
        value: in tokens, or a share for the other metrics.
        decimals: digits to show after the point; for a quoted figure, those in its source.
        draft_tokens: K.
        tree: "chain", or how drafts branch.
        averaging: over verify steps, requests, categories, or all positions of a text.
        engine, engine_version: what ran it; "kconv" for its own forward.
        target, precision: the served target, and its number format.
        temperature, reasoning: how it was sampled; `reasoning` e.g. "medium", if the target has such modes.
        draft_sample_method, rejection_sample_method: in vLLM's terms, e.g. "greedy" and "standard", if a server shows
            them; curves of one head differ by them.
        dataset, revision: e.g. "MT-Bench" and a commit or a file's sha256.
        prompts_sha256: `target.prompts.digest_prompts` of the prompts, if known.
        category: of the dataset; "" for the whole.
        domain: the table group of the dataset, e.g. "Math".
        prompts: their number (N).
        max_tokens: an answer's limit.
        date: ISO, of the measurement, or of the quoted publication.
        measured_by: "self", or "quoted" with its `url`.
        published_as: the quoted source's name for the figure.
        rates: share of verify steps in which the draft was accepted up to each position.
        drafts: the number of verify steps.
        interval, sanity, speed: if measured.
        note: how the figure was measured, if its key does not state that.
    """

    metric: Metric
    value: float
    decimals: int = Field(default=3, ge=0, le=6)
    draft_tokens: int | None = Field(default=None, ge=1)
    tree: str | None = None
    averaging: Averaging | None = None
    engine: str | None = None
    engine_version: str | None = None
    target: str | None = None
    precision: str | None = None
    temperature: float | None = Field(default=None, ge=0)
    reasoning: str | None = None
    draft_sample_method: str | None = None
    rejection_sample_method: str | None = None
    dataset: str
    revision: str | None = None
    prompts_sha256: str | None = None
    category: str = OVERALL
    domain: str = ""
    prompts: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    date: str | None = None
    measured_by: MeasuredBy
    url: str | None = None
    published_as: str | None = None
    rates: tuple[float, ...] | None = None
    drafts: float | None = None
    interval: Interval | None = None
    sanity: Sanity | None = None
    speed: Speed | None = None
    note: str = ""

    @property
    def method(self) -> dict[str, Any]:
        """The fields that all figures of its column share."""
        return {name: getattr(self, name) for name in METHOD}

    @property
    def line(self) -> dict[str, Any]:
        """The fields that all figures of its line share; a suite has only one name here."""
        return {name: getattr(self, name) for name in LINE} | {"dataset": suite_name(self.dataset)}

    @property
    def shown(self) -> str:
        """The figure as text, e.g. "2.340"."""
        return f"{self.value:.{self.decimals}f}"

    @property
    def words(self) -> str:
        """The figure with its interval, e.g. "2.340 [2.21, 2.47]"."""
        return self.shown + (f" [{self.interval.low:.2f}, {self.interval.high:.2f}]" if self.interval else "")

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        if self.measured_by == "quoted" and not self.url:
            raise ValueError(f"{self.dataset} {self.category} is quoted without the url of its source")
        if self.measured_by == "self":
            unsaid = [name for name in SAID_BY_SELF if not self[name]]
            if unsaid:
                raise ValueError(f"{self.dataset} {self.category} was measured, but does not state {', '.join(unsaid)}")
            if self.metric == AS_PUBLISHED:
                raise ValueError(f"{self.dataset} {self.category} was measured, but has the metric of a quoted figure")
        low = 1.0 if self.metric == "al_incl_bonus" else 0.0
        high = most_of(self.metric, self.draft_tokens)
        if not low <= self.value <= high:
            raise ValueError(
                f"{self.dataset} {self.category}: {self.metric} {self.shown} is not from {low:g} to {high:g}"
            )
        rates = self.rates or ()
        if list(rates) != sorted(rates, reverse=True):
            raise ValueError(f"{self.dataset} {self.category}: more drafts are accepted up to a later position")
        counted = (self.metric, self.averaging) == ("al_incl_bonus", "micro_steps")
        if rates and counted and abs(1 + sum(rates) - self.value) > ROUNDED * len(rates):
            raise ValueError(
                f"{self.dataset} {self.category}: the rates give {1 + sum(rates):.3f} tokens per step, not {self.shown}"
            )
        if (band := self.interval) is not None:
            # A bootstrap's ends are seldom far from symmetric, and its figure never outside of them by much.
            spare = (band.high - band.low) / 2 + ROUNDED
            if not band.low - spare <= self.value <= band.high + spare:
                raise ValueError(f"{self.dataset} {self.category}: {self.words} is outside of its own interval")
            if band.over == "prompts" and self.prompts not in (None, band.units):
                raise ValueError(
                    f"{self.dataset} {self.category}: prompts is {self.prompts}, but the interval is over {band.units}"
                )
        return self

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class SuiteRecord(StrictModel):
    """The parts of a dataset, so that a table can show what is missing.

    Attributes:
        dataset: as named in its rows.
        categories: all categories shown.
        whole: whether every prompt was used; None if a quoted source does not state it.
        source: how much of a quoted source was read. In a complete one, a missing category counts as not published; in
            an excerpt, or if nothing is stated, it is unknown.
    """

    dataset: str
    categories: tuple[str, ...]
    whole: bool | None = None
    source: Literal["whole", "excerpt"] | None = None


class AcceptanceFile(Result, StrictModel):
    """The figures about one head; the schema of acceptance.json.

    Attributes:
        head: hub id or folder name.
        weights: sha256 of each weight file, if the head was available.
        config: sha256 of its config.json; with another one the same weights are another head.
        suites: the parts of the datasets.
        rows: no two with the same key.
        speeds: at each concurrency, if requested.
        kconv: the version that measured; None if everything is quoted.
        provenance: further facts: the server's model name, the requests' extra fields, seconds taken.
    """

    FOLDS: ClassVar[bool] = True

    schema_version: Literal[1] = Field(default=1, alias="schema")
    head: str
    weights: dict[str, str] = Field(default={})
    config: str = ""
    suites: tuple[SuiteRecord, ...] = ()
    rows: tuple[AcceptanceRow, ...] = Field(min_length=1)
    speeds: tuple[SpeedRow, ...] = ()
    kconv: str | None = None
    provenance: dict[str, Any] = Field(default={})

    @model_validator(mode="after")
    def _no_row_twice(self) -> Self:
        seen: set[tuple[Any, ...]] = set()
        for row in self.rows:
            key = (*row.method.values(), *row.line.values(), row.url)
            if key in seen:
                raise ValueError(f"two rows of {row.dataset} {row.category} have the same key")
            seen.add(key)
        return self

    @property
    def measured(self) -> bool:
        """Whether it has a measured figure, not only quoted ones; such a file names the weights that it is about."""
        return any(row.measured_by == "self" for row in self.rows)

    def is_whole(self, dataset: str) -> bool:
        """Return whether every prompt of a dataset was used."""
        return any(suite_name(suite.dataset) == suite_name(dataset) and suite.whole for suite in self.suites)

    def to_json(self) -> str:
        """Return acceptance.json's text."""
        return self.model_dump_json(indent=1, by_alias=True, exclude_none=True) + "\n"

    def lines(self) -> Iterator[Part]:
        """Yield a line for each K and category, a column for each kind of mean; and for each concurrency, the speed."""
        rows = self.rows
        ways = list(dict.fromkeys(row.averaging or "" for row in rows))
        lengths = list(dict.fromkeys(row.draft_tokens for row in rows))
        of_k = f", K={lengths[0]}" if len(lengths) == 1 else ""
        by = f", by {rows[0].engine}" if rows[0].engine else ""
        yield Line(f"acceptance length{of_k}, bonus token included{by}; mean over")
        shown = []
        for k, category in dict.fromkeys((row.draft_tokens, row.category) for row in rows):
            own = {row.averaging or "": row for row in rows if (row.draft_tokens, row.category) == (k, category)}
            first = () if of_k else (str(k or "not stated"),)
            count = str(next(iter(own.values())).prompts or "")
            shown.append((*first, category or "all", count, *(own[way].words if way in own else "" for way in ways)))
        yield Table((*(() if of_k else ("K",)), "", "N", *(WAYS.get(way, way) for way in ways)), shown)
        last = next((row for row in rows if row.category == rows[-1].category and row.sanity), None)
        if last is not None and last.sanity:
            said = f"answers: {last.sanity.mean_tokens:.0f} tokens, {last.sanity.distinct_4grams:.0%} distinct 4-grams"
            yield Line(said + (f"; speed-up {last.speed.speedup:.2f}" if last.speed else ""))
        if self.speeds:
            columns = ("K", "side by side", "tokens/s", "first token, ms", "further token, ms",
                       "tokens/s without draft", "speed-up")  # fmt: skip
            yield Table(columns, [row.cells for row in self.speeds])


def join(files: Sequence[AcceptanceFile]) -> AcceptanceFile:
    """Return the figures of several runs with one head as one file; other facts are kept by run.

    Raises:
        AcceptanceInvalid: they are about several heads, or two have a row with the same key.
    """
    first = files[0]
    if len(files) == 1:
        return first
    for other in files[1:]:
        if (other.head, other.weights, other.config) != (first.head, first.weights, first.config):
            raise AcceptanceInvalid(
                f"{first.head} and {other.head} are two heads, or one with other weights or another config",
                fix="Join files about one head.",
            )
    try:
        return AcceptanceFile(
            head=first.head,
            weights=first.weights,
            config=first.config,
            suites=tuple(dict.fromkeys(suite for file in files for suite in file.suites)),
            rows=tuple(row for file in files for row in file.rows),
            speeds=tuple(speed for file in files for speed in file.speeds),
            kconv=first.kconv,
            provenance={"runs": [file.provenance for file in files]},
        )
    except ValidationError as fault:
        raise AcceptanceInvalid(
            f"the files cannot be joined: {find_wrong(fault)}", where=first.head, fix="Remove one of the two."
        ) from fault


def read_acceptance(file: Path) -> AcceptanceFile:
    """Read an acceptance.json.

    Raises:
        NotACheckpoint: the file is missing.
        AcceptanceInvalid: it does not match the schema, repeats a row, or has an impossible figure.
    """
    _refuse_report(file)
    return load_json(
        AcceptanceFile,
        file,
        AcceptanceInvalid,
        what="acceptance.json",
        fix="Pass the acceptance.json that kconv bench wrote.",
        missing=NotACheckpoint(f"there is no {file}", fix="Run kconv bench ... --out FILE first."),
    )


def _refuse_report(file: Path) -> None:
    """Raise AcceptanceInvalid for the other JSON file that kconv writes beside a head: a report of kconv validate."""
    fix = "Pass the acceptance.json that kconv bench wrote."
    if file.name.startswith("report") and file.is_file():
        text = read_bounded(file, AcceptanceInvalid, limit=MAX_JSON, fix=fix)
        if b'"findings"' in text and b'"subject"' in text:
            raise AcceptanceInvalid(f"{file.name} is a report of kconv validate", where=file, fix=fix)


def differences(one: AcceptanceRow, other: AcceptanceRow) -> Mapping[str, tuple[Any, Any]]:
    """Return the key fields in which two figures differ, including those that neither states."""
    own, theirs = ({**row.method, **row.line} for row in (one, other))
    pairs = {name: (own[name], theirs[name]) for name in (*METHOD, *LINE)}
    return {
        name: pair
        for name, pair in pairs.items()
        if pair[0] != pair[1] or pair[0] == AS_PUBLISHED or (pair[0] is None and name not in MAY_BE_UNSAID)
    }
