"""A run of `kconv states` that may be killed and taken up."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..checkpoint.bytes import file_digest
from ..checkpoint.staging import PARTIAL
from ..errors import OutputFailed, StatesInvalid
from .states_record import ShardRecord, StatesRecord

PROGRESS, PLAN, LOCK = "progress", "plan.json", "lock"


def read_finished(folder: Path, name: str) -> ShardRecord | None:
    """Return what an earlier run noted of a shard, if the file is still what it wrote."""
    try:
        done = ShardRecord.model_validate_json((folder / PROGRESS / f"{name}.json").read_bytes())
        return done if file_digest(folder / name) == done.sha256 else None
    except (OSError, ValueError):
        return None


@contextmanager
def partial(out: Path, plan: StatesRecord) -> Iterator[Path]:
    """Give the hidden folder where a run of this plan writes, and hold it against other runs.

    It outlives a fault, as what is finished in it counts; its lock goes with the process.
    """
    folder = out.parent / f"{PARTIAL}{out.name[:40]}-states"
    try:
        (folder / PROGRESS).mkdir(parents=True, exist_ok=True)
        with (folder / PROGRESS / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as fault:
                raise StatesInvalid(
                    f"another run is writing {out}", where=folder, fix="Wait for it, or choose another name."
                ) from fault
            _hold_plan(folder, plan)
            yield folder
    except OSError as fault:
        raise OutputFailed(
            f"{out} could not be written: {fault.strerror or fault}",
            where=fault.filename or folder,
            fix="Free some space, or check that the folder is writable; then run again, and it goes on.",
        ) from fault


def _hold_plan(folder: Path, plan: StatesRecord) -> None:
    file = folder / PROGRESS / PLAN
    text = plan.to_json()
    if not file.exists():
        file.write_text(text)
        return
    before, now = _load_plan(file), json.loads(text)
    other = [key for key in now if before.get(key) != now[key]]
    if other:
        raise StatesInvalid(
            f"a run of other {', '.join(other)} was interrupted here",
            where=folder,
            fix="Run that one again to finish it, choose another name, or delete this folder.",
        )


def _load_plan(file: Path) -> dict[str, object]:
    try:
        return json.loads(file.read_text())
    except ValueError:  # killed while it was written; no shard can be there
        return {}
