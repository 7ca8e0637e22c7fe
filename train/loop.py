"""The training loop: transformers' Trainer over ModelOpt's Eagle model. What belongs here: what it does otherwise.

The Trainer brings devices, processes, FSDP2, accumulation, schedules, logs and checkpoints that go on where they
stopped (data position and random numbers included). What is not its own: the loss is ModelOpt's, a checkpoint holds
the head and not its frozen target, and a look at unseen text is kconv's own chain.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from ..checkpoint.bytes import write_safetensors
from ..checkpoint.header import read_header
from ..checkpoint.tensors import entry, read_tensor
from ..errors import RecipeInvalid, TrainingFailed
from ..head.spec import HeadSpec
from .feed import Batch, Feed
from .module import WEIGHTS, EagleModel
from .optimizer import make_optimizer
from .order import EpochOrder
from .recipe import EagleRecipe
from .watch import draft_head, head_state, look, whole_tensor

Progress = Callable[[int, int, float], None]
"""Called after each step with the steps done, the steps in all, and the step's loss in nats."""

LAYERS = ["GqaLayer", "MlaLayer"]
PREFIX = "eagle_module."


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


class EagleTrainer(Trainer):
    """Trains a head.

    Args:
        model: as `build_module` gives it.
        spec: what the head is.
        recipe: how it is trained.
        feeds: batches to train on, and batches to look at it on.
        work: folder of the checkpoints and logs.
        pace: how often.
        progress: called after each step.
    """

    def __init__(
        self,
        model: EagleModel,
        spec: HeadSpec,
        recipe: EagleRecipe,
        feeds: tuple[Feed, Feed],
        work: Path,
        pace: Pace,
        progress: Progress,
    ) -> None:
        self.recipe, self.spec, self.progress = recipe, spec, progress
        self.gathered: dict[str, Tensor] | None = None
        super().__init__(
            model=model,
            args=_arguments(recipe, work, pace),
            train_dataset=feeds[0],
            eval_dataset=feeds[1],
            data_collator=_only,
        )
        # It prints every log to stdout, which is for results.
        self.remove_callback(PrinterCallback)
        # ModelOpt's forward takes any keyword; it does not divide by the number of tokens it is told.
        self.model_accepts_loss_kwargs = False

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            trained: Any = self.accelerator.unwrap_model(self.model)
            self.optimizer = make_optimizer(trained.eagle_module, self.recipe)
        return self.optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochOrder:
        assert isinstance(self.train_dataset, Feed), "it is what __init__ was given"
        return EpochOrder(len(self.train_dataset), self.recipe.seed)

    def compute_loss(self, model: nn.Module, inputs: Batch, *_: Any, **__: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return ModelOpt's loss over the draft steps: soft cross-entropy to the target, decayed."""
        return model(**inputs).loss

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """Take one step's gradients, and stop where the loss is no number."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        value, step = loss.item(), self.state.global_step + 1
        if not math.isfinite(value):
            raise TrainingFailed(
                f"the head's loss is {value} at step {step} of {self.state.max_steps}",
                where=self.args.output_dir,
                fix="Lower the recipe's lr, and check that the target's own states are finite. The last checkpoint "
                "before this step is kept there; the same command goes on from it.",
            )
        self.progress(step, self.state.max_steps, value)
        return loss

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Look at unseen text, and log what was seen; every process takes part, and sees the same."""
        model: Any = self.accelerator.unwrap_model(self.model)
        self.gathered = self._gather()
        head = draft_head(self.gathered or head_state(model), model, self.spec)
        assert isinstance(self.eval_dataset, Feed), "it is what __init__ was given"
        figures = look(model, head, self.eval_dataset, self.recipe.ttt_steps)
        logged = {f"eval_{name}": value for name, value in figures.items()}
        self.log(logged)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, logged)
        return logged

    def whole(self, build: Callable[[], EagleModel]) -> EagleModel:
        """Return ModelOpt's model with the whole head in it, on the CPU; training is over then.

        Args:
            build: makes a model to put it into, where the trained one is spread over processes.
        """
        state = self.gathered
        if state is None:
            # What writes a head reads it on the CPU.
            return self.accelerator.unwrap_model(self.model).cpu().eval()  # pyright: ignore[reportReturnType]
        model = build()
        model.eagle_module.load_state_dict(state)
        return model.eval()

    def _gather(self) -> dict[str, Tensor] | None:
        """Return the whole head where it is spread over processes, else None."""
        state = head_state(self.accelerator.unwrap_model(self.model))
        if not any(isinstance(tensor, DTensor) for tensor in state.values()):
            return None
        # accelerate's get_state_dict gives it to the first process alone, and all of them look.
        return {name: whole_tensor(tensor) for name, tensor in state.items()}

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        state = _own(state_dict) if state_dict is not None else head_state(self.accelerator.unwrap_model(self.model))
        broken = [name for name, tensor in state.items() if not torch.isfinite(tensor).all()]
        if broken:
            raise TrainingFailed(
                f"{len(broken)} of the head's tensors hold NaN or Inf after step {self.state.global_step}",
                where=broken[0],
                fix="Lower the recipe's lr. The checkpoint before this one is kept.",
            )
        write_safetensors(folder / WEIGHTS, [entry(name, tensor.cpu()) for name, tensor in state.items()])

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        infos = read_header(Path(resume_from_checkpoint) / WEIGHTS)
        state: dict[str, Any] = {PREFIX + name: read_tensor(info) for name, info in infos.items()}
        options = StateDictOptions(full_state_dict=True, strict=False)
        trained: Any = model or self.model
        found = set_model_state_dict(trained, state, options=options)
        lost = [name for name in found.missing_keys if name.startswith(PREFIX)] + found.unexpected_keys
        if lost:
            raise TrainingFailed(
                f"the checkpoint is of another head: {lost[0]} is missing or unknown",
                where=resume_from_checkpoint,
                fix="Delete the folder it is in, and train again.",
            )


def _own(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a head's weights from the state of the whole model, under ModelOpt's own names."""
    return {name.removeprefix(PREFIX): tensor for name, tensor in state.items() if name.startswith(PREFIX)}


def _only(batches: list[Batch]) -> Batch:
    """Return the one batch that a feed gives at a time."""
    (batch,) = batches
    return batch


def _arguments(recipe: EagleRecipe, work: Path, pace: Pace) -> TrainingArguments:
    cuda = torch.cuda.is_available()
    if pace.shard and not (cuda and "RANK" in os.environ):
        # accelerate would go on without a word, each process with a copy of its own.
        raise RecipeInvalid(
            "a head can only be spread over processes on GPUs, under torchrun",
            fix="Leave --shard out: the processes then hold copies, and share the batches.",
        )
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
            bf16=recipe.compute == "BF16",
            ddp_backend="gloo" if "RANK" in os.environ and not cuda else None,
            ddp_find_unused_parameters=False,
            fsdp=pace.shard or None,  # pyright: ignore[reportArgumentType]
            fsdp_config=sharding | {"transformer_layer_cls_to_wrap": LAYERS} if pace.shard else None,
        )
    except ValueError as fault:
        raise RecipeInvalid(
            f"transformers' Trainer refuses this recipe: {fault}", fix="Put the value right that it speaks of."
        ) from fault
    # One process trains on one GPU; on several the Trainer would fall back to DataParallel. torchrun is for those.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments
