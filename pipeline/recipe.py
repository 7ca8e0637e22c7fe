"""A release as a recipe: a list of operations that can name each other's outputs.

A step's input is a path, a hub id org/name[@revision], or `$step`, the output of an earlier step; `$step/file` is a
part of that output. Paths are relative to the recipe's folder, as in a compose file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import quote

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ..cards.facts import Facts
from ..cards.publish.floor import Floor
from ..checkpoint.schema import (
    MAX_YAML,
    Wrong,
    WrongValue,
    check_values,
    find_wrong,
    no_such_key,
    parse_yaml,
    read_text,
)
from ..checkpoint.source import HUB_ID, hub_id_of
from ..errors import RecipeInvalid
from ..operations import OPERATIONS, load
from ..operations.base import Operation
from ..options import Kind, Marks, in_recipe, is_path, marks, plain_name, spell
from ..strict import StrictModel

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")
# Files that the run itself writes next to the steps' outputs.
TAKEN = {"release.yaml", "run.json", "run.jsonl"}
# Placeholder for the output, which the run names.
UNNAMED = "output"


@dataclass(frozen=True)
class Input:
    """What a step reads.

    Attributes:
        kind: what the field of its request names.
        named: whether the value may be something else than a path: a Hub id, or a name of kconv's own.
        made: the earlier step whose output it is, and the "/path" inside; None for what no step makes.
    """

    field: str
    value: str
    kind: Kind | None
    named: bool
    made: tuple[str, str] | None


@dataclass(frozen=True)
class Step:
    """An operation in a recipe.

    Attributes:
        do: its name there.
        request: its request; the run sets the request's output.
        written: the paths that the request has from another folder, by field, as the recipe has them.
    """

    do: str
    request: Operation
    written: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def inputs(self) -> Iterator[Input]:
        for name, found in type(self.request).inputs():
            value = getattr(self.request, name)
            for one in value if isinstance(value, tuple) else (value,):
                if one is not None and one not in found.words:
                    yield Input(name, one, found.kind, _is_name(one, found), reference(one))

    def needed(self) -> list[str]:
        """Return the steps whose outputs it reads."""
        return list(dict.fromkeys(one.made[0] for one in self.inputs() if one.made))

    def at(self, out: Path) -> Operation:
        """Return the request with its output: a folder, or a file with the operation's own name inside one."""
        cls = type(self.request)
        made = str(out / cls.OUTPUT) if cls.OUTPUT else str(out)
        return self.request.model_copy(update={field: made}) if (field := cls.output()) else self.request

    def plain(self) -> dict[str, Any]:
        """Return the recipe's statements about the step, including defaults, as plain values."""
        output = type(self.request).output()
        return {"do": self.do} | {name: self.written.get(name, own) for name, own in self.request if name != output}

    def beside(self, folder: Path) -> Step:
        """Return the step with its relative paths from a folder."""
        cls = type(self.request)
        names = [name for name, info in cls.model_fields.items() if is_path(info) and name != cls.output()]
        stated = {name: value for name in names if (value := getattr(self.request, name)) is not None}
        found: dict[str, Any] = {}
        for name, value in stated.items():
            about = marks(cls.model_fields[name])
            found[name] = (
                tuple(_locate(one, about, folder) for one in value)
                if isinstance(value, tuple)
                else _locate(value, about, folder)
            )
        moved = {name: value for name, value in found.items() if value != stated[name]}
        written = {name: stated[name] for name in moved}
        return replace(self, request=self.request.model_copy(update=moved), written=written) if moved else self


def _locate(value: str, about: Marks, folder: Path) -> str:
    """Return a path from a folder; what is none stays as it is."""
    if value in about.words or reference(value):
        return value
    at = folder / value
    if os.path.lexists(at):
        return str(at)
    if not _is_name(value, about):
        # Its folder and its name could be a Hub id.
        return os.path.join(os.curdir, at)  # noqa: PTH118
    # To the command a path that exists wins, but this one is not the recipe's.
    repo, _, revision = hub_id_of(value).partition("@")
    taken = about.kind == "checkpoint" and os.path.lexists(value)
    return f"hf://{repo}{'@' * bool(revision)}{quote(revision, safe='')}" if taken else value


def _is_name(value: str, about: Marks) -> bool:
    """Return whether a value that is no path may be something else: a Hub id, a suite's name, or a recipe's."""
    if about.kind == "checkpoint":
        return HUB_ID.fullmatch(hub_id_of(value)) is not None
    is_file = value.endswith((".json", ".jsonl", ".yaml", ".yml"))
    forms = about.metavar.split("|")
    return not is_file and (
        ("ID" in forms and HUB_ID.fullmatch(value) is not None)
        or ("SUITE@COMMIT" in forms and "@" in value)
        or ("NAME" in forms and not about.words and os.sep not in value)
    )


def kinds() -> tuple[str, ...]:
    """Return the allowed values of a step's `do`."""
    return tuple(name.replace("_", "-") for name in OPERATIONS)


def read_step(values: Any) -> Step:
    """Read a step of a recipe, or raise a ValueError, which pydantic reports."""
    if isinstance(values, Step):
        return values
    if not isinstance(values, Mapping):
        raise ValueError(f"the key `do` is missing; use one of {', '.join(kinds())}")
    if (do := values.get("do")) not in kinds():
        near = get_close_matches(str(do), kinds(), n=1)
        said = f"do is {do!r}, which is not an operation" if "do" in values else "the key `do` is missing"
        if str(do).startswith("to-"):
            said += f"; write do: convert, and to: {str(do).removeprefix('to-')}"
        else:
            said += f"; did you mean {near[0]}?" if near else f"; use one of {', '.join(kinds())}"
        raise WrongValue(Wrong(("do",) if "do" in values else (), said))
    rest = {str(key): value for key, value in values.items() if key != "do"}
    cls = load(do.replace("-", "_"))
    output = cls.output()
    if output in rest:
        raise WrongValue(Wrong((output,), "the run sets it; remove it"))
    try:
        return Step(do, cls.model_validate(rest | ({output: UNNAMED} if output else {})))
    except ValidationError as fault:
        wrong = find_wrong(fault, cls)
        if wrong.place and wrong.place[0] in rest and wrong.place[0] not in {plain_name(n) for n in cls.model_fields}:
            known = [plain_name(name) for name in cls.model_fields if name != output]
            wrong = _of_set(rest, known) or no_such_key(wrong.place, known)
        raise WrongValue(replace(wrong, what=spell(wrong.what, cls, in_recipe))) from fault


def _of_set(stated: Mapping[str, Any], known: Collection[str]) -> Wrong | None:
    """Return that keys of a training's recipe stand beside `set` instead of under it; None if there is none."""
    if "set" not in known:
        return None
    from ..train.recipe import find_key

    misplaced = [key for key in stated if key not in known and find_key(key)]
    what = f"of a training's recipe; write {', '.join(misplaced)} under set"
    return Wrong((misplaced[0],), f"is a key {what}", "") if misplaced else None


def _named(name: str) -> str:
    if not NAME.fullmatch(name):
        said = "it must have 1 to 40 of a to z, 0 to 9, '.', '_' and '-', and begin with a letter or a digit"
        raise ValueError(f"{said}, but is {name[:80]!r}")
    return name


class Release(StrictModel):
    """A release.

    Attributes:
        name: its title; also its folder, by default.
        min_acceptance: the minimum acceptance for publishing the head.
        facts: facts that no file of the head states, for its card and the license checks.
        steps: by name, in the order in which they run.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    # A name becomes a path and a line of a workflow.
    name: Annotated[str, AfterValidator(_named)]
    min_acceptance: Floor | None = None
    facts: Facts = Facts()
    steps: dict[str, Annotated[Step, BeforeValidator(read_step)]] = Field(min_length=1)

    @model_validator(mode="after")
    def _refers_backwards(self) -> Self:
        seen: set[str] = set()
        for name, step in self.steps.items():
            if not NAME.fullmatch(name) or name in TAKEN:
                raise WrongValue(Wrong(("steps", name), f"{name!r} is not a valid step name"))
            for one in step.inputs():
                field, value, found = one.field, one.value, one.made
                if found and found[0] not in seen:
                    known = ", ".join(f"${s}" for s in seen) or "none"
                    near = get_close_matches(found[0], seen, n=1)
                    nearest = f"did you mean ${near[0]}?" if near else f"there are {known}"
                    said = f"{name}.{field} is {value}, but no earlier step has that name ({nearest})"
                    raise WrongValue(Wrong(("steps", name, field), said))
                if found and any(part in ("", ".", "..") for part in found[1].split("/")[1:]):
                    said = f"{name}.{field} is {value}, which is not part of an output"
                    raise WrongValue(Wrong(("steps", name, field), said))
                made = type(self.steps[found[0]].request).OUTPUT if found else ""
                if found and made and found[1] != f"/{made}":
                    said = f"{name}.{field} is {value}, but {found[0]} only makes ${found[0]}/{made}"
                    raise WrongValue(Wrong(("steps", name, field), said))
            seen.add(name)
        return self

    @model_validator(mode="after")
    def _measures_the_floor(self) -> Self:
        """Refuse now what P109 would refuse after hours: no texts, or only parts of a suite."""
        steps = self.steps.values()
        allowed = any("P109" in step.request.allow for step in steps if step.do == "publish")  # pyright: ignore
        if self.min_acceptance is None or allowed:
            return self
        if self.min_acceptance.of_text:
            reports = [step.request.report for step in steps if step.do in ("card", "publish")]  # pyright: ignore
            textless = [self._textless(value) for value in reports if value]
            if textless and all(textless):
                said = f"{textless[0]} measures no acceptance, which min_acceptance needs; give it target, and prompts"
                raise WrongValue(Wrong(("steps", textless[0]), f"{said} or states"))
            return self
        named = [value for step in steps if step.do == "card" for value in step.request.acceptance]  # pyright: ignore
        partial = [found for value in named if (found := self._partial(value))]
        if named and len(partial) == len(named):
            name, key = partial[0]
            said = f"{name} measures only a part of the suite ({key}), which does not count for min_acceptance"
            raise WrongValue(Wrong(("steps", name, key), said))
        return self

    def _textless(self, value: str) -> str:
        """Return the validate step that a value refers to if it has no texts; "" otherwise."""
        name, _ = reference(value) or ("", "")
        request = self.steps[name].request if name and self.steps[name].do == "validate" else None
        return name if request and not (request.prompts or request.states) else ""  # pyright: ignore

    def _partial(self, value: str) -> tuple[str, str] | None:
        """Return the bench step that a value refers to and its key that leaves prompts out; None if there is none."""
        name, _ = reference(value) or ("", "")
        if name and self.steps[name].do == "bench":
            for key in ("limit", "categories"):
                if getattr(self.steps[name].request, key):
                    return name, key
        return None


def reference(value: str) -> tuple[str, str] | None:
    """Return the step that an input refers to, and the "/rest" of the path inside its output; None without a step."""
    if not value.startswith("$"):
        return None
    name, slash, rest = value[1:].partition("/")
    return name, slash + rest


def read_release(file: Path) -> tuple[Release, str]:
    """Read a recipe, whose paths start at its folder; return it and its text.

    Raises:
        RecipeInvalid: it cannot be read, or has an unknown key or an invalid value.
    """
    beside = next((one for end in (".yaml", ".yml") if (one := Path(f"{file}{end}")).exists()), None)
    fix = f"Pass a YAML file.{f' Did you mean {beside}?' if beside else ''}"
    missing = RecipeInvalid(f"there is no file {file}", where=file, fix=fix)
    text = read_text(file, RecipeInvalid, limit=MAX_YAML, fix=fix, missing=missing)
    release = parse_release(text, where=file)
    steps = {name: step.beside(file.parent) for name, step in release.steps.items()}
    return release.model_copy(update={"steps": steps}), text


def parse_release(text: str, *, where: object = "") -> Release:
    """Read a recipe's text, with its paths as they stand there; see `read_release`."""
    values = parse_yaml(
        text, RecipeInvalid, where=where, what="recipe", fix="Correct that line; check the indentation."
    )
    fix = "Correct it. A step's keys are its command's options; see kconv COMMAND --help."
    return check_values(Release, values, RecipeInvalid, where=where, what="recipe", fix=fix, text=text)
