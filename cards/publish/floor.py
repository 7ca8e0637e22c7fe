"""The acceptance that a release must reach."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ...bench.acceptance import OVERALL, AcceptanceFile, AcceptanceRow, Metric
from ...checkpoint.schema import MAX_YAML, check_values, parse_yaml, read_bounded
from ...errors import RecipeInvalid
from ...validate.figures import TextKind
from ...validate.report import REPORT, Report
from ..facts import Facts

# The recipe that made a folder lies in it, and is published with it.
RECIPE = "release.yaml"
KEY, FACTS = "min_acceptance", "facts"
# What a validation report measures on; how its tokens come about is said by the name.
TEXTS = get_args(TextKind)
Part = TypeVar("Part", bound=BaseModel)


class Floor(BaseModel):
    """What a head must reach to be published; every part of it has to be said.

    Attributes:
        metric: as acceptance.json names it.
        suite: the dataset that it is measured on, as acceptance.json names it; or, of a validation report, the kind
            of text: "held-out", "sampled" or "greedy".
        category: of the suite; the whole of it if empty.
        target: what is drafted for, with its revision, as the figure's own file names it. One report is of one target,
            so of a kind of text it may be left out.
        temperature: that answers are drawn at, 0 for greedy ones; None of a kind of text.
        draft_tokens: K; a figure at another K is another figure.
        prompts: N at least, as one prompt shows nothing; of a validation report, its sequences.
        at_least: the least figure, in the metric's unit.
        max_loss: the largest loss of acceptance length against the head's source, as a share of the source's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: Metric
    suite: str = Field(min_length=1)
    category: str = OVERALL
    target: str = ""
    temperature: float | None = Field(default=None, ge=0)
    draft_tokens: int = Field(ge=1)
    prompts: int = Field(ge=1)
    at_least: float = Field(gt=0)
    max_loss: float = Field(ge=0, lt=1)

    @property
    def of_text(self) -> bool:
        """Whether it is of a validation report's kind of text."""
        return self.suite in TEXTS

    @property
    def name(self) -> str:
        """The metric and what it is over, e.g. "al_incl_bonus on MT-Bench at K = 3, temperature 0, for org/target"."""
        category = f" ({self.category})" if self.category else ""
        return f"{self.metric} on {self.suite}{category} at " + _how(self.draft_tokens, self.temperature, self.target)

    @model_validator(mode="after")
    def _says_how(self) -> Self:
        if self.of_text and self.temperature is not None:
            raise ValueError(f"{self.suite} is a kind of text without a temperature; leave temperature out")
        if not self.of_text and (self.temperature is None or not self.target):
            raise ValueError(f"a floor on {self.suite} needs target and temperature")
        return self


@dataclass(frozen=True)
class Measurement:
    """A figure that can be held against a floor: its value, and which file says it."""

    value: float
    where: str


def read_floor(folder: Path) -> Floor | None:
    """Return the floor that the recipe in a folder states; None where there is no recipe, or none in it.

    Raises:
        RecipeInvalid: the recipe is no YAML mapping, or its floor is not of the schema.
    """
    return _read_part(folder, KEY, Floor)


def recipe_facts(folder: Path) -> Facts | None:
    """Return the facts that the recipe in a folder states; None where there is no recipe, or none in it.

    Raises:
        RecipeInvalid: the recipe is no YAML mapping, or its facts are not of the schema.
    """
    return _read_part(folder, FACTS, Facts)


def read_parts(folder: Path) -> dict[str, Any]:
    """Return the recipe in a folder as plain values, by the keys at its top; empty where there is none.

    Raises:
        RecipeInvalid: it is no YAML that can be read.
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
    """Return every figure about the head that the floor speaks of.

    What is quoted from elsewhere does not count, nor what was measured on a part of the suite, for another target or
    revision, at another temperature or K, or on fewer prompts.

    Args:
        floor: what is spoken of.
        report: its figures count where the floor's suite is a kind of text.
        acceptance: by the name of its file.
    """
    if floor.of_text:
        return _on_text(floor, report) if report else []
    return [
        Measurement(row.value, name)
        for name, held in acceptance.items()
        for row in held.rows
        if _speaks_of(floor, row) and held.is_whole(row.dataset)
    ]


def _speaks_of(floor: Floor, row: AcceptanceRow) -> bool:
    wanted = (floor.metric, floor.suite, floor.category, floor.target, floor.temperature, floor.draft_tokens)
    measured = (row.metric, row.dataset, row.category, row.target, row.temperature, row.draft_tokens)
    return measured == wanted and row.measured_by == "self" and (row.prompts or 0) >= floor.prompts


def _on_text(floor: Floor, report: Report) -> list[Measurement]:
    elsewhere = floor.target and floor.target != report.provenance.get("target")
    if elsewhere or floor.category or floor.metric != "al_incl_bonus":
        return []
    return [
        Measurement(row.length, REPORT)
        for row in report.figures.acceptance
        if (row.drafter, row.text, row.steps) == ("output", floor.suite, floor.draft_tokens)
        and row.sequences >= floor.prompts
    ]


def list_measured(report: Report | None, acceptance: Mapping[str, AcceptanceFile]) -> list[str]:
    """Return what was measured of the head, whatever a floor speaks of.

    E.g. "al_incl_bonus on MT-Bench at K = 3, temperature 0, for org/target, 80 prompts, whole".

    Args:
        report: its figures count by their kind of text.
        acceptance: by the name of its file; categories are left out, as their suite says what they are of.
    """
    suites = [
        f"{row.metric} on {row.dataset} at {_how(row.draft_tokens, row.temperature, row.target)}, {row.prompts or 0} "
        f"prompts, {'whole' if held.is_whole(row.dataset) else 'a part'}"
        for held in acceptance.values()
        for row in held.rows
        if row.measured_by == "self" and row.category == OVERALL
    ]
    target = report.provenance.get("target") if report else None
    texts = [
        f"al_incl_bonus on {row.text} at {_how(row.steps, None, target)}, {row.sequences} prompts"
        for row in (report.figures.acceptance if report else ())
        if row.drafter == "output"
    ]
    return list(dict.fromkeys(suites + texts))


def _how(draft_tokens: int | None, temperature: float | None, target: str | None) -> str:
    """Say under what a figure is measured, as far as that is stated."""
    drawn = "" if temperature is None else f", temperature {temperature:g}"
    return f"K = {draft_tokens}{drawn}" + (f", for {target}" if target else "")


def largest_loss(report: Report, draft_tokens: int) -> float | None:
    """Return the largest loss of acceptance length against the source at K drafted tokens, as a share of the source's.

    None where none was measured at this K.
    """
    at_k = [row for row in report.figures.acceptance if row.steps == draft_tokens]
    sources = {row.text: row.length for row in at_k if row.drafter == "source"}
    parity = [one for one in report.figures.parity if one.steps == draft_tokens and one.text in sources]
    return max((-one.length_difference / sources[one.text] for one in parity), default=None)
