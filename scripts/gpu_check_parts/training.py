"""`kconv train`'s loop on the card, at Kimi-K2's head dims."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .bench import Bench, clear, part


class Synthetic:
    """States of no target: random, of a residual stream's size, the same for each batch, as `feed.StatesSource`."""

    ahead = False

    def __init__(self, rows: int, seq: int, hidden: int, layers: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.captured = torch.randn(rows, seq, layers * hidden, generator=generator).bfloat16()
        self.hidden = torch.randn(rows, seq, hidden, generator=generator).bfloat16()

    def read(self, rows: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.captured, self.hidden


def check_training(bench: Bench) -> dict[str, Any]:
    """`kconv train`'s loop at Kimi-K2's head dims (recipe eagle3-mla, bf16) on synthetic states that lie on the CPU."""
    tried = []
    for rows, seq in bench.size.batches:
        try:
            return train(bench, rows, seq) | {"too_large": tried}
        except torch.cuda.OutOfMemoryError:
            tried.append([rows, seq])
        # Outside of the handler, whose traceback holds the tensors.
        clear()
    raise RuntimeError(f"no batch fits: {tried} rows x tokens were tried")


def train(bench: Bench, rows: int, seq: int) -> dict[str, Any]:
    from kconv.checkpoint.tensors import TORCH
    from kconv.targets.config import parse_target_config
    from kconv.targets.model import build_target
    from kconv.train.data import Rows
    from kconv.train.feed import Feed
    from kconv.train.loop import DrafterTrainer
    from kconv.train.module import build_module
    from kconv.train.options import TrainOptions
    from kconv.train.plan import plan_training
    from kconv.train.recipe import complete, read_recipe_file

    config = parse_target_config(bench.size.config)
    values = read_recipe_file("eagle3-mla") | {"batch": rows, "seq": seq, "steps": bench.size.steps, "batches": 4}
    recipe = complete(values | {"warmup": 2}, config, 4 * rows)
    with torch.device(bench.device):
        target = build_target(replace(config, text=config.text | {"num_hidden_layers": 0}), TORCH[recipe.dtype])
    target.config.num_hidden_layers = config.layers
    model = build_module(target, recipe)
    states = Synthetic(rows, seq, config.hidden, len(recipe.captured))
    ids = torch.randint(0, config.vocab, (4 * rows, seq), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    dtype = TORCH[recipe.dtype]
    # Four documents in each row.
    documents = (torch.arange(seq, dtype=torch.int32) * 4 // seq).expand(4 * rows, -1)
    feeds = (
        Feed(Rows(ids, mask, documents), rows, states, dtype),
        Feed(Rows(ids[:rows], mask[:rows]), rows, states, dtype),
    )
    ends: list[float] = []
    losses: list[float] = []

    def progress(step: int, steps: int, loss: float) -> None:
        ends.append(time.perf_counter())
        losses.append(loss)

    with tempfile.TemporaryDirectory(prefix="gpu-check-") as work:
        options = TrainOptions(save_every=10**6, eval_every=10**6)
        trainer = DrafterTrainer(model, recipe.spec(config), recipe, feeds, Path(work), options, progress)
        trainer.train()
        checkpoint = part(lambda: keep(trainer, Path(work)))
    assert all(value == value for value in losses), "a loss is NaN"
    # The loop's callback comes once a step, after the loss was read back; the first steps warm up.
    step = statistics.median(later - before for before, later in itertools.pairwise(ends[3:]))
    trained = list(model.eagle_module.parameters())
    figures = {
        "rows": rows,
        "seq": seq,
        "draft_steps": recipe.draft_steps,
        "parameters": sum(p.numel() for p in trained),
        "on_the_device": all(p.device.type == bench.device.type for p in trained),
        "tokens_per_second": round(rows * seq / step),
        "seconds_per_step": round(step, 4),
        "loss": [round(losses[0], 3), round(losses[-1], 3)],
        "peak_gib": bench.peak(),
        # What `kconv train --dry-run` says of it.
        "planned_gib": round(sum(plan_training(recipe, config).memory.values()) / 2**30, 2),
    }
    figures["checkpoint"] = checkpoint
    figures["matrix_rate"] = part(lambda: matrix_rate(bench, trainer, feeds[0], step))
    figures["look"] = part(lambda: {k: round(v, 4) for k, v in trainer.evaluate().items()})
    return figures


def keep(trainer: Any, work: Path) -> dict[str, float]:
    """Return the seconds in which a checkpoint is written and read, and its size; what is read is what was there."""
    folder, model = work / "kept", trainer.accelerator.unwrap_model(trainer.model).eagle_module
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    begin = time.perf_counter()
    trainer.save_model(str(folder))
    trainer._save_optimizer_and_scheduler(str(folder))
    written = time.perf_counter()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.zero_()
    trainer._load_from_checkpoint(str(folder))
    trainer._load_optimizer_and_scheduler(str(folder))
    read = time.perf_counter()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()), "weights changed"
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {"write_s": round(written - begin, 2), "read_s": round(read - written, 2), "gb": round(size / 1e9, 2)}


def matrix_rate(bench: Bench, trainer: Any, feed: Any, step: float) -> dict[str, float]:
    """Return the matrix products of one step, counted as they are called, and their share of the card's rate."""
    from torch.utils.flop_counter import FlopCounterMode

    from kconv.train.module import run_eagle

    batch = trainer._prepare_inputs(feed[0])
    model = trainer.accelerator.unwrap_model(trainer.model)
    model.train()
    with FlopCounterMode(display=False) as counter:
        run_eagle(model, batch, trainer.recipe).loss.backward()
    model.zero_grad()
    count = counter.get_total_flops()
    return {"tflop_per_step": round(count / 1e12, 3), "share": round(count / step / bench.flops, 4)}
