"""A release as a recipe.

A step's input is a path, a hub id org/name[@revision], or `$step`, the output of an earlier step; `$step/file` is a
part of that. Paths are as from where the command is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..cards.facts import Facts
from ..cards.publish.floor import RECIPE, Floor
from ..checkpoint.schema import first_wrong
from ..errors import RecipeInvalid
from .kinds import Bench, Card, Convert, Publish, Quantize, StepBase, Tiny, Train, Validate

Step = Annotated[Tiny | Train | Quantize | Convert | Validate | Bench | Card | Publish, Field(discriminator="do")]
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")
# What the run itself writes beside the steps' outputs.
TAKEN = {"release.yaml", "run.json", "run.jsonl"}


class Release(BaseModel):
    """A release.

    Attributes:
        name: what it is called; its folder, where no other is asked for.
        min_acceptance: what the head must reach to be published.
        facts: what no file of the head says, for its card and the license checks.
        steps: by name, in the order in which they run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    # pydantic searches for a pattern where nothing anchors it, and a name is a path and a line of a workflow.
    name: str = Field(pattern=f"^{NAME.pattern}$")
    min_acceptance: Floor | None = None
    facts: Facts = Facts()
    steps: dict[str, Step] = Field(min_length=1)

    @model_validator(mode="after")
    def _refers_backwards(self) -> Self:
        seen: set[str] = set()
        for name, step in self.steps.items():
            if not NAME.fullmatch(name) or name in TAKEN:
                raise ValueError(f"{name!r} cannot be a step's name")
            for field, value in inputs_of(step):
                found = reference(value)
                if found and found[0] not in seen:
                    known = ", ".join(f"${s}" for s in seen) or "none"
                    raise ValueError(f"{name}.{field} is {value}, and no earlier step is called so (there are {known})")
                if found and any(part in ("", ".", "..") for part in found[1].split("/")[1:]):
                    raise ValueError(f"{name}.{field} is {value}, which is no part of an output")
            seen.add(name)
        return self


def inputs_of(step: StepBase) -> Iterator[tuple[str, str]]:
    """Yield the inputs that a step names: field and value."""
    for field in step.INPUTS:
        value = getattr(step, field)
        for one in value if isinstance(value, tuple) else (value,):
            if one is not None and one not in step.WORDS:
                yield field, one


def reference(value: str) -> tuple[str, str] | None:
    """Return the step that an input refers to, and "/rest" of the path inside its output; None where it is none."""
    if not value.startswith("$"):
        return None
    name, slash, rest = value[1:].partition("/")
    return name, slash + rest


def read_release(file: Path) -> tuple[Release, str]:
    """Read a recipe.

    Returns:
        The recipe and its text.

    Raises:
        RecipeInvalid: it cannot be read, or has a key that does not exist or a value that cannot be.
    """
    try:
        text = file.read_text(encoding="utf-8")
        return parse_release(text), text
    except (OSError, UnicodeDecodeError) as fault:
        raise RecipeInvalid(f"{file} cannot be read: {fault}", where=file, fix="Give a YAML file.") from fault


def publications(folder: Path) -> list[Publish]:
    """Return the publish steps of the recipe that made a folder and lies in it; none where there is no recipe.

    Raises:
        RecipeInvalid: the recipe is no YAML mapping, or such a step is not of its schema.
    """
    file = folder / RECIPE
    try:
        held = yaml.safe_load(file.read_bytes()) if file.exists() else None
        steps = held.get("steps") if isinstance(held, dict) else None
        own = [step for step in steps.values() if isinstance(step, dict)] if isinstance(steps, dict) else []
        return [Publish.model_validate(step) for step in own if step.get("do") == "publish"]
    except (yaml.YAMLError, ValidationError) as fault:
        what = first_wrong(fault) if isinstance(fault, ValidationError) else "it is no YAML"
        raise RecipeInvalid(f"{RECIPE} cannot be read: {what}", where=file, fix="Put it right there.") from fault


def parse_release(text: str) -> Release:
    """Read a recipe's text; see `read_release`."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as fault:
        raise RecipeInvalid(f"the recipe is no YAML: {' '.join(str(fault).split())}", fix="Mend it there.") from fault
    try:
        return Release.model_validate(values)
    except ValidationError as fault:
        raise RecipeInvalid(
            f"the recipe is wrong: {first_wrong(fault)}", fix="docs/release.md lists each step's keys."
        ) from fault
