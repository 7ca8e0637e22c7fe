"""Compare training with kconv with a plain loop over ModelOpt's convert and forward, in pairs, in one run.

Both train the same head on the same batches with the same adapter, optimizer, dtype and threads. The plain loop runs
the target in each step, as ModelOpt's own online mode does; kconv keeps its states for the next pass, and uses
transformers' Trainer. Only steps are timed: no startup, no checkpoint, no evaluation.

    .venv/bin/python scripts/bench train [--pairs 3] [--markdown]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from bench_parts.machine import Spent
from bench_parts.page import closing, read_section, spread, write_section
from transformers import get_scheduler

from kconv.checkpoint.tensors import TORCH
from kconv.drafters.spec import Mla
from kconv.targets.config import read_target_config
from kconv.targets.forward import run_target
from kconv.targets.model import load_target
from kconv.tiny.recipe import DEMO, cache_root
from kconv.tiny.target import make_target
from kconv.train.feed import Feed, online_states
from kconv.train.loop import DrafterTrainer
from kconv.train.module import build_module, offline_inputs
from kconv.train.optimizer import make_optimizer
from kconv.train.options import TrainOptions
from kconv.train.recipe import TINY_GQA, TINY_MLA, EagleRecipe

# Kimi-K2's attention over a narrow stream and a small vocabulary, so that a CPU holds it, as its recipe trains it but
# for the length of a row, which is 4,096 there.
WIDE = dataclasses.replace(
    TINY_MLA, attention=Mla(64, 1536, 512, 128, 64, 128), intermediate=1344, optimizer="adamw", lr=1e-4, rest_lr=1e-4,
    batch=1, seq=512, kernel="sdpa",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Bed:
    """A head, how often its data is passed through, how many steps are taken, and how many are not counted."""

    recipe: EagleRecipe
    passes: tuple[int, ...] = (1, 4)
    steps: int = 64
    first: int = 4


HEADS = {
    "MLA": Bed(TINY_MLA),
    "GQA": Bed(TINY_GQA),
    "Kimi-K2's attention, 512 tokens": Bed(WIDE, (1,), 5, 1),
    "Kimi-K2's attention, 1,024 tokens": Bed(dataclasses.replace(WIDE, seq=1024), (1,), 3, 1),
}
ROWS = tuple(f"| {name} |" for name in HEADS)


class Enough(Exception):
    """The steps that are counted are done."""


class Clock:
    """Takes the time from one step's gradients to another's, as `Progress` tells them, and ends the run there.

    So what begins and ends a run, or comes once in hundreds of steps, is left out on both sides.
    """

    def __init__(self, bed: Bed) -> None:
        self.bed, self.stamps = bed, list[Spent]()

    def __call__(self, done: int, steps: int, loss: float) -> None:
        self.stamps.append(Spent(time.perf_counter(), time.process_time()))
        if done == self.bed.steps:
            raise Enough

    def read(self) -> Spent:
        """Return what the steps behind the first ones spent."""
        return self.stamps[-1] - self.stamps[self.bed.first - 1]


def run_plain(target: Path, recipe: EagleRecipe, ids: torch.Tensor, clock: Clock) -> Spent:
    """Return what a plain loop spends, by ModelOpt's own forward."""
    recipe = dataclasses.replace(recipe, kernel="eager")
    base = load_target(target, TORCH[recipe.dtype])
    model = build_module(load_target(target, TORCH[recipe.dtype]), recipe)
    optimizer = make_optimizer(model.eagle_module, recipe)
    schedule = get_scheduler(recipe.schedule, optimizer, recipe.warmup, recipe.steps)
    parameters = list(model.eagle_module.parameters())
    model.train()
    with suppress(Enough):
        for step in range(recipe.steps):
            tokens = ids.view(-1, recipe.batch, recipe.seq)[step % recipe.batches]
            states = run_target(base, tokens, recipe.captured)
            loss = model(input_ids=tokens, base_model_outputs=offline_inputs(states)).loss
            loss.backward()
            clock(step + 1, recipe.steps, loss.item())
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            model.zero_grad()
    return clock.read()


def run_kconv(target: Path, recipe: EagleRecipe, ids: torch.Tensor, clock: Clock) -> Spent:
    """Return what kconv spends."""
    base = load_target(target, TORCH[recipe.dtype])
    model = build_module(load_target(target, TORCH[recipe.dtype]), recipe)
    mask = torch.ones_like(ids, dtype=torch.bool)
    feed = Feed(ids, mask, recipe.batch, online_states(base, recipe)[0])
    spec = recipe.spec(read_target_config(target))
    with tempfile.TemporaryDirectory() as work, suppress(Enough):
        DrafterTrainer(model, spec, recipe, (feed, feed), Path(work), TrainOptions(), clock).train()
    return clock.read()


def measure(target: Path, bed: Bed, passes: int, pairs: int) -> str:
    """Return the cells of one row."""
    short = dataclasses.replace(bed.recipe, batches=bed.steps // passes, steps=bed.steps)
    ids = torch.randint(3, 512, (short.batches * short.batch, short.seq), generator=torch.Generator().manual_seed(0))
    sides = {"plain": run_plain, "kconv": run_kconv}
    found: list[dict[str, Spent]] = []
    for pair in range(pairs):
        # In turn, so that a machine that gets busy does not only hit one side.
        order = list(sides) if pair % 2 else list(sides)[::-1]
        found.append({name: sides[name](target, short, ids, Clock(bed)) for name in order})
    rate = (bed.steps - bed.first) * short.batch * short.seq / statistics.median(spent["kconv"].wall for spent in found)
    wall = [spent["plain"].wall / spent["kconv"].wall for spent in found]
    processor = [spent["plain"].processor / spent["kconv"].processor for spent in found]
    return f"{rate:,.0f} | {spread(wall)} | **{statistics.median(processor):.2f}**"


def main() -> None:
    """Print the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--only", choices=HEADS, help="measure one head; the page keeps its rows of the other")
    parser.add_argument("--markdown", action="store_true", help="write the table into docs/evidence/benchmarks.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    target = make_target(DEMO, cache_root())
    rows: list[str] = []
    for name in [arguments.only] if arguments.only else HEADS:
        for passes in HEADS[name].passes:
            rows.append(f"| {name} | {passes} | {measure(target, HEADS[name], passes, arguments.pairs)} |")
            print(rows[-1], flush=True)
    if arguments.markdown:
        write(rows)


def write(rows: list[str]) -> None:
    """Put the table into docs/evidence/benchmarks.md; a head that was not measured keeps its rows."""
    measured = {row.split(" | ")[0] for row in rows}
    before = (row for row in read_section("train").splitlines() if row.startswith(ROWS))
    kept = [row for row in before if row.split(" | ")[0] not in measured]
    write_section(
        "train",
        [
            "## `kconv train` against a plain loop over ModelOpt",
            "",
            "The demo's heads, 64 steps of 4 x 96 tokens; and Kimi-K2's attention (64 heads), 5 steps of 512 tokens "
            "or 3 of 1,024 with `kernel: sdpa`. One thread, fp32; the ratio is kconv's tokens per second over the "
            "loop's. In four passes kconv runs the target once and keeps its states.",
            "",
            "| head | passes | kconv, tokens/s | ratio, median of pairs | of processor time |",
            "|---|---|---|---|---|",
            *sorted([*kept, *rows], reverse=True, key=lambda row: row.split(" | ")[0]),
            "",
            closing("bench train"),
        ],
    )


if __name__ == "__main__":
    main()
