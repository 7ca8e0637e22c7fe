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
from pathlib import Path
from typing import Literal

from ..cards.publish.floor import RECIPE
from ..checkpoint.manifest import MANIFEST, read_manifest
from ..checkpoint.staging import PARTIAL, writing
from ..errors import KconvError, OutputExists
from ..installed import version
from ..operations.base import extras
from ..options import in_recipe
from .prepare import PreparedRelease, Standing
from .record import Done, Mark, State, locked, log, mark, mark_folder, read_state, write_state

Say = Callable[[str], None]
Status = Literal["made", "unchanged", "left out", "failed", "not reached"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step: its name, its kind, how it ended, why it ran, seconds, and bytes of its output."""

    name: str
    do: str
    status: Status
    why: str = ""
    seconds: float = 0.0
    size: int = 0


def run_release(prepared: PreparedRelease, say: Say, told: Callable[[Outcome], None]) -> None:
    """Run a release from its current state; its folder is created, or resumed.

    Args:
        told: called with the outcome of each step, also of those after a failed one.

    Raises:
        ReleaseBusy, ReleaseStateInvalid: another run is active there, or its record cannot be read.
        OutputExists: there is something that no run made.
        KconvError: a step failed; earlier ones are kept, and the next call resumes from it.
    """
    root = prepared.root
    _refuse_foreign(root)
    with locked(root):
        state = read_state(root).model_copy(update={"kconv": version("kconv")})
        with writing(root / RECIPE):
            (root / RECIPE).write_text(prepared.text, encoding="utf-8")
        steps = iter(prepared.release.steps.items())
        for name, step in steps:
            if not prepared.selected[name]:
                told(Outcome(name, step.do, "left out"))
                continue
            try:
                told(_take(name, prepared, state, say))
            except BaseException as fault:
                why = fault.what if isinstance(fault, KconvError) else type(fault).__name__
                log(root, "failed", step=name, fault=str(fault) if isinstance(fault, KconvError) else why)
                told(Outcome(name, step.do, "failed", why))
                for left, other in steps:
                    told(Outcome(left, other.do, "not reached"))
                raise


def _take(name: str, prepared: PreparedRelease, state: State, say: Say) -> Outcome:
    """Run a step, or find that it is up to date."""
    root, found = prepared.root, Standing(name, prepared, state, lambda words: say(f"{name}: {words}"))
    step, own = found.step, found.fingerprint
    if not found.why:
        write_state(root, state)
        return Outcome(name, step.do, "unchanged", size=_size(state.steps[name].files))
    _clear(found, root, state)
    state.steps[name] = Done(status="running", fingerprint=own)
    write_state(root, state)
    log(root, "begin", step=name, do=step.do, why=found.why, fingerprint=own, inputs=found.digests)
    begin = time.monotonic()
    try:
        with step.request.spelled(in_recipe), extras():
            _carry_out(found, root / name)
    except KconvError as fault:
        # A report with errors exists all the same.
        left = mark_folder(root / name, {}) if (root / name).is_dir() else {}
        state.steps[name] = Done(status="failed", fingerprint=own, files=left, fault=str(fault))
        write_state(root, state)
        raise
    seconds = round(time.monotonic() - begin, 1)
    files = _mark_output(root / name)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    state.steps[name] = Done(status="done", fingerprint=own, stated=found.stated, files=files, seconds=seconds, at=at)
    write_state(root, state)
    log(root, "made", step=name, seconds=seconds, files={path: one.sha256 for path, one in files.items()})
    return Outcome(name, step.do, "made", found.why, seconds, _size(files))


def _carry_out(found: Standing, out: Path) -> None:
    """Run a step's operation; its output is whole or absent, even if the operation found errors."""
    request = found.step.at(out)
    if request.OUTPUT:
        out.mkdir(exist_ok=True)
    result = request.run(found.context)
    if not request.passed(result):
        raise request.failure(result)


def _refuse_foreign(root: Path) -> None:
    if root.exists() and (not root.is_dir() or (any(root.iterdir()) and not (root / RECIPE).exists())):
        raise OutputExists(
            f"{root} exists, but no kconv run created it", fix="Choose another --out, or delete it if it is not needed."
        )


def _clear(found: Standing, root: Path, state: State) -> None:
    """Remove what an earlier run of a step left; refuse to remove files of other origin.

    A file to which the same step adds when it resumes stays.
    """
    name, step, out, record = found.name, found.step, root / found.name, state.steps.get(found.name)
    begun = record is not None and record.status != "done" and record.fingerprint == found.fingerprint
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


def _size(marks: dict[str, Mark]) -> int:
    return sum(one.size for one in marks.values())
