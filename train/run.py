"""One training run from data to head, resumed where it stopped.

OUT holds the head in TensorRT-LLM's layout, which is ModelOpt's names under a config that says what was trained (or in
vLLM's, see `written`), with kconv's manifest; and in `modelopt/` the same head as ModelOpt's own module, training.json,
and the curves.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

from ..checkpoint.folder import open_checkpoint
from ..checkpoint.staging import refuse_existing, staged
from ..checkpoint.tensors import TORCH
from ..convert.execute import fill
from ..convert.plan import WriteOptions, plan
from ..convert.provenance import read_provenance
from ..convert.read import Head, read_head, read_slot
from ..engines import by_name
from ..engines.layout import stored
from ..targets.config import read_target_config
from ..targets.ends import load_ends
from .arguments import Pace, check_processes
from .checkpoints import claim, drop_unusable, newest
from .feed import Feed
from .job import Job, draft_map, job_key
from .loop import EagleTrainer, Progress
from .module import EagleModel, build_module, reduce_vocab
from .outcome import MODULE, UNTRAINED, leave
from .recipe import check_recipe
from .watch import spec_of
from .written import choose_layout

# Enough for a curve; kconv validate measures the head that comes out.
LOOK_BATCHES = 16


def train(job: Job, out: Path, pace: Pace = Pace(), progress: Progress = lambda *_: None) -> Path:  # noqa: B008
    """Train a head, or go on with a run that stopped.

    Under torchrun each process calls this with the same arguments; the first one writes.

    Args:
        job: what to train.
        out: the folder to make. Checkpoints stand beside it, in `.NAME.training`, until the run is done.
        pace: how often the run is watched and kept.
        progress: called after each step.

    Raises:
        RecipeInvalid: the recipe cannot be, or does not fit the target, the data or the processes.
        LayoutCannot: no engine could load the head.
        ManifestMismatch: the manifest of the head to go on from is not of the schema.
        TrainingFailed: the loss is no longer a number, or ModelOpt does not export what was trained.
        OutputExists: something is at `out`, or beside it stand checkpoints of another run, or of this one with another
            number of processes.
        OutputFailed: `out` is not writable.
    """
    check_recipe(job.recipe)
    check_processes(job.recipe.batch, pace)
    refuse_existing(out)
    layout = choose_layout(spec_of(job.recipe, read_target_config(job.target)))
    # What the head to go on from was calibrated on, training does not make unseen.
    converted = read_provenance(job.start.checkpoint.folder).conversion(None) if job.start else None
    work = out.parent / f".{out.name}.training"
    trainer = run(job, work, pace, progress)
    if trainer.accelerator.is_main_process:
        with staged(out) as folder:
            export = work / "export"
            shutil.rmtree(export, ignore_errors=True)
            report = leave(job, trainer, work, export)
            head = read_head(open_checkpoint(export, source=f"a training run of {job.target.name}"))
            planned = plan(head, layout, WriteOptions(dtype=job.recipe.compute or ""))
            fill(dataclasses.replace(planned, conversion=converted), folder, training=report)
            shutil.move(export / MODULE, folder / MODULE)
            if (work / "runs").exists():
                shutil.move(work / "runs", folder / MODULE / "tensorboard")
        shutil.rmtree(work)
    trainer.accelerator.wait_for_everyone()
    return out


def run(job: Job, work: Path, pace: Pace, progress: Progress) -> EagleTrainer:
    """Train to the last step, from the newest checkpoint before it in `work` if there is one."""
    recipe, world = job.recipe, int(os.environ.get("WORLD_SIZE", "1"))
    if not int(os.environ.get("RANK", "0")):
        claim(work, job_key(job), world)
    model = _start(job)
    spec = spec_of(recipe, read_target_config(job.target))
    states, unseen = job.states()
    looked_at, dtype = LOOK_BATCHES * recipe.batch, TORCH[recipe.dtype]
    # Whole batches, whatever the processes: accelerate would fill up what is left over with rows from the beginning.
    used = len(job.text.ids) // recipe.batch * recipe.batch
    feeds = (
        Feed(job.text.ids[:used], job.text.mask[:used], recipe.batch // world, states, dtype),
        Feed(job.unseen.ids[:looked_at], job.unseen.mask[:looked_at], recipe.batch, unseen, dtype),
    )
    trainer = EagleTrainer(model, spec, recipe, feeds, work, pace, progress)
    resume = newest(work, recipe.steps)
    trainer.accelerator.wait_for_everyone()
    if trainer.accelerator.is_main_process:
        drop_unusable(work, recipe.steps)
    trainer.accelerator.wait_for_everyone()
    if resume is None:
        untrained = trainer.evaluate() | {"step": 0}
        # Beside the checkpoints, for training begins with an empty log.
        if trainer.accelerator.is_main_process:
            (work / UNTRAINED).write_text(json.dumps(untrained))
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    if recipe.steps % pace.look_every:
        trainer.evaluate()
    return trainer


def _start(job: Job) -> EagleModel:
    model = build_module(load_ends(job.target, TORCH[job.recipe.dtype]), job.recipe)
    if job.start is not None:
        _take_over(model, job.start)
    elif job.recipe.draft_vocab is not None:
        reduce_vocab(model, draft_map(job, job.recipe.draft_vocab, model.config.vocab_size))
    return model


def _take_over(model: EagleModel, head: Head) -> None:
    """Give a module the weights of a head in any layout."""
    own = model.eagle_module.state_dict()
    for name, row in stored(by_name("modelopt"), head.spec).items():
        if name in own:
            own[name].copy_(row.move.pack([read_slot(head, slot) for slot in row.slots]))
