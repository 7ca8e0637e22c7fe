"""Heads that two processes train, with a copy each (DDP) or spread over both (FSDP2), on CPUs: run under torchrun.

accelerate spreads on accelerators alone, so their kind is pretended in the one place where it chooses by it. What it
then does is its own: fully_shard, the collectives, and what kconv gathers of them.
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/state.py#L986-L1016
"""

import dataclasses
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState

from kconv.drafters.spec import Gqa, Rope
from kconv.targets.model import load_target
from kconv.train import job as jobs
from kconv.train.data import Rows
from kconv.train.dflash_recipe import DSparkRecipe
from kconv.train.drafter_recipe import DrafterRecipe
from kconv.train.feed import online_states
from kconv.train.job import TrainJob
from kconv.train.loop import Progress
from kconv.train.options import TrainOptions
from kconv.train.recipe import TEST_GQA, TEST_MLA
from kconv.train.run import train

GQA = dataclasses.replace(TEST_GQA, batches=4, steps=12, batch=4, seq=24, warmup=2)
MLA = dataclasses.replace(TEST_MLA, batches=4, steps=12, batch=4, seq=24, warmup=2, draft_vocab=96)
BF16 = dataclasses.replace(GQA, optimizer="adamw", lr=3e-3, compute="BF16")
DSPARK = DSparkRecipe(
    attention=Gqa(4, kv_heads=2, head_dim=16), intermediate=64, captured=(1, 5), rope=Rope(50000.0), mask=511, block=4,
    anchors=12, batches=4, steps=12, batch=4, seq=24, warmup=2, markov_rank=8, optimizer="adamw", lr=0.01, rest_lr=0.01,
)  # fmt: skip
COPIED = TrainOptions(save_every=5, eval_every=6)
SPREAD = TrainOptions(save_every=5, eval_every=6, shard=True)
# Of each head: its recipe, how the processes share it up to step 7, and how behind it.
HEADS = {
    "copied": (GQA, COPIED, COPIED),
    "spread": (GQA, SPREAD, SPREAD),
    "copied mla": (MLA, COPIED, COPIED),
    "spread mla": (MLA, SPREAD, SPREAD),
    "copied bf16": (BF16, COPIED, COPIED),
    "spread bf16": (BF16, SPREAD, SPREAD),
    "copied dspark": (DSPARK, COPIED, COPIED),
    "spread dspark": (DSPARK, SPREAD, SPREAD),
    "copied dspark, stopped": (DSPARK, COPIED, COPIED),
    "spread dspark, stopped": (DSPARK, SPREAD, SPREAD),
    "copied, stopped": (GQA, COPIED, COPIED),
    "spread, stopped": (GQA, SPREAD, SPREAD),
    "copied, then spread": (GQA, COPIED, SPREAD),
}
STOPPED = tuple(name for name in HEADS if "," in name)

begin = AcceleratorState.__init__


def begin_spread(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
    """Let accelerate take the road of accelerators where it was asked to spread a head."""
    shared: dict[str, Any] = PartialState._shared_state
    kind = shared.get("distributed_type")
    if kwargs.get("fsdp_plugin") is not None and kind == DistributedType.MULTI_CPU:
        shared["distributed_type"] = DistributedType.MULTI_XPU
    begin(self, *args, **kwargs)
    if kind is not None:
        shared["distributed_type"] = kind


class Stopped(Exception):
    """A run that was stopped."""


def stop(done: int, _steps: int, _loss: float) -> None:
    if done == 7:
        raise Stopped


def make_job(target: Path, recipe: DrafterRecipe) -> TrainJob:
    ids = torch.randint(3, 512, (24, 24), generator=torch.Generator().manual_seed(0))
    text, unseen = (Rows(part, torch.ones_like(part, dtype=torch.bool)) for part in ids.split([16, 8]))
    return TrainJob(target, recipe, text, unseen, lambda: online_states(load_target(target, torch.float32), recipe))


def run(job: TrainJob, out: Path, pace: TrainOptions, progress: Progress = lambda *_: None) -> None:
    # What an earlier run of this process asked accelerate for.
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    train(job, out, pace, progress)


def main(target: Path, folder: Path) -> None:
    AcceleratorState.__init__ = begin_spread
    jobs.can_shard = lambda: True
    for name, (recipe, before, after) in HEADS.items():
        if name in STOPPED:
            with suppress(Stopped):
                run(make_job(target, recipe), folder / name, before, stop)
        run(make_job(target, recipe), folder / name, after)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
