"""The training loop: transformers' Trainer over ModelOpt's Eagle model.

The Trainer brings devices, processes, FSDP2, accumulation, schedules, logs and checkpoints that go on where they
stopped (data position and random numbers included). What is not its own: the loss is ModelOpt's, a checkpoint holds
the head and not its frozen target, and a look at unseen text is kconv's own chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_callback import PrinterCallback

from ..errors import TrainingFailed
from ..head.spec import HeadSpec
from .arguments import Pace, make_arguments, refuse_sharding
from .checkpoints import load_head, load_optimizer, write_head, write_optimizer
from .feed import Batch, Feed
from .module import EagleModel, run_eagle
from .optimizer import make_optimizer
from .order import EpochOrder
from .recipe import EagleRecipe
from .watch import draft_head, head_state, look

Progress = Callable[[int, int, float], None]
"""Called after each step with the steps done, the steps in all, and the step's loss in nats."""


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
        # As the last look found it, and the loss of the step that is being taken.
        self.head: dict[str, Tensor] = {}
        self.step_loss = 0.0
        super().__init__(
            model=model,
            args=make_arguments(recipe, work, pace),
            train_dataset=feeds[0],
            eval_dataset=feeds[1],
            data_collator=_only,
        )
        if pace.shard and not self.is_fsdp_enabled:
            refuse_sharding()
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
        return EpochOrder(len(self.train_dataset), self.recipe.seed, lambda: int(self.state.epoch or 0))

    def compute_loss(self, model: nn.Module, inputs: Batch, *_: Any, **__: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return ModelOpt's loss over the draft steps: soft cross-entropy to the target, decayed."""
        return run_eagle(model, inputs, self.recipe).loss

    def floating_point_ops(self, inputs: Any) -> int:
        """Count none: the Trainer walks the model in every step to count the frozen target, and the head once for K."""
        return 0

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """Take the gradients of one batch, and stop where the loss is no number."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        value, step = loss.item(), self.state.global_step + 1
        if not math.isfinite(value):
            raise TrainingFailed(
                f"the head's loss is {value} at step {step} of {self.state.max_steps}",
                where=self.args.output_dir,
                fix="Lower the recipe's lr, and check that the target's own states are finite. The last checkpoint "
                "before this step is kept there; the same command goes on from it.",
            )
        # Of the batches that make a step (accumulate), each brings its share.
        self.step_loss += value
        if self.accelerator.sync_gradients:
            self.progress(step, self.state.max_steps, self.step_loss)
            self.step_loss = 0.0
        return loss

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Look at unseen text, and log what was seen; every process takes part, and sees the same."""
        model: Any = self.accelerator.unwrap_model(self.model)
        self.head = head_state(model)
        head = draft_head(self.head, model, self.spec)
        assert isinstance(self.eval_dataset, Feed), "it is what __init__ was given"
        figures = look(model, head, self.eval_dataset, self.recipe)
        logged = {f"eval_{name}": value for name, value in figures.items()}
        self.log(logged)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, logged)
        return logged

    def whole(self, build: Callable[[], EagleModel]) -> EagleModel:
        """Return ModelOpt's model with the whole head in it, on the CPU; training is over then.

        Args:
            build: makes a model to put it into, where the trained one is spread over processes.
        """
        if not self.is_fsdp_enabled:
            # What writes a head reads it on the CPU.
            return self.accelerator.unwrap_model(self.model).cpu().eval()  # pyright: ignore[reportReturnType]
        model = build()
        model.eagle_module.load_state_dict(self.head)
        return model.eval()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the head of a checkpoint."""
        state = head_state(self.accelerator.unwrap_model(self.model))
        if self.args.should_save:
            write_head(state, Path(output_dir or str(self.args.output_dir)), self.state.global_step)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_head(model or self._trained()[0], Path(resume_from_checkpoint))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        write_optimizer(*self._trained(), Path(output_dir), first=self.args.should_save)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_optimizer(*self._trained(), Path(checkpoint))

    def _trained(self) -> tuple[Any, Any, Any]:
        """Return model, optimizer and schedule; the Trainer has them from its first step on."""
        return self.model, self.optimizer, self.lr_scheduler


def _only(batches: list[Batch]) -> Batch:
    """Return the one batch that a feed gives at a time."""
    (batch,) = batches
    return batch
