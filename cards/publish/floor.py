"""The acceptance that a release must reach. What belongs here: its schema, its recipe, what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...errors import RecipeInvalid
from ...validate.acceptance import OVERALL, Acceptance, Metric
from ...validate.report import Report
from ..facts import Facts

# The recipe that made a folder lies in it, and is published with it.
RECIPE = "release.yaml"
KEY, FACTS = "min_acceptance", "facts"
Part = TypeVar("Part", bound=BaseModel)


class Floor(BaseModel):
    """What a head must reach to be published; every part of it has to be said.

    Attributes:
        metric: as acceptance.json names it.
        suite: the dataset that it is measured on, as acceptance.json names it; or, of a validation report, the kind
            of text: "held-out", "sampled" or "greedy".
        category: of the suite; the whole of it if empty.
        draft_tokens: K; a figure at another K is another figure.
        prompts: N at least, as one prompt shows nothing; of a validation report, its sequences.
        at_least: the least figure, in the metric's unit.
        max_loss: the largest loss of acceptance length against the head's source, as a share of the source's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: Metric
    suite: str = Field(min_length=1)
    category: str = OVERALL
    draft_tokens: int = Field(ge=1)
    prompts: int = Field(ge=1)
    at_least: float = Field(gt=0)
    max_loss: float = Field(ge=0, lt=1)

    @property
    def name(self) -> str:
        """The metric and what it is over, e.g. "al_incl_bonus on MT-Bench at K = 3"."""
        category = f" ({self.category})" if self.category else ""
        return f"{self.metric} on {self.suite}{category} at K = {self.draft_tokens}"


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


def _read_part(folder: Path, key: str, schema: type[Part]) -> Part | None:
    file = folder / RECIPE
    if not file.exists():
        return None
    try:
        held = yaml.safe_load(file.read_bytes())
        stated = held.get(key) if isinstance(held, dict) else None
        return None if stated is None else schema.model_validate(stated)
    except (yaml.YAMLError, ValidationError) as fault:
        what = fault.errors()[0]["msg"] if isinstance(fault, ValidationError) else "it is no YAML"
        raise RecipeInvalid(
            f"{RECIPE} cannot be read: {what}", where=f"{file}: {key}", fix="Put it right there."
        ) from fault


def find_measurements(floor: Floor, report: Report | None, acceptance: Mapping[str, Acceptance]) -> list[Measurement]:
    """Return every figure about the head that the floor speaks of.

    What is quoted from elsewhere does not count, nor what was measured on a part of the suite, at another K, or on
    fewer prompts.

    Args:
        floor: what is spoken of.
        report: its figures count where the floor's suite is a kind of text.
        acceptance: by the name of its file.
    """
    wanted = (floor.metric, floor.suite, floor.category, floor.draft_tokens)
    found = [
        Measurement(row.value, name)
        for name, held in acceptance.items()
        for row in held.rows
        if (row.metric, row.dataset, row.category, row.draft_tokens) == wanted
        and row.measured_by == "self"
        and held.is_whole(row.dataset)
        and (row.prompts or 0) >= floor.prompts
    ]
    if report is not None and floor.metric == "al_incl_bonus" and not floor.category:
        found += [
            Measurement(row.length, "report.json")
            for row in report.figures.acceptance
            if (row.drafter, row.text, row.steps) == ("output", floor.suite, floor.draft_tokens)
            and row.sequences >= floor.prompts
        ]
    return found


def list_measured(report: Report | None, acceptance: Mapping[str, Acceptance]) -> list[str]:
    """Return what was measured of the head, whatever a floor speaks of, e.g. "MT-Bench at K = 3, 80 prompts, whole".

    Args:
        report: its figures count by their kind of text.
        acceptance: by the name of its file; categories are left out, as their suite says what they are of.
    """
    suites = [
        f"{row.metric} on {row.dataset} at K = {row.draft_tokens}, {row.prompts or 0} prompts, "
        f"{'whole' if held.is_whole(row.dataset) else 'a part'}"
        for held in acceptance.values()
        for row in held.rows
        if row.measured_by == "self" and row.category == OVERALL
    ]
    texts = [
        f"al_incl_bonus on {row.text} at K = {row.steps}, {row.sequences} prompts"
        for row in (report.figures.acceptance if report else ())
        if row.drafter == "output"
    ]
    return list(dict.fromkeys(suites + texts))


def largest_loss(report: Report, draft_tokens: int) -> float | None:
    """Return the largest loss of acceptance length against the source at K drafted tokens, as a share of the source's.

    None where none was measured at this K.
    """
    at_k = [row for row in report.figures.acceptance if row.steps == draft_tokens]
    sources = {row.text: row.length for row in at_k if row.drafter == "source"}
    parity = [one for one in report.figures.parity if one.steps == draft_tokens and one.text in sources]
    return max((-one.length_difference / sources[one.text] for one in parity), default=None)
