"""The acceptance that a release must reach."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_args

from pydantic import AfterValidator, Field, ValidationError, model_validator

from ...bench.acceptance import LENGTHS, OVERALL, AcceptanceFile, AcceptanceRow, Metric, most_of, suite_name
from ...checkpoint.schema import MAX_YAML, check_values, find_wrong, parse_yaml, read_bounded
from ...errors import RecipeInvalid, RequestInvalid
from ...measure.figures import TextKind
from ...strict import StrictModel
from ...validate.report import REPORT, Report, called
from ..facts import Facts
from .options import PublishOptions

# The recipe that made a folder is in it, and is published with it.
RECIPE = "release.yaml"
KEY, FACTS = "min_acceptance", "facts"
# The texts of a validation report; the name says how the tokens were produced.
TEXTS = get_args(TextKind)
Part = TypeVar("Part", bound=StrictModel)


def _share(value: float) -> float:
    if not value < 1:
        raise ValueError(f"it is a share of the source's acceptance length, e.g. 0.01 for 1 %, but is {value:g}")
    return value


class Floor(StrictModel):
    """The minimum acceptance for publishing; every part of it must be stated.

    Attributes:
        metric: as named in acceptance.json.
        suite: the dataset, as named in acceptance.json, in any of its spellings; for a validation report, the kind of
            text: "held-out", "sampled" or "greedy".
        category: of the suite; the whole suite if empty.
        target: the target, with its revision, as named in the figure's own file. A report covers only one target, so
            for a kind of text it may be omitted.
        temperature: of the answers, 0 for greedy ones; None for a kind of text.
        draft_tokens: K; a figure at another K is a different figure.
        prompts: minimum N, since one prompt shows nothing; for a validation report, its sequences.
        at_least: the minimum, in the metric's unit.
        max_loss: the largest loss of acceptance length against the head's source, as a share of the source's.
    """

    metric: Metric
    suite: Annotated[str, AfterValidator(suite_name)] = Field(min_length=1)
    category: str = OVERALL
    target: str = ""
    temperature: float | None = Field(default=None, ge=0)
    draft_tokens: int = Field(ge=1)
    prompts: int = Field(ge=1)
    at_least: float = Field(gt=0)
    max_loss: Annotated[float, AfterValidator(_share)] = Field(ge=0)

    @property
    def of_text(self) -> bool:
        """Whether it refers to a kind of text in a validation report."""
        return self.suite in TEXTS

    @property
    def name(self) -> str:
        """The metric and its conditions, e.g. "al_incl_bonus on MT-Bench at K = 3, temperature 0, for org/target"."""
        category = f" ({self.category})" if self.category else ""
        return f"{self.metric} on {self.suite}{category} at " + _how(self.draft_tokens, self.temperature, self.target)

    @model_validator(mode="after")
    def _says_how(self) -> Self:
        if self.of_text and self.temperature is not None:
            raise ValueError(f"{self.suite} is a kind of text without a temperature; remove temperature")
        if not self.of_text and (self.temperature is None or not self.target):
            raise ValueError(f"a floor on {self.suite} also needs its target (or --target-name) and temperature")
        if self.metric == "al_incl_bonus" and self.at_least <= 1:
            raise ValueError("al_incl_bonus is never below 1; state a greater length, or the metric draft_accept_rate")
        if self.at_least > (most := most_of(self.metric, self.draft_tokens)):
            unit = f", tokens per verify step at K = {self.draft_tokens}" if self.metric in LENGTHS else ", a share"
            raise ValueError(f"{self.metric} is at most {most:g}{unit}, and {self.at_least:g} was stated")
        return self


@dataclass(frozen=True)
class Measurement:
    """A figure that can be compared with a floor: its value, and its file."""

    value: float
    where: str


def stated_floor(options: PublishOptions) -> Floor | None:
    """Return the minimum acceptance that the options state."""
    if options.min_acceptance is None:
        return None
    values = {
        "metric": options.metric,
        "suite": options.suite,
        "target": options.target_name,
        "temperature": options.temperature,
        "draft_tokens": options.draft_tokens,
        "prompts": options.min_prompts,
        "at_least": options.min_acceptance,
        "max_loss": options.max_loss,
    }
    try:
        return Floor.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        raise RequestInvalid(f"invalid minimum acceptance: {find_wrong(error)}", fix="See docs/release.md.") from error


def read_floor(folder: Path) -> Floor | None:
    """Return the floor in a folder's recipe; None without a recipe, or without a floor in it."""
    return _read_part(folder, KEY, Floor)


def recipe_facts(folder: Path) -> Facts | None:
    """Return the facts in a folder's recipe; None without a recipe, or without facts in it."""
    return _read_part(folder, FACTS, Facts)


def read_parts(folder: Path) -> dict[str, Any]:
    """Return a folder's recipe as plain values, by its top-level keys; empty without a recipe.

    Raises:
        RecipeInvalid: it cannot be read as YAML.
    """
    file, fix = folder / RECIPE, "Correct it there."
    if not os.path.lexists(file):
        return {}
    text = read_bounded(file, RecipeInvalid, limit=MAX_YAML, fix=fix)
    held = parse_yaml(text, RecipeInvalid, where=file, what="recipe", fix=fix)
    return held if isinstance(held, dict) else {}


def _read_part(folder: Path, key: str, schema: type[Part]) -> Part | None:
    stated = read_parts(folder).get(key)
    where = f"{folder / RECIPE}: {key}"
    if stated is None:
        return None
    return check_values(schema, stated, RecipeInvalid, where=where, what=f"{RECIPE}'s {key}", fix="Correct it there.")


def find_measurements(
    floor: Floor, report: Report | None, acceptance: Mapping[str, AcceptanceFile]
) -> list[Measurement]:
    """Return every figure about the head to which the floor applies.

    Quoted figures do not count, nor those measured on a part of the suite, for another target or revision, at another
    temperature or K, or on fewer prompts.

    Args:
        report: its figures count if the floor's suite is a kind of text.
        acceptance: by the name of its file.
    """
    if floor.of_text:
        return _on_text(floor, report) if report is not None else []
    return [
        Measurement(row.value, name)
        for name, held in acceptance.items()
        for row in held.rows
        if _speaks_of(floor, row) and held.is_whole(row.dataset)
    ]


def _speaks_of(floor: Floor, row: AcceptanceRow) -> bool:
    wanted = (floor.metric, floor.suite, floor.category, called(floor.target), floor.temperature, floor.draft_tokens)
    measured = (
        row.metric,
        row.dataset,
        row.category,
        row.target and called(row.target),
        row.temperature,
        row.draft_tokens,
    )
    return measured == wanted and row.measured_by == "self" and (row.prompts or 0) >= floor.prompts


def _on_text(floor: Floor, report: Report) -> list[Measurement]:
    elsewhere = floor.target and called(floor.target) != called(str(report.provenance.get("target") or ""))
    if elsewhere or floor.category or floor.metric != "al_incl_bonus":
        return []
    return [
        Measurement(row.length, REPORT)
        for row in report.figures.acceptance
        if (row.drafter, row.text, row.steps) == ("output", floor.suite, floor.draft_tokens)
        and row.sequences >= floor.prompts
    ]


def list_measured(report: Report | None, acceptance: Mapping[str, AcceptanceFile]) -> list[str]:
    """Return all measurements of the head, whatever the floor applies to.

    E.g. "al_incl_bonus on MT-Bench at K = 3, temperature 0, for org/target, 80 prompts, whole".

    Args:
        acceptance: by the name of its file; categories are omitted, since their suite includes them.
    """
    suites = [
        f"{row.metric} on {row.dataset} at {_how(row.draft_tokens, row.temperature, row.target)}, {row.prompts or 0} "
        f"prompts, {'whole' if held.is_whole(row.dataset) else 'a part'}"
        for held in acceptance.values()
        for row in held.rows
        if row.measured_by == "self" and row.category == OVERALL
    ]
    target = report.provenance.get("target") if report is not None else None
    texts = [
        f"al_incl_bonus on {row.text} at {_how(row.steps, None, target)}, {row.sequences} prompts"
        for row in (report.figures.acceptance if report is not None else ())
        if row.drafter == "output"
    ]
    return list(dict.fromkeys(suites + texts))


def _how(draft_tokens: int | None, temperature: float | None, target: str | None) -> str:
    """Return a figure's conditions, as far as stated."""
    drawn = "" if temperature is None else f", temperature {temperature:g}"
    return f"K = {draft_tokens}{drawn}" + (f", for {target}" if target else "")


def largest_loss(report: Report, draft_tokens: int) -> float | None:
    """Return the largest loss of acceptance length against the source at K drafted tokens, as a share of the source's.

    None if it was not measured at this K.
    """
    at_k = [row for row in report.figures.acceptance if row.steps == draft_tokens]
    sources = {row.text: row.length for row in at_k if row.drafter == "source"}
    parity = [one for one in report.figures.parity if one.steps == draft_tokens and one.text in sources]
    return max((-one.length_difference / sources[one.text] for one in parity), default=None)
