"""Training a head: the loop, its figures, and the folder it ends in. What belongs here: `train_head`.

The folder holds model.safetensors and config.json, exactly as ModelOpt exports them, and `modelopt/`: the same
head as ModelOpt's own module (`module.save_module`), and training.json, which says how it was made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import get_scheduler

from ..checkpoint.bytes import file_digest
from ..checkpoint.folder import read_json
from ..checkpoint.staging import refuse_existing, staged
from ..checkpoint.tensors import TORCH
from ..errors import OutputExists, TrainingFailed
from ..target.model import load_target
from .batches import Batches, cut_windows, map_draft_vocab
from .module import EagleModel, build_module, export_module, reduce_vocab, save_module
from .recipe import EagleRecipe, check_recipe

Progress = Callable[[int, int, float], None]
"""Called after each step with the steps done, the steps in all, and the step's loss in nats."""

MODULE, REPORT = "modelopt", "training.json"
HELD_OUT_BATCHES = 8
# Raise it with each change to train/ that alters what a recipe makes.
SOURCE = "1"
LIBRARIES = ("torch", "transformers", "nvidia-modelopt")


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
        target_folder: a bf16, fp16 or fp32 target.
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
    check_recipe(recipe)
    key = head_key(target_folder, recipe, text, held_out)
    if _is_made(out, key):
        return out
    refuse_existing(out)
    windows = cut_windows(text, recipe.seq, recipe.batches * recipe.batch, recipe.seed)
    measured = cut_windows(held_out, recipe.seq, HELD_OUT_BATCHES * recipe.batch, recipe.seed)
    try:
        with staged(out) as folder:
            target = load_target(target_folder, TORCH[recipe.dtype])
            model = build_module(load_target(target_folder, TORCH[recipe.dtype]), recipe)
            if recipe.draft_vocab is not None:
                reduce_vocab(model, map_draft_vocab(text, recipe.draft_vocab, model.config.vocab_size))
            unseen = Batches(target, measured.split(recipe.batch), recipe.captured)
            before = measure(model, unseen)
            _train(model, Batches(target, windows.split(recipe.batch), recipe.captured), recipe, progress)
            after = measure(model, unseen)
            export_module(model, folder, recipe)
            (folder / MODULE).mkdir()
            save_module(model, folder / MODULE, recipe)
            report = {
                "key": key,
                "recipe": dataclasses.asdict(recipe),
                "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
                "tokens": {"text": windows.numel(), "held_out": measured.numel()},
                "untrained": before,
                "trained": after,
                "libraries": {name: version(name) for name in LIBRARIES},
            }
            (folder / MODULE / REPORT).write_text(json.dumps(report, indent=2) + "\n")
    except OutputExists:
        # Another process made the same head meanwhile, and its rename came first.
        if not _is_made(out, key):
            raise
    return out


def head_key(target_folder: Path, recipe: EagleRecipe, text: Tensor, held_out: Tensor) -> str:
    """Return 16 hex digits that name what a recipe makes of a target and a text on this installation."""
    files = sorted([target_folder / "config.json", *target_folder.glob("*.safetensors")])
    parts = {
        "recipe": dataclasses.asdict(recipe),
        "source": SOURCE,
        "target": {file.name: file_digest(file) for file in files if file.exists()},
        "texts": [hashlib.sha256(ids.numpy().tobytes()).hexdigest() for ids in (text, held_out)],
        "libraries": {name: version(name) for name in LIBRARIES},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


@torch.no_grad()
def measure(model: EagleModel, batches: Batches) -> dict[str, Any]:
    """Return a head's mean loss over batches, in nats, and how often each draft step's likeliest token is the target's.

    The loss is the one that is trained: the soft cross-entropy to the target, summed over the draft steps with
    the recipe's decay.
    """
    model.train()  # ModelOpt takes all draft steps only then
    outputs = [_forward(model, batches, index) for index in range(len(batches))]
    model.eval()
    loss = sum(output.loss.item() for output in outputs) / len(outputs)
    accuracy = torch.tensor([output.train_acc[0] for output in outputs]).mean(0)
    return {"loss": loss, "accuracy": accuracy.tolist()}


def _train(model: EagleModel, batches: Batches, recipe: EagleRecipe, progress: Progress) -> None:
    generator = torch.Generator().manual_seed(recipe.seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizers = _optimizers(model, recipe)
    schedules = [get_scheduler(recipe.schedule, o, recipe.warmup, recipe.steps) for o in optimizers]
    model.train()
    order: list[int] = []
    for step in range(recipe.steps):
        order = order or torch.randperm(len(batches), generator=generator).tolist()
        loss = _forward(model, batches, order.pop()).loss
        if not math.isfinite(loss.item()):
            raise TrainingFailed(
                f"the head's loss is {loss.item()} at step {step + 1} of {recipe.steps}",
                fix="Lower the recipe's lr, and check that the target's own logits are finite.",
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for part in (*optimizers, *schedules):
            part.step()
        model.zero_grad()
        progress(step + 1, recipe.steps, loss.item())
    model.eval()


def _optimizers(model: EagleModel, recipe: EagleRecipe) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices, and AdamW for what Muon is not meant for: gains, and an output matrix.

    In the few steps that a tiny head gets, Muon comes further: after 300 of a GQA head, sampled acceptance at K=3
    is 2.93 tokens, against 2.64 with AdamW (the best learning rate of each of five; one seed).
    """
    head = dict(model.eagle_module.named_parameters())
    matrices = [p for name, p in head.items() if p.ndim == 2 and name != "lm_head.weight"]
    rest = [p for name, p in head.items() if p.ndim == 1 or name == "lm_head.weight"]
    return [
        torch.optim.Muon(matrices, lr=recipe.lr, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=recipe.rest_lr, weight_decay=0.0),
    ]


def _forward(model: EagleModel, batches: Batches, index: int) -> Any:
    """Run ModelOpt's forward, the head over one batch: its `loss`, and `train_acc` of each draft step."""
    tokens, states = batches.get(index)
    return model(input_ids=tokens, base_model_outputs=states)


def _is_made(out: Path, key: str) -> bool:
    report = out / MODULE / REPORT
    return report.exists() and read_json(report).get("key") == key
