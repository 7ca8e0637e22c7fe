"""What a stopped run left behind. What belongs here: whose it is, and the newest checkpoint that is whole."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from ..checkpoint.folder import read_json
from ..errors import KconvError, OutputExists
from .module import WEIGHTS

STATE, RUN = "trainer_state.json", "run.json"
# In the order in which the Trainer writes them; its own state comes last:
# https://github.com/huggingface/transformers/blob/v5.14.1/src/transformers/trainer.py#L3065-L3119
PARTS = (WEIGHTS, "optimizer.pt", "scheduler.pt")


def claim(work: Path, key: str) -> None:
    """Make a run's folder, or take up the one that the same run left.

    Args:
        work: the folder of its checkpoints.
        key: names everything that decides what comes out of the run.

    Raises:
        OutputExists: another run's checkpoints are there.
    """
    work.mkdir(parents=True, exist_ok=True)
    record = work / RUN
    if record.exists() and read_json(record).get("key") != key:
        raise OutputExists(
            "another run stopped here: its recipe, target, data or libraries were others",
            where=work,
            fix="Repeat that run's command to go on with it, or delete the folder to begin anew.",
        )
    if not record.exists():
        draft = work / f"{RUN}.{os.getpid()}"
        draft.write_text(json.dumps({"key": key}))
        draft.replace(record)


def newest(work: Path) -> Path | None:
    """Return the newest whole checkpoint of a run; None where there is none."""
    found = sorted(work.glob("checkpoint-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))
    return next((folder for folder in reversed(found) if _is_whole(folder)), None)


def drop_broken(work: Path) -> None:
    """Delete the checkpoints that a kill cut short."""
    for folder in work.glob("checkpoint-*"):
        if not _is_whole(folder):
            shutil.rmtree(folder)


def _is_whole(folder: Path) -> bool:
    try:
        read_json(folder / STATE)
    except KconvError:
        return False
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    random = ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks)]
    return all((folder / name).exists() for name in (*PARTS, *random))
