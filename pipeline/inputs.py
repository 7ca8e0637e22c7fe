"""A step's current inputs: the context that it runs in, their digests, and the step's fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..checkpoint.folder import Checkpoint, open_checkpoint
from ..checkpoint.schema import line_of
from ..checkpoint.source import HUB_ID, Folder, Source
from ..errors import KconvError, RecipeInvalid, ReleaseStateInvalid
from ..installed import sources_digest
from ..operations.base import Context, ReleaseFacts
from ..options import in_recipe
from .recipe import Release, Step, reference
from .record import State, digest_marks, mark, mark_folder


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


@dataclass
class StepInputs:
    """A step's inputs, each with a function that computes its digest."""

    _digests: dict[str, tuple[Callable[[], str], ...]] = field(default_factory=dict)

    @cached_property
    def digests(self) -> dict[str, tuple[str, ...]]:
        """The digests of each field's inputs; files that changed since they were last seen are read."""
        return {name: tuple(one() for one in own) for name, own in self._digests.items()}

    def add(self, name: str, digest: Callable[[], str]) -> None:
        self._digests[name] = (*self._digests.get(name, ()), digest)


def make_context(root: Path, release: Release, text: str, say: Callable[[str], None]) -> StepContext:
    return StepContext(ReleaseFacts(release.name, release.facts, text), root=root, say=say)


def find_inputs(name: str, step: Step, context: StepContext, state: State) -> StepInputs:
    """Find a step's inputs; refuse an earlier step's output that does not exist, or lacks the requested part."""
    found = StepInputs()
    for one in step.inputs():
        if one.made is not None:
            found.add(one.field, partial(str, _output(name, one.made, context.root, state)))
        elif Path(one.value).exists():
            found.add(one.field, partial(_outside, Path(one.value), state))
        elif one.kind == "checkpoint":
            # Opening a missing folder reports the error.
            of_hub = HUB_ID.fullmatch(one.value)
            found.add(one.field, partial(str, context.source(one.value).name if of_hub else "absent"))
        else:
            found.add(one.field, partial(str, f"named {one.value}"))
    return found


def check_names(release: Release, text: str, meant: Mapping[str, bool], root: Path, file: Path | None = None) -> None:
    """Refuse files, folders and names that the steps read and that do not exist, before anything is computed.

    `meant` says whether each step is to run; `file` is the recipe's, for messages.
    """
    context = make_context(root, release, text, lambda _: None)
    wrong: list[tuple[str, str, str, str]] = []
    for name, step in release.steps.items():
        if not meant[name]:
            continue
        own, inputs = [], list(step.inputs())
        for one in inputs:
            if one.made is not None or Path(one.value).exists() or one.field == "recipe":
                continue
            if HUB_ID.fullmatch(one.value) and one.id_too:
                if one.kind == "checkpoint":
                    context.source(one.value)
                continue
            own.append((name, one.field, f"{one.value} does not exist", "Create it, or correct the name."))
        if not any(one.made for one in inputs if one.field == "recipe"):
            try:
                with step.request.spelled(in_recipe):
                    step.request.precheck(context)
            except KconvError as fault:
                has_recipe = "recipe" in type(step.request).model_fields
                own.append((name, "recipe" if has_recipe else "", fault.what, fault.fix))
        wrong += own
    if wrong:
        name, field_, what, fix = wrong[0]
        others = f"; and {len(wrong) - 1} more: " + "; ".join(f"{n}.{f}: {w}" for n, f, w, _ in wrong[1:])
        line = line_of(text, ("steps", name, field_))
        raise RecipeInvalid(
            f"{name}.{field_}: {what}{others if wrong[1:] else ''}".replace(".:", ":"),
            where=name if line is None else f"{file}:{line}" if file else f"line {line} of the recipe",
            fix=f"{fix} Nothing was computed.",
        )


def fingerprint(step: Step, found: StepInputs, release: Release, text: str) -> str:
    """Return a digest of everything that determines a step's result."""
    parts: dict[str, Any] = {
        "kconv": version("kconv"), "source": sources_digest(), "step": step.plain(), "inputs": found.digests,
    }  # fmt: skip
    if step.request.OF_RELEASE:
        parts["facts"] = release.facts.model_dump(mode="json")
        parts["floor"] = release.min_acceptance.model_dump(mode="json") if release.min_acceptance else None
        parts["recipe"] = hashlib.sha256(text.encode()).hexdigest()
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def stated(step: Step, state: State, text: str) -> str:
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
        parts["recipe"] = hashlib.sha256(text.encode()).hexdigest()
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def refuse_stale(name: str, release: Release, text: str, state: State) -> None:
    """Refuse a card or a publication of another recipe's output, since the recipe is published as its origin.

    It is another's if a step that it depends on, directly or not, was made with different statements.
    """
    if not release.steps[name].request.OF_RELEASE:
        return
    before = release.steps[name].needed()
    for other in before:
        before += [further for further in release.steps[other].needed() if further not in before]
    for other in (step for step in release.steps if step in before):
        record = state.steps.get(other)
        if record is None or record.stated != stated(release.steps[other], state, text):
            raise ReleaseStateInvalid(
                f"{name} would publish {other} as made by this recipe, but another recipe made it",
                where=f"{other} in the recipe",
                fix=f"Run the recipe with --start-at {other}, or restore the earlier recipe.",
            )


def _output(name: str, made: tuple[str, str], root: Path, state: State) -> str:
    step, rest = made
    record, path = state.steps.get(step), root / f"{step}{rest}"
    if record is None or record.status != "done" or not path.exists():
        raise ReleaseStateInvalid(
            f"{name} reads ${step}{rest}, which does not exist yet",
            where=path,
            fix=f"Run the recipe with --start-at {step}.",
        )
    digest = digest_marks(record.files, rest)
    if digest is None:
        raise ReleaseStateInvalid(
            f"{name} reads ${step}{rest}, but the output of {step} has no such file",
            where=path,
            fix=f"Its files are {', '.join(sorted(record.files))}.",
        )
    return digest


def _outside(path: Path, state: State) -> str:
    """Return the digest of a file or folder outside the steps' outputs, and remember the files read."""
    at = Path(os.path.realpath(path))
    if at.is_dir():
        known = {k.removeprefix(f"{at}/"): m for k, m in state.seen.items() if k.startswith(f"{at}/")}
        marks = mark_folder(at, known)
        state.seen.update({f"{at}/{name}": one for name, one in marks.items()})
        return digest_marks(marks) or "empty"
    state.seen[str(at)] = mark(at, state.seen.get(str(at)))
    return state.seen[str(at)].sha256
