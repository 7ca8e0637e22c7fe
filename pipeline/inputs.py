"""A step's inputs, found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..checkpoint.source import HUB_ID, Folder, Source, resolve
from ..errors import ReleaseStateInvalid
from .job import Output
from .kinds import Card, Publish, StepBase
from .recipe import Release, inputs_of, reference
from .state import State, digest_marks, mark, mark_folder

# Raise it with each change to `steps` that alters what a step makes of the same inputs.
SOURCE = "1"


@dataclass
class Found:
    """What a step's inputs are.

    Attributes:
        inputs, words: as `job.Job` has them.
    """

    inputs: dict[str, tuple[Source, ...]] = field(default_factory=dict)
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _digests: dict[str, tuple[Callable[[], str], ...]] = field(default_factory=dict)

    @cached_property
    def digests(self) -> dict[str, tuple[str, ...]]:
        """The digests of each field's inputs; files that are not as they were seen last are read for them."""
        return {name: tuple(one() for one in own) for name, own in self._digests.items()}

    def add(self, name: str, source: Source | None, word: str, digest: Callable[[], str]) -> None:
        """Add one input of a field; its digest is made when it is asked for."""
        if source is not None:
            self.inputs[name] = (*self.inputs.get(name, ()), source)
        self.words[name] = (*self.words.get(name, ()), word)
        self._digests[name] = (*self._digests.get(name, ()), digest)


def needed(step: StepBase) -> list[str]:
    """Return the steps whose outputs a step reads."""
    found = (reference(value) for _, value in inputs_of(step))
    return list(dict.fromkeys(name for name, _ in filter(None, found)))


def find_inputs(name: str, step: StepBase, root: Path, state: State) -> Found:
    """Find what a step's inputs are.

    Raises:
        ReleaseStateInvalid: the output of an earlier step is not there, or lacks what is asked of it.
        HubRefused, HubUnreachable: a hub id cannot be resolved.
    """
    found = Found()
    for field_, value in inputs_of(step):
        is_checkpoint = field_ in step.CHECKPOINTS or isinstance(step, Publish)
        if (made := reference(value)) is not None:
            path, digest = _output(name, made, root, state)
            label = f"{root.resolve().name}/{made[0]}{made[1]}"
            found.add(field_, Output(path, label), str(path), partial(str, digest))
        elif Path(value).exists():
            source = Folder(Path(value)) if Path(value).is_dir() else None
            found.add(field_, source, value, partial(_outside, Path(value), state))
        elif is_checkpoint:
            # A folder that is not there says so when it is opened.
            source = resolve(value)
            found.add(field_, source, value, partial(str, source.name if HUB_ID.fullmatch(value) else "absent"))
        else:
            found.add(field_, None, value, partial(str, f"named {value}"))
    return found


def fingerprint(step: StepBase, found: Found, release: Release, text: str) -> str:
    """Return a digest of everything that a step's outcome hangs on."""
    parts: dict[str, Any] = {
        "kconv": version("kconv"),
        "source": SOURCE,
        "step": step.model_dump(mode="json"),
        "inputs": found.digests,
    }
    if isinstance(step, Card | Publish):
        parts["facts"] = release.facts.model_dump(mode="json")
        parts["floor"] = release.min_acceptance.model_dump(mode="json") if release.min_acceptance else None
    if isinstance(step, Card):
        parts["recipe"] = hashlib.sha256(text.encode()).hexdigest()
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def stated(step: StepBase, state: State, text: str) -> str:
    """Return a digest of what a recipe says of a step: its parameters, and the outputs of other steps that it reads.

    What lies outside of the release is not looked at again, as it may be gone by the time of a publication.
    """
    made = [reference(value) for _, value in inputs_of(step)]
    parts: dict[str, Any] = {
        "step": step.model_dump(mode="json"),
        "inputs": [digest_marks(state.steps[n].files, rest) for n, rest in filter(None, made) if n in state.steps],
    }
    if isinstance(step, Card):
        # It holds the recipe.
        parts["recipe"] = hashlib.sha256(text.encode()).hexdigest()
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def refuse_stale(name: str, release: Release, text: str, state: State) -> None:
    """Refuse a card or a publication of what another recipe made; the recipe is published as what made it.

    Raises:
        ReleaseStateInvalid: a step that it hangs on, however far back, was made as this recipe does not say.
    """
    if not isinstance(release.steps[name], Card | Publish):
        return
    before = needed(release.steps[name])
    for other in before:
        before += [further for further in needed(release.steps[other]) if further not in before]
    for other in (step for step in release.steps if step in before):
        record = state.steps.get(other)
        if record is None or record.stated != stated(release.steps[other], state, text):
            raise ReleaseStateInvalid(
                f"{name} would say that this recipe made {other}, which another one did",
                where=f"{other} in the recipe",
                fix=f"Run the recipe from {other} on, or put it back as it was.",
            )


def _output(name: str, made: tuple[str, str], root: Path, state: State) -> tuple[Path, str]:
    step, rest = made
    record, path = state.steps.get(step), root / f"{step}{rest}"
    if record is None or record.status != "done" or not path.exists():
        raise ReleaseStateInvalid(
            f"{name} reads ${step}{rest}, which is not made yet",
            where=path,
            fix=f"Run the recipe from {step} on.",
        )
    digest = digest_marks(record.files, rest)
    if digest is None:
        raise ReleaseStateInvalid(
            f"{name} reads ${step}{rest}, and {step} makes no such thing",
            where=path,
            fix=f"It makes {', '.join(sorted(record.files))}.",
        )
    return path, digest


def _outside(path: Path, state: State) -> str:
    """Return the digest of a file or folder that is no step's, and remember what was read of it."""
    at = path.resolve()
    if at.is_dir():
        known = {k.removeprefix(f"{at}/"): m for k, m in state.seen.items() if k.startswith(f"{at}/")}
        marks = mark_folder(at, known)
        state.seen |= {f"{at}/{name}": one for name, one in marks.items()}
        return digest_marks(marks) or "empty"
    state.seen[str(at)] = mark(at, state.seen.get(str(at)))
    return state.seen[str(at)].sha256
