"""Run a release from its current state.

A step runs if its output is missing or changed, or if its fingerprint differs from the one that made the output. The
fingerprint covers the inputs' contents, so a step whose inputs come out the same does not run again.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from ..cards.publish.floor import RECIPE
from ..checkpoint.manifest import MANIFEST, read_manifest
from ..checkpoint.staging import PARTIAL, writing
from ..errors import KconvError, OutputExists, RecipeInvalid
from ..operations.base import extras
from ..options import in_recipe
from .inputs import StepContext, check_names, find_inputs, fingerprint, make_context, refuse_stale, stated
from .recipe import Release, Step, kinds
from .record import Done, Mark, State, locked, log, mark, mark_folder, read_state, write_state

Say = Callable[[str], None]
Status = Literal["made", "unchanged", "left out", "failed", "not reached"]


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
class Outcome:
    """The outcome of a step: its name, its kind, how it ended, why it ran, seconds, and bytes of its output."""

    name: str
    do: str
    status: Status
    why: str = ""
    seconds: float = 0.0
    size: int = 0


def run_release(
    release: Release, text: str, root: Path, selection: Selection, say: Say, told: Callable[[Outcome], None]
) -> None:
    """Run a release from its current state.

    Args:
        text: the recipe's text, which is kept in the output.
        root: the folder of the release; created, or resumed.
        told: called with the outcome of each step, also of those after a failed one.

    Raises:
        RecipeInvalid: the selection names a step that does not exist, or a step reads a missing file.
        ReleaseBusy, ReleaseStateInvalid: another run is active there, or its record cannot be read.
        OutputExists: there is something that no run made.
        KconvError: a step failed; earlier ones are kept, and the next call resumes from it.
    """
    meant = selection.takes(release)
    _refuse_foreign(root)
    check_names(release, text, meant, root)
    with locked(root):
        state = read_state(root).model_copy(update={"kconv": version("kconv")})
        with writing(root / RECIPE):
            (root / RECIPE).write_text(text, encoding="utf-8")
        steps = iter(release.steps.items())
        for name, step in steps:
            if not meant[name]:
                told(Outcome(name, step.do, "left out"))
                continue
            try:
                told(_take(name, step, release, text, root, state, say))
            except BaseException as fault:
                why = fault.what if isinstance(fault, KconvError) else type(fault).__name__
                log(root, "failed", step=name, fault=str(fault) if isinstance(fault, KconvError) else why)
                told(Outcome(name, step.do, "failed", why))
                for left, other in steps:
                    told(Outcome(left, other.do, "not reached"))
                raise


def why_run(name: str, root: Path, state: State, mark_now: str) -> str:
    """Return why a step has to run; empty if its output was made from exactly these inputs."""
    record = state.steps.get(name)
    if record is None:
        return "never made"
    if record.status != "done":
        return "stopped by an error" if record.status == "failed" else "interrupted"
    if record.fingerprint != mark_now:
        return "its inputs or its parameters changed"
    now = mark_folder(root / name, record.files) if (root / name).is_dir() else {}
    if not now:
        return "its output is gone"
    if _contents(now) != _contents(record.files):
        return "its output was changed"
    state.steps[name] = record.model_copy(update={"files": now})
    return ""


def _take(name: str, step: Step, release: Release, text: str, root: Path, state: State, say: Say) -> Outcome:
    """Run a step, or find that it is up to date."""
    context = make_context(root, release, text, lambda words: say(f"{name}: {words}"))
    found = find_inputs(name, step, context, state)
    refuse_stale(name, release, text, state)
    own = fingerprint(step, found, release, text)
    why = why_run(name, root, state, own)
    if not why:
        write_state(root, state)
        return Outcome(name, step.do, "unchanged", size=_size(state.steps[name].files))
    _clear(name, step, root, state, own)
    state.steps[name] = Done(status="running", fingerprint=own)
    write_state(root, state)
    log(root, "begin", step=name, do=step.do, why=why, fingerprint=own, inputs=found.digests)
    begin = time.monotonic()
    try:
        with step.request.spelled(in_recipe), extras():
            _carry_out(step, root / name, context)
    except KconvError as fault:
        # A report with errors exists all the same.
        left = mark_folder(root / name, {}) if (root / name).is_dir() else {}
        state.steps[name] = Done(status="failed", fingerprint=own, files=left, fault=str(fault))
        write_state(root, state)
        raise
    seconds = round(time.monotonic() - begin, 1)
    files = _mark_output(root / name)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    said = stated(step, state, text)
    state.steps[name] = Done(status="done", fingerprint=own, stated=said, files=files, seconds=seconds, at=at)
    write_state(root, state)
    log(root, "made", step=name, seconds=seconds, files={path: one.sha256 for path, one in files.items()})
    return Outcome(name, step.do, "made", why, seconds, _size(files))


def _carry_out(step: Step, out: Path, context: StepContext) -> None:
    """Run a step's operation; its output is whole or absent, even if the operation found errors."""
    request = step.at(out)
    if request.OUTPUT:
        out.mkdir(exist_ok=True)
    result = request.run(context)
    if not request.passed(result):
        raise request.failure(result)


def _refuse_foreign(root: Path) -> None:
    if root.exists() and (not root.is_dir() or (any(root.iterdir()) and not (root / RECIPE).exists())):
        raise OutputExists(
            f"{root} exists, but no kconv run created it", fix="Choose another --out, or delete it if it is not needed."
        )


def _clear(name: str, step: Step, root: Path, state: State, own: str) -> None:
    """Remove what an earlier run of a step left; refuse to remove files of other origin.

    A file to which the same step adds when it resumes stays.
    """
    out, record = root / name, state.steps.get(name)
    begun = record is not None and record.status != "done" and record.fingerprint == own
    if begun and step.request.RESUMES and step.request.OUTPUT:
        return
    with writing(out):
        if out.exists():
            foreign = ["it"] if record is None else []
            if record is not None and record.status != "running":
                foreign = sorted(mark_folder(out, record.files).keys() - record.files.keys())
            if foreign:
                raise OutputExists(
                    f"{name} must run again, but no run created {', '.join(foreign)} in its folder",
                    where=out,
                    fix="Move it, then run the recipe again.",
                )
            shutil.rmtree(out)
        if not step.request.RESUMES:
            for left in root.glob(f"{PARTIAL}{name}-????????"):
                shutil.rmtree(left, ignore_errors=True)


def _mark_output(out: Path) -> dict[str, Mark]:
    """Hash a step's output; files that kconv's manifest has just hashed are not read again."""
    recorded = {f.name: f for f in read_manifest(out).files} if (out / MANIFEST).exists() else {}

    def known(file: Path) -> Iterator[Mark]:
        record, stat = recorded.get(str(file.relative_to(out))), file.stat()
        if record and record.size == stat.st_size:
            yield Mark(size=stat.st_size, mtime_ns=stat.st_mtime_ns, sha256=record.sha256)

    files = sorted(file for file in out.rglob("*") if file.is_file())
    return {str(file.relative_to(out)): mark(file, next(known(file), None)) for file in files}


def _contents(marks: dict[str, Mark]) -> dict[str, str]:
    return {name: one.sha256 for name, one in marks.items()}


def _size(marks: dict[str, Mark]) -> int:
    return sum(one.size for one in marks.values())
