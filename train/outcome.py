"""What a run leaves.

`modelopt/` holds the same head as ModelOpt's own module, training.json, and the curves. The report stands in
training.json with every look and without the prompts' digests, and in the manifest the other way round.
"""

from __future__ import annotations

import dataclasses
import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..checkpoint.folder import read_json
from ..checkpoint.tensors import TORCH
from ..targets.ends import load_ends
from .checkpoints import RUN
from .curves import draw_curves
from .job import LIBRARIES, Job, draft_coverage
from .loop import EagleTrainer
from .module import build_module, export_module, save_module

MODULE, REPORT, CURVES, UNTRAINED = "modelopt", "training.json", "curves.png", "untrained.json"


def leave(job: Job, trainer: EagleTrainer, work: Path, folder: Path) -> dict[str, Any]:
    """Write a trained head as ModelOpt exports it, its module, and what is known of the run; return the latter.

    Args:
        work: where the run's key and first look lie.
        folder: the folder to make.
    """
    model = trainer.whole(lambda: build_module(load_ends(job.target, TORCH[job.recipe.dtype]), job.recipe))
    folder.mkdir(parents=True, exist_ok=True)
    export_module(model, folder, job.recipe)
    (folder / MODULE).mkdir()
    save_module(model, folder / MODULE, job.recipe)
    history = [read_json(work / UNTRAINED), *trainer.state.log_history]
    looks = [{k.removeprefix("eval_"): v for k, v in row.items()} for row in history if "eval_loss" in row]
    coverage = draft_coverage(job)
    report = {
        "key": read_json(work / RUN)["key"],
        "recipe": dataclasses.asdict(job.recipe),
        "data": dict(job.data),
        "started_from": job.start.checkpoint.source if job.start else None,
        "parameters": sum(p.numel() for p in model.eagle_module.parameters()),
        "tokens": {"text": job.text.ids.numel(), "counted": int(job.text.mask.sum()), "unseen": job.unseen.ids.numel()},
        "draft_vocab": {"share": coverage.share, **dataclasses.asdict(coverage)} if coverage else None,
        "untrained": looks[0],
        "trained": looks[-1],
        "looks": looks,
        "libraries": {name: version(name) for name in LIBRARIES},
    }
    data = {name: value for name, value in job.data.items() if name != "prompts"}
    (folder / MODULE / REPORT).write_text(json.dumps(report | {"data": data}, indent=2) + "\n")
    if find_spec("matplotlib"):
        draw_curves(folder / MODULE / CURVES, history, job.recipe.ttt_steps)
    return {key: value for key, value in report.items() if key != "looks"}


def is_made(out: Path, key: str) -> bool:
    """Say whether a folder holds what a job of this key makes."""
    report = out / MODULE / REPORT
    return report.exists() and read_json(report).get("key") == key
