"""What a run remembers.

A file whose size and time are the recorded ones is taken to hold the recorded bytes; any other is read again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ..checkpoint.bytes import file_digest
from ..checkpoint.schema import load_json
from ..checkpoint.staging import writing
from ..errors import ReleaseBusy, ReleaseStateInvalid

STATE, LOG, LOCK = "run.json", "run.jsonl", ".run.lock"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Mark(_Record):
    """A file as it was when it was digested."""

    size: int
    mtime_ns: int
    sha256: str


class Done(_Record):
    """A step's record.

    Attributes:
        status: "running" from before it is carried out until its outcome is known.
        fingerprint: of everything that its outcome hangs on.
        stated: of what the recipe said of it when it was made, see `inputs.stated`.
        files: its output, by path inside it; also what a step left that failed.
        seconds: how long it took.
        at: when, UTC.
        fault: what stopped it.
    """

    status: Literal["running", "done", "failed"]
    fingerprint: str
    stated: str = ""
    files: dict[str, Mark] = {}
    seconds: float = 0.0
    at: str = ""
    fault: str = ""


class State(_Record):
    """The schema of run.json.

    Attributes:
        kconv: the version that wrote it last.
        steps: by name.
        seen: files outside of the run's folder, by absolute path.
    """

    schema_version: Literal[1] = 1
    kconv: str = ""
    steps: dict[str, Done] = {}
    seen: dict[str, Mark] = {}


def read_state(root: Path) -> State:
    """Return what was remembered in a run's folder; nothing where it was never run.

    Raises:
        ReleaseStateInvalid: run.json is not of the schema.
    """
    file = root / STATE
    if not os.path.lexists(file):
        return State()
    return load_json(
        State,
        file,
        ReleaseStateInvalid,
        what="record of what was done",
        fix="Choose another --out, or delete that folder to do everything again.",
    )


def write_state(root: Path, state: State) -> None:
    """Write run.json, whole or not at all.

    Raises:
        OutputFailed: the disk is full or not writable.
    """
    with writing(root / STATE):
        beside = root / f".{STATE}.new"
        with beside.open("w", encoding="utf-8") as file:
            file.write(state.model_dump_json(indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(root / STATE)


def log(root: Path, event: str, **about: Any) -> None:
    """Append a line to run.jsonl.

    Raises:
        OutputFailed: the disk is full or not writable.
    """
    line = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "event": event} | about
    with writing(root / LOG), (root / LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold a run's folder, which is made, for this process alone.

    Raises:
        ReleaseBusy: another process holds it.
        OutputFailed: it cannot be made.
    """
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as fault:
            raise ReleaseBusy(
                f"another kconv run is working in {root}", fix="Wait until it ends, or choose another --out."
            ) from fault
        yield
    finally:
        os.close(descriptor)


def mark(file: Path, known: Mark | None) -> Mark:
    """Return a file's mark, digesting it only where it is not as it was known."""
    found = file.stat()
    if known and (known.size, known.mtime_ns) == (found.st_size, found.st_mtime_ns):
        return known
    return Mark(size=found.st_size, mtime_ns=found.st_mtime_ns, sha256=file_digest(file))


def mark_folder(folder: Path, known: dict[str, Mark]) -> dict[str, Mark]:
    """Return the marks of a folder's files, by path inside it."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {name: mark(file, known.get(name)) for file in files for name in [str(file.relative_to(folder))]}


def digest_marks(marks: dict[str, Mark], under: str = "") -> str | None:
    """Return one digest over files; those below `under`, or that file alone; None where there are none.

    Args:
        marks: by path.
        under: "/path" inside, or "" for all.
    """
    inside = under.strip("/")
    own = {n: m for n, m in marks.items() if not inside or n == inside or n.startswith(f"{inside}/")}
    lines = [f"{m.sha256}  {n[len(inside) :]}\n" for n, m in sorted(own.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest() if own else None
