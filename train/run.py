"""Run a training from data to head, resuming where it stopped.

OUT holds the head in TensorRT-LLM's layout, i.e. ModelOpt's names with a config that states what was trained (or in
vLLM's, see `choose_layout`), with kconv's manifest. Its folder `modelopt/` holds the same head as ModelOpt's own
module, training.json, and the curves. The report in training.json has every evaluation but no prompt digests; the one
in the manifest has the digests but not every evaluation.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import DistError

from ..checkpoint.bytes import processors
from ..checkpoint.folder import Checkpoint, open_checkpoint, read_json
from ..checkpoint.manifest import Hints
from ..checkpoint.staging import refuse_existing, staged, writing
from ..checkpoint.tensors import TORCH
from ..convert.execute import fill
from ..convert.plan import Change, WriteOptions, plan, plan_in_place
from ..convert.provenance import read_provenance
from ..convert.read import Head, read_head, read_slot
from ..engines import by_name
from ..engines.layout import stored
from ..errors import CapturedUndecided, TrainingFailed
from ..installed import version
from ..targets.config import read_target_config
from ..targets.model import load_ends, load_target, one_thread
from .checkpoints import MODULE, REPORT, RUN, claim, clear_finished, drop_unusable, hold, newest, step_of, workplace
from .data import Rows, cut_windows
from .drafter_recipe import DrafterRecipe
from .evaluate import draw_curves
from .family import Model, family_of
from .feed import Feed, Online, Shared, StatesSource, online_states
from .job import (
    LIBRARIES,
    TrainJob,
    check_processes,
    check_target,
    choose_layout,
    draft_coverage,
    draft_map,
    job_key,
    job_parts,
    place,
)
from .loop import DrafterTrainer, Progress
from .module import export_module, reduce_vocab, save_module
from .options import DEFAULTS, TrainOptions
from .recipe import EagleRecipe, check_recipe

LOST = re.compile(r"closed by peer|reset by peer|Broken pipe|Connection refused")
# Enough for a curve; kconv validate measures the resulting head.
EVAL_BATCHES = 16


def train(job: TrainJob, out: Path, options: TrainOptions = DEFAULTS, progress: Progress = lambda *_: None) -> Path:
    """Train a head, or resume a stopped run.

    Under torchrun each process calls this with the same arguments; the first one writes. Until the run is done,
    checkpoints are in `.NAME.training` next to `out`.

    Raises:
        RecipeInvalid: the recipe is invalid, or does not fit the target, the data or the processes.
        LayoutCannot: no engine could load the head.
        ManifestMismatch: the manifest of the head to continue from does not match the schema.
        TrainingFailed: the loss is NaN or infinite, or ModelOpt fails to export the head.
        OutputExists: something exists at `out`, another run is using it, or next to it are checkpoints of another
            run, or of this one with another number of processes.
        OutputFailed: `out` is not writable, or the disk has no room for a checkpoint.
    """
    check_recipe(job.recipe)
    check_processes(job.recipe.batch, shard=options.shard)
    clear_finished(out)
    refuse_existing(out)
    layout = choose_layout(job.recipe, read_target_config(job.target))
    # Prompts that calibrated the initial head do not become unseen by training.
    converted = None
    if job.init_from:
        converted = read_provenance(job.init_from.checkpoint.folder).conversion(None, exact=False)
    with hold(out) as work:
        with _others_end():
            trainer = run(job, work, options, progress)
        if trainer.accelerator.is_main_process:
            with staged(out) as folder:
                export = work / "export"
                shutil.rmtree(export, ignore_errors=True)
                report = leave(job, trainer, work, export)
                head = _read_export(open_checkpoint(export, source=f"a training run of {job.target.name}"))
                if layout is None:
                    planned = plan_in_place(head, Change(head.spec))
                else:
                    planned = plan(head, layout, WriteOptions(dtype=job.recipe.compute or ""))
                fill(dataclasses.replace(planned, conversion=converted), folder, training=report)
                shutil.move(export / MODULE, folder / MODULE)
                if (work / "runs").exists():
                    shutil.move(work / "runs", folder / MODULE / "tensorboard")
            shutil.rmtree(work)
        trainer.accelerator.wait_for_everyone()
    return out


def _read_export(export: Checkpoint) -> Head:
    try:
        return read_head(export)
    except CapturedUndecided:
        # A list of the recipe that engines could take for inputs: recipes count outputs.
        return read_head(export, hints=Hints(captured_are="outputs"))


@contextmanager
def _others_end() -> Iterator[None]:
    """Say that another process ended, where torch only reports a closed connection."""
    try:
        yield
    except RuntimeError as fault:
        # Gloo's exceptions have no class of their own.
        if place()[1] == 1 or not (isinstance(fault, DistError) or LOST.search(str(fault))):
            raise
        raise TrainingFailed(
            "another process of this run ended",
            fix="Its own message says why. The same command resumes from the last checkpoint.",
        ) from fault


def run(job: TrainJob, work: Path, options: TrainOptions, progress: Progress) -> DrafterTrainer:
    """Train to the last step, from the newest earlier checkpoint in `work` if there is one."""
    recipe, (rank, world) = job.recipe, place()
    if not rank:
        check_target(job)
        with writing(work):
            parts = job_parts(job)
            claim(work, job_key(parts), parts, world)
    model = _start(job)
    spec = recipe.spec(read_target_config(job.target))
    states, unseen = job.states()
    batch, dtype = recipe.batch // world, TORCH[recipe.dtype]
    text = job.text.own(rank, world, batch)
    evaluated = job.unseen.own(rank, world)[: EVAL_BATCHES * batch]
    # There may be fewer evaluation rows than a batch has.
    shown = min(batch, len(evaluated))
    feeds = (
        Feed(job.text, batch, states, dtype, text),
        Feed(job.unseen, shown, unseen, dtype, evaluated),
    )
    trainer = DrafterTrainer(model, spec, recipe, feeds, work, options, progress)
    resume = newest(work, recipe.steps)
    trainer.accelerator.wait_for_everyone()
    if trainer.accelerator.is_main_process:
        drop_unusable(work, recipe.steps)
    trainer.accelerator.wait_for_everyone()
    if resume is None:
        untrained = trainer.evaluate() | {"step": 0}
        # Stored with the checkpoints, since training begins with an empty log.
        if trainer.accelerator.is_main_process:
            with writing(work):
                (work / UNTRAINED).write_text(json.dumps(untrained), encoding="utf-8")
    begin, before = time.monotonic(), step_of(resume) if resume else 0
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    tokens = (recipe.steps - before) * recipe.accumulate * recipe.batch * recipe.seq
    trainer.rate = tokens / (time.monotonic() - begin)
    if recipe.steps % options.eval_every:
        trainer.evaluate()
    return trainer


def _start(job: TrainJob) -> Model:
    model = _build(job)
    if job.init_from is not None:
        _take_over(model, job.recipe, job.init_from)
    elif job.recipe.draft_vocab is not None:
        reduce_vocab(model, draft_map(job, job.recipe.draft_vocab, model.config.vocab_size))
    return model


def _build(job: TrainJob) -> Model:
    return family_of(job.recipe).build(load_ends(job.own_ends, TORCH[job.recipe.dtype]), job.recipe)


def _take_over(model: Model, recipe: DrafterRecipe, head: Head) -> None:
    """Load the weights of a head in any layout into a module."""
    family = family_of(recipe)
    own = getattr(model, family.part).state_dict()
    for name, row in stored(by_name(family.exported(head.spec)), head.spec).items():
        if name in own:
            own[name].copy_(torch.cat([read_slot(head, slot) for slot in row.slots]))


CURVES, UNTRAINED = "curves.png", "untrained.json"


def leave(job: TrainJob, trainer: DrafterTrainer, work: Path, folder: Path) -> dict[str, Any]:
    """Write a trained head in ModelOpt's export, its module, and the report of the run; return the report."""
    model = trainer.whole(lambda: _build(job))
    folder.mkdir(parents=True, exist_ok=True)
    # What is not written in another layout is exported in the dtype of the result.
    export_module(
        model, folder, job.recipe, None if job.recipe.LAYOUTS else TORCH[job.recipe.compute or job.recipe.dtype]
    )
    (folder / MODULE).mkdir()
    save_module(model, folder / MODULE, job.recipe)
    vocab = read_target_config(job.target).vocab
    history = [read_json(work / UNTRAINED), *trainer.state.log_history]
    evaluations = [{k.removeprefix("eval_"): v for k, v in row.items()} for row in history if "eval_loss" in row]
    coverage = draft_coverage(job)
    facts = dict(job.data) | ({"prompts": job.prompts()} if job.prompts else {})
    report = {
        "key": read_json(work / RUN)["key"],
        "recipe": dataclasses.asdict(job.recipe),
        "data": facts,
        "started_from": job.init_from.checkpoint.source if job.init_from else None,
        "parameters": sum(p.numel() for p in getattr(model, family_of(job.recipe).part).parameters()),
        "tokens": {"text": job.text.size, "counted": int(job.text.count(vocab).sum()), "unseen": job.unseen.size},
        "draft_vocab": {"share": coverage.share, **dataclasses.asdict(coverage)} if coverage else None,
        "untrained": evaluations[0],
        "trained": evaluations[-1],
        "evaluations": evaluations,
        "libraries": {name: version(name) for name in LIBRARIES},
    }
    data = {name: value for name, value in facts.items() if name != "prompts"}
    # Speed is not part of the result, which is the same however often a run was stopped.
    told = report | {"data": data, "tokens_per_second": round(trainer.rate, 1)}
    (folder / MODULE / REPORT).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    if find_spec("matplotlib"):
        draw_curves(folder / MODULE / CURVES, history, job.recipe.draft_steps)
    return {key: value for key, value in report.items() if key != "evaluations"}


def is_made(out: Path, key: str) -> bool:
    """Return whether a folder holds the result of a job with this key."""
    report = out / MODULE / REPORT
    return report.exists() and read_json(report).get("key") == key


# A head from plain text, cached by the hash of its recipe.
#
# The folder holds model.safetensors and config.json, exactly as ModelOpt exports them, and `modelopt/`: the same
# head as ModelOpt's own module (`module.save_module`), and training.json, which records how it was made.

HELD_OUT_BATCHES = 8
# What a recipe says of the states that its head reads.
OF_THE_STATES = ("captured", "batches", "batch", "seq", "seed", "dtype")
STATES, MOST_TARGETS = ("captured", "hidden"), 4


def train_head(
    target_folder: Path,
    out: Path,
    recipe: EagleRecipe,
    text: Tensor,
    held_out: Tensor,
    progress: Progress = lambda *_: None,
    states: Path | None = None,
) -> Path:
    """Train an Eagle3 head for a target with ModelOpt, or find one made before in the same way.

    Args:
        out: the folder to create. If it holds a head of the same recipe, target, text and libraries, that is kept.
        text: token ids for training, documents in sequence: [N] int64.
        held_out: token ids of other documents, [M] int64, for measuring the head, never for training.
        states: what `share_states` wrote of the same target and texts; None to run the target here.

    Raises:
        RecipeInvalid: the recipe is invalid, or does not fit the target or the texts.
        TrainingFailed: the loss is NaN or infinite, or ModelOpt fails to export the head.
        TargetInvalid: the target cannot be loaded.
        OutputExists: something else exists at `out`.
        OutputFailed: `out` is not writable.
    """
    job = _job(target_folder, recipe, text, held_out, states)
    work = workplace(out)
    if is_made(out, job_key(job_parts(job))):
        return out
    refuse_existing(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Another process may be making the same head: wait for it, and then nothing is left to do.
    with FileLock(out.parent / f".{out.name}.lock"):
        if is_made(out, job_key(job_parts(job))):
            return out
        with one_thread(), staged(out) as folder:
            trainer = run(job, work, TrainOptions(save_every=recipe.steps, eval_every=recipe.steps), progress)
            leave(job, trainer, work, folder)
        shutil.rmtree(work)
    return out


def head_key(target_folder: Path, recipe: EagleRecipe, text: Tensor, held_out: Tensor) -> str:
    """Return 16 hex digits that identify the result of `train_head` with these arguments on this installation."""
    return job_key(job_parts(_job(target_folder, recipe, text, held_out)))


def share_states(target_folder: Path, file: Path, recipe: EagleRecipe, text: Tensor, held_out: Tensor) -> None:
    """Store the states that `train_head` would compute, for all heads whose recipes agree in `OF_THE_STATES`.

    Raises:
        RecipeInvalid, TargetInvalid: see `train_head`.
    """
    found: dict[str, Tensor] = {}
    # Each thread has a target of its own, as what captures is hooked into it.
    count = min(processors(), MOST_TARGETS)
    targets = [Online(load_target(target_folder, TORCH[recipe.dtype]), recipe.captured) for _ in range(count)]

    def run(ids: Tensor, target: Online, batches: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        return [target.read(batch, ids[batch]) for batch in batches]

    with one_thread(), ThreadPoolExecutor(len(targets)) as pool:
        for name, rows in zip(("text", "unseen"), _windows(recipe, text, held_out), strict=True):
            # In the batches that training reads, as a sum may come out otherwise in others.
            batches = torch.arange(len(rows.ids)).split(recipe.batch)
            size = -(-len(batches) // len(targets))
            shares = [batches[begin : begin + size] for begin in range(0, len(batches), size)]
            both = zip(*chain.from_iterable(pool.map(partial(run, rows.ids), targets, shares)), strict=True)
            found |= {f"{name}.{part}": torch.cat(states) for part, states in zip(STATES, both, strict=True)}
    save_file(found, file)


def _job(
    target_folder: Path, recipe: EagleRecipe, text: Tensor, held_out: Tensor, shared: Path | None = None
) -> TrainJob:
    def states() -> tuple[StatesSource, StatesSource]:
        if shared is not None:
            found = load_file(shared)
            read, looked_at = (Shared(*(found[f"{name}.{part}"] for part in STATES)) for name in ("text", "unseen"))
            return read, looked_at
        return online_states(load_target(target_folder, TORCH[recipe.dtype]), recipe)

    return TrainJob(target_folder, recipe, *_windows(recipe, text, held_out), states)


def _windows(recipe: EagleRecipe, text: Tensor, held_out: Tensor) -> tuple[Rows, Rows]:
    """Return the rows to train on, and those to measure on."""
    check_recipe(recipe)
    windows = cut_windows(text, recipe.seq, recipe.batches * recipe.batch, recipe.seed)
    measured = cut_windows(held_out, recipe.seq, HELD_OUT_BATCHES * recipe.batch, recipe.seed)
    own, unseen = (Rows(ids, torch.ones_like(ids, dtype=torch.bool)) for ids in (windows, measured))
    return own, unseen
