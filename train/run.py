"""One training run from data to head, resumed where it stopped. What belongs here: its order, and what it leaves.

OUT holds the head in TensorRT-LLM's layout, which is ModelOpt's names under a config that says what was trained (or in
vLLM's, see `written`), with kconv's manifest; and in `modelopt/` the same head as ModelOpt's own module, training.json,
and the curves.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoint.bytes import file_digest
from ..checkpoint.folder import open_checkpoint, read_json
from ..checkpoint.staging import refuse_existing, staged
from ..checkpoint.tensors import TORCH
from ..convert.execute import fill
from ..convert.layout import stored
from ..convert.layouts import by_name
from ..convert.plan import Wishes, plan
from ..convert.read import Head, read_head, read_slot
from ..convert.told import read_told
from ..errors import RecipeInvalid
from ..head.vocab import Coverage, measure_coverage, target_ids
from ..target.config import read_target_config
from ..target.ends import load_ends
from .checkpoints import claim, drop_broken, newest
from .curves import draw_curves
from .feed import Feed, States
from .loop import EagleTrainer, Pace, Progress
from .module import EagleModel, build_module, export_module, reduce_vocab, save_module
from .recipe import EagleRecipe, check_recipe
from .watch import spec_of
from .windows import map_draft_vocab
from .written import choose_layout

MODULE, REPORT, CURVES, UNTRAINED = "modelopt", "training.json", "curves.png", "untrained.json"
# Raise it with each change to train/ that alters what a recipe makes.
SOURCE = "2"
# Enough for a curve; kconv validate measures the head that comes out.
LOOK_BATCHES = 16
LIBRARIES = ("torch", "transformers", "accelerate", "nvidia-modelopt")


@dataclass(frozen=True)
class Rows:
    """Token ids [N, T] int64, and which of them count in the loss, [N, T] bool."""

    ids: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Job:
    """What to train, on what.

    Attributes:
        target: the target's folder; its ends are loaded, its layers only by `states`.
        recipe: how.
        text, unseen: what is trained on, and what is only looked at.
        states: gives the target's states over the two, when training begins.
        data: what the rows were made of, as the manifest is to say it.
        specials: token ids that a reduced draft vocabulary keeps in any case.
        start: a head to go on from, in any layout.
    """

    target: Path
    recipe: EagleRecipe
    text: Rows
    unseen: Rows
    states: Callable[[], tuple[States, States]]
    data: Mapping[str, Any] = field(default_factory=dict)
    specials: tuple[int, ...] = ()
    start: Head | None = None


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
        OutputExists: something is at `out`, or another run's checkpoints stand beside it.
        OutputFailed: `out` is not writable.
    """
    check_recipe(job.recipe)
    refuse_existing(out)
    layout = choose_layout(spec_of(job.recipe, read_target_config(job.target)))
    # What the head to go on from was calibrated on, training does not make unseen.
    converted = read_told(job.start.checkpoint.folder).conversion(None) if job.start else None
    work = out.parent / f".{out.name}.training"
    trainer = run(job, work, pace, progress)
    if trainer.accelerator.is_main_process:
        with staged(out) as folder:
            export = work / "export"
            shutil.rmtree(export, ignore_errors=True)
            report = leave(job, trainer, work, export)
            head = read_head(open_checkpoint(export, source=f"a training run of {job.target.name}"))
            planned = plan(head, layout, Wishes(dtype=job.recipe.compute or ""))
            fill(dataclasses.replace(planned, conversion=converted), folder, training=report)
            shutil.move(export / MODULE, folder / MODULE)
            if (work / "runs").exists():
                shutil.move(work / "runs", folder / MODULE / "tensorboard")
        shutil.rmtree(work)
    trainer.accelerator.wait_for_everyone()
    return out


def run(job: Job, work: Path, pace: Pace, progress: Progress) -> EagleTrainer:
    """Train to the last step, from the newest checkpoint in `work` if there is one."""
    recipe, world = job.recipe, int(os.environ.get("WORLD_SIZE", "1"))
    if recipe.batch % world:
        raise RecipeInvalid(
            f"a batch of {recipe.batch} rows cannot be shared by {world} processes",
            fix="Make batch a multiple of the number of processes.",
        )
    claim(work, job_key(job))
    model = _start(job)
    spec = spec_of(recipe, read_target_config(job.target))
    states, unseen = job.states()
    looked_at, dtype = LOOK_BATCHES * recipe.batch, TORCH[recipe.dtype]
    feeds = (
        Feed(job.text.ids, job.text.mask, recipe.batch // world, states, dtype),
        Feed(job.unseen.ids[:looked_at], job.unseen.mask[:looked_at], recipe.batch, unseen, dtype),
    )
    trainer = EagleTrainer(model, spec, recipe, feeds, work, pace, progress)
    resume = newest(work)
    trainer.accelerator.wait_for_everyone()
    if trainer.accelerator.is_main_process:
        drop_broken(work)
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
        reduce_vocab(model, _draft_map(job, job.recipe.draft_vocab, model.config.vocab_size))
    return model


def draft_coverage(job: Job) -> Coverage | None:
    """Return how much of what is trained on the head can draft; None where it drafts the whole vocabulary.

    Raises:
        RecipeInvalid, ConfigInvalid: the text holds too few distinct tokens for the draft vocabulary, or it is too
            small for the special ones.
    """
    if job.recipe.draft_vocab is None:
        return None
    vocab = read_target_config(job.target).vocab
    counts = job.text.ids[job.text.mask].bincount(minlength=vocab)
    return measure_coverage(counts, target_ids(_draft_map(job, job.recipe.draft_vocab, vocab)))


def _draft_map(job: Job, size: int, vocab: int) -> Tensor:
    """Return `d2t` as offsets, [size] int64: that of the head to go on from, or the text's most frequent tokens."""
    if job.start is not None:
        return read_slot(job.start, "d2t")
    return map_draft_vocab(job.text.ids[job.text.mask], size, vocab, job.specials)


def _take_over(model: EagleModel, head: Head) -> None:
    """Give a module the weights of a head in any layout."""
    own = model.eagle_module.state_dict()
    for name, row in stored(by_name("modelopt"), head.spec).items():
        if name in own:
            own[name].copy_(row.move.pack([read_slot(head, slot) for slot in row.slots]))


def leave(job: Job, trainer: EagleTrainer, work: Path, folder: Path) -> dict[str, Any]:
    """Write a trained head as ModelOpt exports it, its module, and what is known of the run; return the latter.

    Args:
        work: where the run's first look lies.
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
        "key": job_key(job),
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
    (folder / MODULE / REPORT).write_text(json.dumps(report, indent=2) + "\n")
    if find_spec("matplotlib"):
        draw_curves(folder / MODULE / CURVES, history, job.recipe.ttt_steps)
    return {key: value for key, value in report.items() if key != "looks"}


def job_key(job: Job) -> str:
    """Return 16 hex digits that name what a job makes on this installation."""
    files = sorted([job.target / "config.json", *job.target.glob("*.safetensors")])
    tensors = (job.text.ids, job.text.mask, job.unseen.ids, job.unseen.mask)
    parts = {
        "recipe": dataclasses.asdict(job.recipe),
        "source": SOURCE,
        "target": {file.name: file_digest(file) for file in files if file.exists()},
        "rows": [hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for tensor in tensors],
        "data": dict(job.data),
        "specials": job.specials,
        "start": {f.name: file_digest(f) for f in job.start.checkpoint.files} if job.start else None,
        "libraries": {name: version(name) for name in LIBRARIES},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def is_made(out: Path, key: str) -> bool:
    """Say whether a folder holds what a job of this key makes."""
    report = out / MODULE / REPORT
    return report.exists() and read_json(report).get("key") == key
