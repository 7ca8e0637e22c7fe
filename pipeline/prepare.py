"""A recipe whose names were checked, the steps that are to run, and where each of them stands."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..cards.publish.floor import RECIPE
from ..checkpoint.folder import Checkpoint, open_checkpoint
from ..checkpoint.schema import line_of
from ..checkpoint.source import Folder, Source
from ..errors import KconvError, RecipeInvalid, ReleaseStateInvalid, Setting
from ..installed import sources_digest, version
from ..operations.base import Context, ReleaseFacts
from ..options import in_recipe
from .recipe import Input, Release, Step, kinds, reference
from .record import STATE, State, digest_marks, mark, mark_folder


@dataclass(frozen=True)
class Output(Folder):
    """An earlier step's output: a folder that records name by `label`, since its path is specific to this machine."""

    label: str = ""

    @property
    def name(self) -> str:
        """release/step, which is valid wherever the release's folder is."""
        return self.label

    def open_headers(self) -> Checkpoint:
        return open_checkpoint(self.path, source=self.label)

    def open_weights(self) -> Checkpoint:
        return open_checkpoint(self.path, source=self.label)


@dataclass
class StepContext(Context):
    """The context of a step in the release's folder `root`: `$step` is an earlier step's output."""

    root: Path = Path()
    say: Callable[[str], None] = lambda _: None

    def source(self, name: str) -> Source:
        if (made := reference(name)) is None:
            return super().source(name)
        step, rest = made
        return Output(self.root / f"{step}{rest}", f"{self.root.resolve().name}/{step}{rest}")

    def path(self, name: str) -> Path:
        made = reference(name)
        return Path(name) if made is None else self.root / f"{made[0]}{made[1]}"

    def log(self, text: str) -> None:
        self.say(text)

    def status(self, title: str) -> Any:
        return _Told(lambda text: self.say(f"{title}: {text}"))

    def steps(self, title: str) -> Any:
        return _Told(lambda done, total, loss: self.say(f"{title}: step {done} of {total}, loss {loss:.3f}"))


@dataclass(frozen=True)
class _Told:
    say: Callable[..., None]

    def __enter__(self) -> Callable[..., None]:
        return self.say

    def __exit__(self, *_: object) -> None:
        return None


@dataclass(frozen=True)
class Selection:
    """Which steps of a recipe to run.

    Attributes:
        first: the step to start with; earlier outputs are used as they are.
        without: names or kinds of steps to skip.
    """

    first: str = ""
    only: str = ""
    without: tuple[str, ...] = ()

    def takes(self, release: Release) -> dict[str, bool]:
        """Return for each step whether it is selected."""
        names = list(release.steps)
        for name in filter(None, (self.first, self.only, *self.without)):
            # A skipped kind need not occur in the recipe.
            if name not in names and not (name in self.without and name in kinds()):
                raise RecipeInvalid(f"the recipe has no step {name}", fix=f"Its steps are {', '.join(names)}.")
        begin = names.index(self.first) if self.first else 0
        return {
            name: (not self.only or name == self.only)
            and number >= begin
            and not {name, release.steps[name].do} & set(self.without)
            for number, name in enumerate(names)
        }


@dataclass(frozen=True)
class PreparedRelease:
    """A recipe that may run; `prepare` makes it.

    Attributes:
        text: the recipe's text, which is kept in the output.
        root: the folder of the release.
        selected: for each step whether it is to run.
    """

    release: Release
    text: str
    root: Path
    selected: Mapping[str, bool]

    def context(self, say: Callable[[str], None] = lambda _: None) -> StepContext:
        """Return the context of a step."""
        return StepContext(ReleaseFacts(self.release.name, self.release.facts, self.text), root=self.root, say=say)

    @cached_property
    def text_digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def prepare(release: Release, text: str, root: Path, selection: Selection, file: Path | None = None) -> PreparedRelease:
    """Check the selection, and the files, folders and names that the selected steps read.

    Args:
        file: the recipe's, for messages.

    Raises:
        RecipeInvalid: the selection names a step that does not exist, or a step reads something that does not; or the
            recipe is a run's own copy.
    """
    beside = file is not None and file.name == RECIPE and (file.parent / STATE).exists()
    if beside and file is not None and file.parent.resolve() != root.resolve():
        raise RecipeInvalid(
            "this is the copy that a run keeps of its recipe",
            where=file,
            fix="Run the recipe itself, where that run was started: it resumes. To start another run, copy the file"
            " elsewhere.",
        )
    prepared = PreparedRelease(release, text, root, selection.takes(release))
    context = prepared.context()
    wrong: list[tuple[str, str, str, str]] = []
    for name, step in release.steps.items():
        if not prepared.selected[name]:
            continue
        own, inputs = [], list(step.inputs())
        for one in inputs:
            if one.made is not None or Path(one.value).exists() or one.field == "recipe":
                continue
            here = f"Paths in a recipe start at its folder, {file.parent.absolute()}" if file else ""
            here = here and f"{here}; the output of a step is $STEP."
            # The recipe's folder has none of that name, but the working folder has one; see `Step.beside`.
            if one.value.startswith("hf://") and isinstance(typed := step.written.get(one.field), str):
                meant = f"For the Hub's, write {one.value}. {here}"
                own.append((name, one.field, f"{typed} is in the working folder, not in the recipe's", meant))
                continue
            if one.named:
                if one.kind == "checkpoint":
                    context.source(one.value)
                continue
            stated = Path(one.value).name
            meant = f"Did you mean ${stated}, the step?" if stated in release.steps else "Correct the name."
            own.append((name, one.field, f"{one.value} does not exist", f"{meant} {here}".strip()))
        if not any(one.made for one in inputs if one.field == "recipe"):
            try:
                with step.request.spelled(in_recipe):
                    step.request.precheck(context)
            except KconvError as fault:
                own.append((name, *_place_of(fault, step), fault.fix))
        wrong += own
    if wrong:
        name, field_, what, fix = wrong[0]
        others = f"; and {len(wrong) - 1} more: " + "; ".join(f"{n}.{f}: {w}" for n, f, w, _ in wrong[1:])
        line = line_of(text, ("steps", name, *field_.split(".")))
        raise RecipeInvalid(
            f"{name}.{field_}: {what}{others if wrong[1:] else ''}".replace(".:", ":"),
            where=name if line is None else f"{file}:{line}" if file else f"line {line} of the recipe",
            fix=f"{fix} Nothing was computed.",
        )
    return prepared


def _place_of(fault: KconvError, step: Step) -> tuple[str, str]:
    """Return the key of a step that an error is about, and what is wrong with it."""
    if isinstance(fault.where, Setting):
        return f"set.{fault.where.key}", fault.what
    beside = f" ({fault.where})" if fault.where and fault.where not in fault.what else ""
    return "recipe" if "recipe" in type(step.request).model_fields else "", f"{fault.what}{beside}"


class Standing:
    """Where a step of a run stands: what it reads now, and why it has to run.

    Raises:
        ReleaseStateInvalid: it reads an earlier step's output that does not exist or lacks the requested part, or it
            would publish another recipe's output.
    """

    def __init__(
        self, name: str, prepared: PreparedRelease, state: State, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self.name, self.step = name, prepared.release.steps[name]
        self.context = prepared.context(say)
        self._prepared, self._state = prepared, state
        self._inputs = [
            (one, _output(name, one.made, prepared, state) if one.made else "") for one in self.step.inputs()
        ]
        _refuse_stale(name, prepared, state)

    @cached_property
    def digests(self) -> dict[str, tuple[str, ...]]:
        """The digests of each field's inputs; files that changed since they were last seen are read."""
        found: dict[str, tuple[str, ...]] = {}
        for one, made in self._inputs:
            found[one.field] = (*found.get(one.field, ()), made or _outside(one, self.context, self._state))
        return found

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything that determines the step's result."""
        release = self._prepared.release
        parts: dict[str, Any] = {
            "kconv": version("kconv"), "source": sources_digest(), "step": self.step.plain(), "inputs": self.digests,
        }  # fmt: skip
        if self.step.request.OF_RELEASE:
            parts["facts"] = release.facts.model_dump(mode="json")
            parts["floor"] = release.min_acceptance.model_dump(mode="json") if release.min_acceptance else None
            parts["recipe"] = self._prepared.text_digest
        return _digest(parts)

    @property
    def stated(self) -> str:
        return _stated(self.step, self._prepared, self._state)

    @cached_property
    def why(self) -> str:
        """Why it has to run; empty if its output was made from exactly these inputs."""
        record, folder = self._state.steps.get(self.name), self._prepared.root / self.name
        if record is None:
            return "never made"
        if record.status != "done":
            return "stopped by an error" if record.status == "failed" else "interrupted"
        if record.fingerprint != self.fingerprint:
            return "its inputs or its parameters changed"
        now = mark_folder(folder, record.files) if folder.is_dir() else {}
        if not now:
            return "its output is gone"
        if {name: one.sha256 for name, one in now.items()} != {name: one.sha256 for name, one in record.files.items()}:
            return "its output was changed"
        self._state.steps[self.name] = record.model_copy(update={"files": now})
        return ""


def _digest(parts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _stated(step: Step, prepared: PreparedRelease, state: State) -> str:
    """Return a digest of a recipe's statements about a step: its parameters, and other steps' outputs that it reads.

    Inputs outside the release are not read again, since they may be gone by the time of a publication.
    """
    made = [one.made for one in step.inputs() if one.made]
    parts: dict[str, Any] = {
        "step": step.plain(),
        "inputs": [digest_marks(state.steps[name].files, rest) for name, rest in made if name in state.steps],
    }
    if step.do == "card":
        # It contains the recipe.
        parts["recipe"] = prepared.text_digest
    return _digest(parts)


def _before(release: Release, name: str) -> list[str]:
    """Return the steps that one depends on, directly or not, in their order."""
    before = release.steps[name].needed()
    for other in before:
        before += [further for further in release.steps[other].needed() if further not in before]
    return [step for step in release.steps if step in before]


def _is_made(step: str, root: Path, state: State) -> bool:
    record = state.steps.get(step)
    return record is not None and record.status == "done" and (root / step).exists()


def _refuse_stale(name: str, prepared: PreparedRelease, state: State) -> None:
    """Refuse a card or a publication of another recipe's output, since the recipe is published as its origin.

    It is another's if a step that it depends on, directly or not, was made with different statements.
    """
    release = prepared.release
    if not release.steps[name].request.OF_RELEASE:
        return
    for other in _before(release, name):
        record = state.steps.get(other)
        if record is None or record.stated != _stated(release.steps[other], prepared, state):
            raise ReleaseStateInvalid(
                f"{name} would publish {other} as made by this recipe, but another recipe made it",
                where=f"{other} in the recipe",
                fix=f"Run the recipe with --start-at {other}, or restore the earlier recipe.",
            )


def _output(name: str, made: tuple[str, str], prepared: PreparedRelease, state: State) -> str:
    step, rest = made
    record, path = state.steps.get(step), prepared.root / f"{step}{rest}"
    if record is None or record.status != "done" or not path.exists():
        missing = (one for one in _before(prepared.release, step) if not _is_made(one, prepared.root, state))
        first = next(missing, step)
        raise ReleaseStateInvalid(
            f"{name} reads ${step}{rest}, which does not exist yet",
            where=path,
            fix=f"Run the recipe with --start-at {first}; --without publish stops before publishing.",
        )
    digest = digest_marks(record.files, rest)
    if digest is None:
        raise ReleaseStateInvalid(
            f"{name} reads ${step}{rest}, but the output of {step} has no such file",
            where=path,
            fix=f"Its files are {', '.join(sorted(record.files))}.",
        )
    return digest


def _outside(one: Input, context: StepContext, state: State) -> str:
    """Return the digest of what no step makes: a file, a folder, a Hub id or a word; remember the files read."""
    if not Path(one.value).exists():
        if one.kind != "checkpoint":
            return f"named {one.value}"
        # Opening a missing folder reports the error.
        return context.source(one.value).name if one.named else "absent"
    at = Path(os.path.realpath(one.value))
    if at.is_dir():
        known = {k.removeprefix(f"{at}/"): m for k, m in state.seen.items() if k.startswith(f"{at}/")}
        marks = mark_folder(at, known)
        state.seen.update({f"{at}/{name}": one for name, one in marks.items()})
        return digest_marks(marks) or "empty"
    state.seen[str(at)] = mark(at, state.seen.get(str(at)))
    return state.seen[str(at)].sha256
