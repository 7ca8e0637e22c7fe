"""A head from plain text, kept by the hash of its recipe.

The folder holds model.safetensors and config.json, exactly as ModelOpt exports them, and `modelopt/`: the same
head as ModelOpt's own module (`module.save_module`), and training.json, which says how it was made.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor

from ..checkpoint.staging import refuse_existing, staged
from ..checkpoint.tensors import TORCH
from ..targets.model import load_target
from .arguments import Pace
from .feed import States, online_states
from .job import Job, Rows, job_key
from .loop import Progress
from .outcome import is_made, leave
from .recipe import EagleRecipe, check_recipe
from .run import run
from .windows import cut_windows

HELD_OUT_BATCHES = 8


def train_head(
    target_folder: Path,
    out: Path,
    recipe: EagleRecipe,
    text: Tensor,
    held_out: Tensor,
    progress: Progress = lambda *_: None,
) -> Path:
    """Train an Eagle3 head for a target with ModelOpt, or find the one that was made so before.

    Args:
        target_folder: the target; it is loaded whole.
        out: the folder to make. If a head of the same recipe, target, text and libraries is there, it is kept.
        recipe: what to make.
        text: token ids to train on, documents one after the other: [N] int64.
        held_out: token ids of other documents, [M] int64, on which the head is measured and never trained.
        progress: called after each training step.

    Returns:
        `out`.

    Raises:
        RecipeInvalid: the recipe cannot be, or does not fit the target or the texts.
        TrainingFailed: the loss is no longer a number, or ModelOpt does not export what was trained.
        TargetInvalid: the target cannot be loaded.
        OutputExists: something else is at `out`.
        OutputFailed: `out` is not writable.
    """
    job = _job(target_folder, recipe, text, held_out)
    work = out.parent / f".{out.name}.training"
    if is_made(out, job_key(job)):
        return out
    refuse_existing(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Another process may be making the same head: it goes first, and then there is nothing left to do.
    with FileLock(out.parent / f".{out.name}.lock"):
        if is_made(out, job_key(job)):
            return out
        with staged(out) as folder:
            trainer = run(job, work, Pace(save_every=recipe.steps, look_every=recipe.steps), progress)
            leave(job, trainer, work, folder)
        shutil.rmtree(work)
    return out


def head_key(target_folder: Path, recipe: EagleRecipe, text: Tensor, held_out: Tensor) -> str:
    """Return 16 hex digits that name what `train_head` makes of the same arguments on this installation."""
    return job_key(_job(target_folder, recipe, text, held_out))


def _job(target_folder: Path, recipe: EagleRecipe, text: Tensor, held_out: Tensor) -> Job:
    check_recipe(recipe)
    windows = cut_windows(text, recipe.seq, recipe.batches * recipe.batch, recipe.seed)
    measured = cut_windows(held_out, recipe.seq, HELD_OUT_BATCHES * recipe.batch, recipe.seed)

    def states() -> tuple[States, States]:
        return online_states(load_target(target_folder, TORCH[recipe.dtype]), recipe)

    text_rows, unseen_rows = (Rows(ids, torch.ones_like(ids, dtype=torch.bool)) for ids in (windows, measured))
    return Job(target_folder, recipe, text_rows, unseen_rows, states)
