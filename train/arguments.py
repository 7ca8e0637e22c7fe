"""What transformers' Trainer is told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from transformers import TrainingArguments

from ..errors import RecipeInvalid
from .recipe import EagleRecipe

# The layer of each decoder that FSDP2 shards as one.
LAYERS = {"llama": "GqaLayer", "kimik2": "MlaLayer"}


@dataclass(frozen=True)
class Pace:
    """How a run is watched and kept; nothing in it changes the head that comes out.

    Attributes:
        save_every: steps between checkpoints.
        look_every: steps between looks at unseen text; the last step has one in any case.
        shard: spread parameters and optimizer over the processes (FSDP2) instead of copying them to each.
        tensorboard: write TensorBoard's event files.
    """

    save_every: int = 200
    look_every: int = 200
    shard: bool = False
    tensorboard: bool = False


def check_processes(batch: int, pace: Pace) -> None:
    """Raise RecipeInvalid where this process is one of those that cannot share a run.

    Args:
        batch: the recipe's, rows.
        pace: whether the head is to be spread over them.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if batch % world:
        raise RecipeInvalid(
            f"a batch of {batch} rows cannot be shared by {world} processes",
            fix="Make batch a multiple of the number of processes.",
        )
    if pace.shard and not can_shard():
        refuse_sharding()


def can_shard() -> bool:
    """Say whether accelerate shards here: on CPUs it goes on without a word, each process with a copy of its own.

    https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/state.py#L986-L1016
    """
    return torch.cuda.is_available() and "RANK" in os.environ


def refuse_sharding() -> NoReturn:
    """Raise what --shard is refused with."""
    raise RecipeInvalid(
        "a head can only be spread over processes on GPUs, under torchrun",
        fix="Leave --shard out: the processes then hold copies, and share the batches.",
    )


def make_arguments(recipe: EagleRecipe, work: Path, pace: Pace) -> TrainingArguments:
    """Return the Trainer's arguments.

    Args:
        recipe: the head's.
        work: folder of the checkpoints and logs.
        pace: how often.

    Raises:
        RecipeInvalid: the Trainer refuses a value.
    """
    cuda = torch.cuda.is_available()
    # No precision is given: it is `run_module`'s, so that a head that is spread has the loss of one that is not.
    sharding = {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"}
    try:
        arguments = TrainingArguments(
            output_dir=str(work),
            max_steps=recipe.steps,
            per_device_train_batch_size=1,  # of batches
            gradient_accumulation_steps=recipe.accumulate,
            lr_scheduler_type=recipe.schedule,
            warmup_steps=recipe.warmup,
            max_grad_norm=1.0,
            seed=recipe.seed,
            save_strategy="steps",
            save_steps=pace.save_every,
            save_total_limit=2,
            eval_strategy="steps",
            eval_steps=pace.look_every,
            logging_steps=max(1, min(10, recipe.steps // 20)),
            logging_nan_inf_filter=False,
            report_to=["tensorboard"] if pace.tensorboard else [],
            disable_tqdm=True,
            log_level="error",
            remove_unused_columns=False,
            # Batches are put together in this process, where pinning is one copy more, and fails on online states.
            dataloader_pin_memory=False,
            use_cpu=not cuda,
            ddp_backend="gloo" if "RANK" in os.environ and not cuda else None,
            ddp_find_unused_parameters=False,
            fsdp=pace.shard or None,  # pyright: ignore[reportArgumentType]
            fsdp_config=sharding | {"transformer_layer_cls_to_wrap": [LAYERS[recipe.decoder]]} if pace.shard else None,
        )
    except ValueError as fault:
        raise RecipeInvalid(
            f"transformers' Trainer refuses this recipe: {fault}", fix="Put the value right that it speaks of."
        ) from fault
    # One process trains on one GPU; on several the Trainer would fall back to DataParallel. torchrun is for those.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments
