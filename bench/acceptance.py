"""acceptance.json: acceptance figures, each with what it was measured on.

Published acceptance lengths cannot be compared, as they do not say what they are: with or without the bonus token,
a mean over requests or over verify steps, by which engine, on which target. Here a figure travels with all of it.
Figures whose `method` differs never share a column, and what a source does not say stands as None, which is equal
to nothing, not even to another None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..checkpoint.schema import first_wrong, load_json
from ..errors import AcceptanceInvalid, NotACheckpoint

ACCEPTANCE = "acceptance.json"
OVERALL = ""  # the category of a figure over the whole of a dataset

Metric = Literal["al_incl_bonus", "draft_accept_rate", "teacher_forced_accuracy"]
Averaging = Literal["micro_steps", "macro_request", "macro_category", "micro_positions"]
MeasuredBy = Literal["self", "quoted"]

# What must be equal for two figures to stand in one column; date, file and URL may differ.
METHOD = (
    "metric", "draft_tokens", "tree", "averaging", "engine", "engine_version", "target", "precision", "temperature",
    "reasoning", "max_tokens", "draft_sample_method", "rejection_sample_method", "measured_by",
)  # fmt: skip
# What must be equal for two figures to stand in one line.
LINE = ("dataset", "revision", "category", "prompts", "prompts_sha256")
# What kconv knows of what it measures itself.
SAID_BY_SELF = ("draft_tokens", "averaging", "engine", "engine_version", "prompts", "date")
# One suite, however a card spells it.
SPELLINGS = {"mtbench": "MT-Bench", "speedbench": "SPEED-Bench", "humaneval": "HumanEval", "gsm8k": "GSM8K",
             "math500": "MATH500", "ceval": "CEval", "livecodebench": "LiveCodeBench", "mmstar": "MMStar"}  # fmt: skip
# Not every dataset has the one, and not every target the other.
MAY_BE_UNSAID = {"prompts_sha256", "reasoning", "draft_sample_method", "rejection_sample_method"}


def suite_name(dataset: str) -> str:
    """Return one name for a suite that is spelled in several ways, e.g. "MT-Bench" for "MTBench" and "mt_bench"."""
    return SPELLINGS.get(re.sub(r"[-_ ]", "", dataset).lower(), dataset)


class _AcceptancePart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Interval(_AcceptancePart):
    """A bootstrap confidence interval.

    Attributes:
        low, high: its ends, in the figure's unit.
        level: e.g. 0.95.
        over: what the bootstrap draws: "prompts", or "groups of N prompts" where N ran side by side.
        units: how many of them there are.
    """

    low: float
    high: float
    level: float = 0.95
    over: str
    units: int


class Sanity(_AcceptancePart):
    """The target's answers; repetitive text inflates every drafter's acceptance.

    Attributes:
        distinct_4grams: share of distinct 4-grams of words within an answer, mean over answers.
        mean_tokens: tokens of an answer.
        cut: share of answers that ended at `max_tokens`.
    """

    distinct_4grams: float
    mean_tokens: float
    cut: float


class Speed(_AcceptancePart):
    """Output tokens per second of wall clock, with and without speculation, on the same prompts.

    Attributes:
        tokens_per_second, baseline_tokens_per_second: of all requests together.
        speedup: the first over the second.
        same_answers: share of the answers that were the same text; greedy decoding should give nearly all.
    """

    tokens_per_second: float
    baseline_tokens_per_second: float
    speedup: float
    same_answers: float


class SpeedFigure(_AcceptancePart):
    """A figure of speed, with its interval where there are two prompts or more."""

    value: float
    interval: Interval | None = None


class SpeedRow(_AcceptancePart):
    """Speed at one concurrency, with and without the draft; a speed-up is of that concurrency alone.

    Attributes:
        concurrency: dialogues that were always under way.
        tokens_per_second: output tokens of all of them by the wall clock.
        ttft: seconds to the first token, mean over prompts.
        tpot: seconds for each further token.
        baseline_tokens_per_second, baseline_ttft, baseline_tpot: the same without a draft; None where not measured.
        speedup: of tokens per second.
        same_answers: share of the answers that were the same text; greedy decoding should give nearly all.
        draft_tokens, tree, engine, engine_version, target, precision, temperature, max_tokens, dataset, revision,
            prompts, prompts_sha256, date: as of `AcceptanceRow`.
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


class AcceptanceRow(_AcceptancePart):
    """One figure with its full key.

    Attributes:
        metric: "al_incl_bonus" is the acceptance length, tokens per verify step with the bonus token.
        value: in tokens, or a share for the other metrics.
        decimals: digits behind the point to show; of a quoted figure, those its source prints.
        draft_tokens: K.
        tree: "chain", or how drafts branch.
        averaging: over verify steps, requests, categories, or all positions of a text.
        engine, engine_version: what ran it; "kconv" for its own forward.
        target, precision: what was served, and in which number format.
        temperature, reasoning: how it was sampled; `reasoning` e.g. "medium", where the target has such modes.
        draft_sample_method, rejection_sample_method: as vLLM names them, e.g. "greedy" and "standard", where a server
            shows them; curves of one head differ by them.
        dataset, revision: e.g. "MT-Bench" and a commit or a file's sha256.
        prompts_sha256: `target.prompts.digest_prompts` of what was asked, where that is known.
        category: of the dataset; "" for the whole.
        domain: what a table groups the dataset under, e.g. "Math".
        prompts: how many (N).
        max_tokens: an answer's limit.
        date: ISO, of the measurement, or of the publication that is quoted.
        measured_by: "self", or "quoted" with its `url`.
        published_as: what the quoted source calls the figure.
        rates: share of verify steps in which the draft was accepted up to each place.
        drafts: verify steps that the figure is over.
        interval, sanity, speed: where measured.
        note: how the figure was measured, if its key does not say.
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
        """What it shares with every figure of its column."""
        return {name: getattr(self, name) for name in METHOD}

    @property
    def line(self) -> dict[str, Any]:
        """What it shares with every figure of its line; of a suite, by the one name for it."""
        return {name: getattr(self, name) for name in LINE} | {"dataset": suite_name(self.dataset)}

    @property
    def shown(self) -> str:
        """The figure as text, e.g. "2.340"."""
        return f"{self.value:.{self.decimals}f}"

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        if self.measured_by == "quoted" and not self.url:
            raise ValueError(f"{self.dataset} {self.category} is quoted without the url of its source")
        if self.measured_by == "self":
            unsaid = [name for name in SAID_BY_SELF if not self[name]]
            if unsaid:
                raise ValueError(f"{self.dataset} {self.category} was measured, and does not say {', '.join(unsaid)}")
        low, high = (1.0, (self.draft_tokens or float("inf")) + 1.0) if self.metric == "al_incl_bonus" else (0.0, 1.0)
        if not low <= self.value <= high:
            raise ValueError(
                f"{self.dataset} {self.category}: a {self.metric} of {self.shown} is not within {low:g} and {high:g}"
            )
        return self

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class SuiteRecord(_AcceptancePart):
    """What a dataset consists of, so that a table shows what is missing from it.

    Attributes:
        dataset: as its rows name it.
        categories: all that are shown.
        whole: whether every prompt of it was asked; None where a quoted source does not say.
        source: how much of a quoted source was read. Of a whole one, a category that is not there is not published; of
            an excerpt, and where nothing is said, it is unknown.
    """

    dataset: str
    categories: tuple[str, ...]
    whole: bool | None = None
    source: Literal["whole", "excerpt"] | None = None


class AcceptanceFile(_AcceptancePart):
    """The figures about one head; the schema of acceptance.json.

    Attributes:
        head: hub id or folder name.
        weights: sha256 of each weight file, if the head was on this machine.
        config: sha256 of its config.json; the same weights under another, e.g. other captured layers, are another head.
        suites: what the datasets consist of.
        rows: no two of one key.
        speeds: at each concurrency, if requested.
        kconv: the version that measured; None where all is quoted.
        provenance: what else is known: the server's model name, the requests' extra fields, seconds taken.
    """

    schema_version: Literal[1] = Field(default=1, alias="schema")
    head: str
    weights: dict[str, str] = {}
    config: str = ""
    suites: tuple[SuiteRecord, ...] = ()
    rows: tuple[AcceptanceRow, ...] = Field(min_length=1)
    speeds: tuple[SpeedRow, ...] = ()
    kconv: str | None = None
    provenance: dict[str, Any] = {}

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
        """Whether it holds a figure that was measured, not quoted; such a file is about weights, and names them."""
        return any(row.measured_by == "self" for row in self.rows)

    def is_whole(self, dataset: str) -> bool:
        """Say whether every prompt of a dataset was asked."""
        return any(suite_name(suite.dataset) == suite_name(dataset) and suite.whole for suite in self.suites)

    def to_json(self) -> str:
        """Return acceptance.json's text."""
        return self.model_dump_json(indent=1, by_alias=True, exclude_none=True) + "\n"


def join(files: Sequence[AcceptanceFile]) -> AcceptanceFile:
    """Return the figures of several runs about one head as one file; what else is known of each stays by its run.

    Raises:
        AcceptanceInvalid: they are about several heads, or two have a row of one key.
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
            f"the files cannot be joined: {first_wrong(fault)}", where=first.head, fix="Leave one of the two out."
        ) from fault


def read_acceptance(file: Path) -> AcceptanceFile:
    """Read an acceptance.json.

    Raises:
        NotACheckpoint: the file is missing.
        AcceptanceInvalid: it is not of the schema, repeats a row, or holds a figure that cannot be.
    """
    return load_json(
        AcceptanceFile,
        file,
        AcceptanceInvalid,
        what="acceptance.json",
        fix="Give the acceptance.json that kconv bench wrote.",
        missing=NotACheckpoint(f"there is no {file}", fix="Run kconv bench ... --out FILE first."),
    )


def differences(one: AcceptanceRow, other: AcceptanceRow) -> Mapping[str, tuple[Any, Any]]:
    """Return the key fields that keep two figures apart; those that neither states keep them apart too."""
    own, theirs = ({**row.method, **row.line} for row in (one, other))
    pairs = {name: (own[name], theirs[name]) for name in (*METHOD, *LINE)}
    return {
        name: pair
        for name, pair in pairs.items()
        if pair[0] != pair[1] or (pair[0] is None and name not in MAY_BE_UNSAID)
    }
