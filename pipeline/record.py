"""The record of a run.

A file with the recorded size and time is assumed to have the recorded bytes; any other is read again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from ..checkpoint.bytes import file_digest
from ..checkpoint.posix import lock
from ..checkpoint.schema import load_json
from ..checkpoint.staging import writing
from ..errors import ReleaseBusy, ReleaseStateInvalid
from ..strict import StrictModel

STATE, LOG, LOCK = "run.json", "run.jsonl", ".run.lock"


class Mark(StrictModel):
    """A file's state when it was hashed."""

    size: int
    mtime_ns: int
    sha256: str


class Done(StrictModel):
    """A step's record.

    Attributes:
        status: "running" from before it starts until its outcome is known.
        fingerprint: over everything that determines its result.
        stated: over the recipe's statements about it when it was made.
        files: its output, by path inside it; also the files that a failed step left.
        at: when, UTC.
    """

    status: Literal["running", "done", "failed"]
    fingerprint: str
    stated: str = ""
    files: dict[str, Mark] = Field(default={})
    seconds: float = 0.0
    at: str = ""
    fault: str = ""


class State(StrictModel):
    """The schema of run.json. `kconv` wrote it last; `seen` has files outside the run's folder, by absolute path."""

    schema_version: Literal[1] = 1
    kconv: str = ""
    steps: dict[str, Done] = Field(default={})
    seen: dict[str, Mark] = Field(default={})


def read_state(root: Path) -> State:
    """Return the record in a run's folder; empty if it never ran."""
    file = root / STATE
    if not os.path.lexists(file):
        return State()
    return load_json(
        State,
        file,
        ReleaseStateInvalid,
        what="run record",
        fix="Choose another --out, or delete that folder to run everything again.",
    )


def write_state(root: Path, state: State) -> None:
    """Write run.json, whole or not at all."""
    with writing(root / STATE):
        beside = root / f".{STATE}.new"
        with beside.open("w", encoding="utf-8") as file:
            file.write(state.model_dump_json(indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(root / STATE)


def log(root: Path, event: str, **about: Any) -> None:
    """Append a line to run.jsonl."""
    line = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "event": event} | about
    with writing(root / LOG), (root / LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Create a run's folder and lock it for this process."""
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            lock(descriptor)
        except OSError as fault:
            raise ReleaseBusy(
                f"another kconv run is working in {root}", fix="Wait until it ends, or choose another --out."
            ) from fault
        yield
    finally:
        os.close(descriptor)


def mark(file: Path, known: Mark | None) -> Mark:
    """Return a file's mark, hashing the file only if it changed since it was last seen."""
    found = file.stat()
    if known and (known.size, known.mtime_ns) == (found.st_size, found.st_mtime_ns):
        return known
    return Mark(size=found.st_size, mtime_ns=found.st_mtime_ns, sha256=file_digest(file))


def mark_folder(folder: Path, known: dict[str, Mark]) -> dict[str, Mark]:
    """Return the marks of a folder's files, by path inside it."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {name: mark(file, known.get(name)) for file in files for name in [str(file.relative_to(folder))]}


def digest_marks(marks: dict[str, Mark], under: str = "") -> str | None:
    """Return one digest over files; over those below `under`, or that file alone; None if there are none.

    `marks` are by path; `under` is a "/path" inside, or "" for all.
    """
    inside = under.strip("/")
    own = {n: m for n, m in marks.items() if not inside or n == inside or n.startswith(f"{inside}/")}
    lines = [f"{m.sha256}  {n[len(inside) :]}\n" for n, m in sorted(own.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest() if own else None
