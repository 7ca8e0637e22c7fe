"""The training loop: transformers' Trainer with ModelOpt's model of a drafter.

The Trainer provides devices, processes, FSDP2, accumulation, schedules, logs and checkpoints that resume exactly
(including data position and random state). Different here: the loss is ModelOpt's, a checkpoint holds only the head and
not its frozen target, and evaluation on held-out text uses kconv's own chain.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from ..drafters.base import Spec
from ..errors import RecipeInvalid, TrainingFailed
from .checkpoints import load_head, load_optimizer, write_head, write_optimizer, writing_checkpoint
from .drafter_recipe import DrafterRecipe
from .evaluate import draft_head, evaluate, head_state
from .family import Model, family_of
from .feed import Batch, Feed
from .job import refuse_sharding
from .optimizer import make_optimizer
from .options import TrainOptions

Progress = Callable[[int, int, float], None]
"""Called after each step with the steps done, the steps in total, and the step's loss in nats."""


class DrafterTrainer(Trainer):
    """Trains a head on the first of two feeds, and evaluates it on the second."""

    def __init__(
        self,
        model: Model,
        spec: Spec,
        recipe: DrafterRecipe,
        feeds: tuple[Feed, Feed],
        work: Path,
        options: TrainOptions,
        progress: Progress,
    ) -> None:
        self.recipe, self.spec, self.progress, self.feeds = recipe, spec, progress, feeds
        self.family = family_of(recipe)
        # From the last evaluation, and the loss of the current step.
        self.head: dict[str, Tensor] = {}
        self.step_loss = 0.0
        # Tokens per second of all processes, once training has finished.
        self.rate = 0.0
        super().__init__(
            model=model,
            args=make_arguments(recipe, work, options),
            train_dataset=feeds[0],
            eval_dataset=feeds[1],
            data_collator=_only,
        )
        if options.shard and not self.is_fsdp_enabled:
            refuse_sharding()
        # It would print every log to stdout, which is for results.
        self.remove_callback(PrinterCallback)
        # ModelOpt's forward accepts any keyword, but does not divide by the number of tokens passed to it.
        self.model_accepts_loss_kwargs = False

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            trained: Any = self.accelerator.unwrap_model(self.model)
            self.optimizer = make_optimizer(getattr(trained, self.family.part), self.recipe)
        return self.optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochOrder:
        return EpochOrder(
            len(self.feeds[0]),
            self.recipe.seed,
            lambda: int(self.state.epoch or 0),
            self.feeds[0].follow,
            self.accelerator.num_processes,
        )

    def compute_loss(self, model: nn.Module, inputs: Batch, *_: Any, **__: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return ModelOpt's loss over the draft steps."""
        return self.family.run(model, inputs, self.recipe).loss

    def floating_point_ops(self, inputs: Any) -> int:
        """Count nothing: the Trainer walks the model in every step, counting the frozen target too."""
        return 0

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """Compute the gradients of one batch, and stop if the loss is NaN or infinite."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        value, step = loss.item(), self.state.global_step + 1
        if not math.isfinite(value):
            raise TrainingFailed(
                f"the head's loss is {value} at step {step} of {self.state.max_steps}",
                where=self.args.output_dir,
                fix="Lower the recipe's lr, and check that the target's states are finite. The same command resumes "
                "from the last checkpoint before this step.",
            )
        # Each of the batches that form a step (accumulate) adds its share.
        self.step_loss += value
        if self.accelerator.sync_gradients:
            self.progress(step, self.state.max_steps, self.step_loss)
            self.step_loss = 0.0
        return loss

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Measure the head on held-out text, each process on its own rows, and log and return the figures of all."""
        model: Any = self.accelerator.unwrap_model(self.model)
        self.head = head_state(model, self.family)
        head = draft_head(self.head, model, self.spec, self.family)
        figures = evaluate(model, head, self.feeds[1], self.recipe, gather_object)
        logged = {f"eval_{name}": value for name, value in figures.items()}
        self.log(logged)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, logged)
        return logged

    def whole(self, build: Callable[[], Model]) -> Model:
        """Return ModelOpt's model with the whole head, on the CPU: a new one if the trained one is distributed.

        Training is over then.
        """
        if not self.is_fsdp_enabled:
            # Heads are written from the CPU.
            return self.accelerator.unwrap_model(self.model).cpu().eval()  # pyright: ignore[reportReturnType]
        model = build()
        getattr(model, self.family.part).load_state_dict(self.head)
        return model.eval()

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with writing_checkpoint(Path(str(self.args.output_dir))):
            super()._save_checkpoint(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the head into a checkpoint."""
        folder = Path(output_dir or str(self.args.output_dir))
        write_head(self._trained()[0], self.family.part, folder, self.state.global_step)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_head(model or self._trained()[0], self.family.part, Path(resume_from_checkpoint))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        write_optimizer(*self._trained(), Path(output_dir), first=self.args.should_save)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_optimizer(*self._trained(), Path(checkpoint))

    def _trained(self) -> tuple[Any, Any, Any]:
        """Return model, optimizer and schedule; the Trainer has them from its first step."""
        return self.model, self.optimizer, self.lr_scheduler


def _only(batches: list[Batch]) -> Batch:
    """Return the single batch that a feed yields at a time."""
    (batch,) = batches
    return batch


class EpochOrder(Sampler[int]):
    """Every batch once per pass, in an order that depends only on the seed and the pass.

    So the order survives a restart, and is the same on each of several processes, which have their own batches. The
    pass is queried: accelerate would report it, but not to a sampler behind the batches that a resumed run of several
    processes skips
    (https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/data_loader.py#L622-L640).

    Args:
        epoch: returns the pass that begins, from 0.
        begin: called with the order of a pass that begins.
        processes: number of processes that take turns, as accelerate has it; each batch is yielded once for each of
            them.
    """

    def __init__(
        self,
        length: int,
        seed: int,
        epoch: Callable[[], int],
        begin: Callable[[list[int]], None] = lambda _: None,
        processes: int = 1,
    ) -> None:
        self._length, self._seed, self._epoch, self._begin = length, seed, epoch, begin
        self._processes = processes

    def __len__(self) -> int:
        return self._length * self._processes

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed)
        orders = [torch.randperm(self._length, generator=generator) for _ in range(self._epoch() + 1)]
        # Backwards, and drawn one after the other, like the loop before this one, which made the recorded heads and
        # figures.
        # Another order would change the head of every recipe with more than one pass.
        order = orders[-1].flip(0).tolist()
        self._begin(order)
        yield from (batch for batch in order for _ in range(self._processes))


# Seconds that processes wait for the first one while it hashes, evaluates and writes.
PATIENCE = 6 * 3600


def make_arguments(recipe: DrafterRecipe, work: Path, options: TrainOptions) -> TrainingArguments:
    cuda = torch.cuda.is_available()
    # No precision here: `run_module` sets it, so that a distributed head has the same loss as an undistributed one.
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
            save_steps=options.save_every,
            save_total_limit=2,
            eval_strategy="steps",
            eval_steps=options.eval_every,
            logging_steps=max(1, min(10, recipe.steps // 20)),
            logging_nan_inf_filter=False,
            report_to=["tensorboard"] if options.tensorboard else [],
            disable_tqdm=True,
            log_level="error",
            remove_unused_columns=False,
            # Batches are assembled in this process, where pinning costs one more copy, and fails for online states.
            dataloader_pin_memory=False,
            use_cpu=not cuda,
            ddp_backend="gloo" if "RANK" in os.environ and not cuda else None,
            ddp_find_unused_parameters=False,
            ddp_timeout=PATIENCE,
            fsdp=options.shard or None,  # pyright: ignore[reportArgumentType]
            fsdp_config=sharding | {"transformer_layer_cls_to_wrap": [family_of(recipe).layer(recipe)]}
            if options.shard
            else None,
        )
    except ValueError as fault:
        raise RecipeInvalid(
            f"transformers' Trainer refuses this recipe: {fault}", fix="Correct the value that the message names."
        ) from fault
    # One process trains on one GPU; with several the Trainer would use DataParallel. Use torchrun for several GPUs.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments
