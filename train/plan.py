"""Estimate what a training run takes: steps, memory per process, disk, hours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, ClassVar

from ..drafters.slots import needs
from ..lines import Part, Result, Table, duration
from ..targets.config import TargetConfig
from .drafter_recipe import WIDTHS, DrafterRecipe, Sizes

# The frozen parts of a target that a head shares, and slots that follow from others.
NOT_TRAINED = ("embed_tokens", "d2t", "t2d")
# Checkpoints on disk at once: the two that are kept, and the one being written.
CHECKPOINTS = 3


@dataclass(frozen=True, repr=False)
class TrainPlan(Result):
    """The estimate of a run.

    Attributes:
        parameters: trained parameters.
        tokens: that go through the head, including padding.
        memory: bytes per process by purpose; empty if not estimated.
        states: bytes of the target's states for the text, in its own dtype.
        checkpoints: bytes of the checkpoints next to the output.
        output: bytes of the output.
        hours: None without a rate.
        nodes: for each of several nodes, the files of stored states that its processes read.
    """

    FOLDS: ClassVar[bool] = True

    parameters: int
    steps: int
    tokens: int
    processes: int
    memory: Mapping[str, int]
    states: int
    checkpoints: int
    output: int
    hours: float | None
    nodes: tuple[tuple[str, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> Iterator[Part]:
        each = "".join(f"\n- {what}: {size / 1e9:,.3f} GB" for what, size in self.memory.items())
        facts = {
            "parameters": f"{self.parameters:,}",
            "steps": f"{self.steps:,} of {self.tokens // self.steps:,} tokens on {self.processes} processes",
            "states": f"{self.states / 1e9:,.3f} GB of the text's",
            "checkpoints": f"{self.checkpoints / 1e9:,.3f} GB",
            "output": f"{self.output / 1e9:,.3f} GB",
            "memory": f"{sum(self.memory.values()) / 1e9:,.3f} GB of each process{each}"
            if self.memory
            else "not estimated: with kernel eager it grows with the square of a row's tokens",
        }
        if self.nodes:
            counts = ", ".join(str(len(files)) for files in self.nodes)
            facts["files"] = f"{counts} on each node; --json lists them"
        facts["time"] = "unknown: pass --rate" if self.hours is None else f"about {duration(self.hours * 3600)}"
        yield Table((), list(facts.items()))
        yield "nothing was trained; remove --dry-run to train"


def plan_training(
    recipe: DrafterRecipe,
    config: TargetConfig,
    *,
    processes: int = 1,
    shard: bool = False,
    text: int | None = None,
    rate: float | None = None,
) -> TrainPlan:
    """Estimate what a run takes.

    Args:
        shard: whether head, optimizer and the target's ends are distributed over them.
        text: tokens of the text; by default as many as fit into the recipe's rows.
        rate: tokens per second of all processes together.
    """
    spec = recipe.spec(config)
    own = needs(spec)
    shared = NOT_TRAINED + (() if recipe.draft_vocab else ("lm_head",))
    # The target's output matrix is also written into the resulting head.
    lent = config.vocab * config.hidden if recipe.exports_lm_head else 0
    written = WIDTHS[recipe.compute or recipe.dtype]
    trained = sum(prod(need.shape) for name, need in own.items() if name not in shared)
    width = WIDTHS[recipe.dtype]
    kept = [(prod(need.shape), len(need.shape)) for name, need in own.items() if name not in shared]
    # AdamW keeps two numbers per weight, Muon one per weight of a matrix.
    moments = sum(count * (1 if recipe.optimizer == "muon" and dims == 2 else 2) for count, dims in kept) * width
    tokens = recipe.steps * recipe.accumulate * recipe.batch * recipe.seq
    rows = recipe.batches * recipe.batch * recipe.seq
    stored = WIDTHS[config.dtype or "BF16"] * config.hidden * (len(recipe.captured) + 1)
    sizes = recipe.sizes(config, recipe.batch // processes)
    memory = {} if sizes is None else _memory(recipe, config, sizes, trained, moments, processes, shard)
    return TrainPlan(
        parameters=trained,
        steps=recipe.steps,
        tokens=tokens,
        processes=processes,
        memory=memory,
        states=stored * (rows if text is None else text),
        checkpoints=CHECKPOINTS * (trained * width + moments),
        # As exported, and as ModelOpt's own module.
        output=(trained + lent) * written + trained * width,
        hours=tokens / rate / 3600 if rate else None,
    )


def _memory(
    recipe: DrafterRecipe,
    config: TargetConfig,
    sizes: Sizes,
    trained: int,
    moments: int,
    processes: int,
    shard: bool,
) -> dict[str, int]:
    width, parts = WIDTHS[recipe.dtype], processes if shard else 1
    tokens = recipe.batch // processes * recipe.seq
    ends = 2 * config.vocab * config.hidden * width
    # Under autocast each matrix also exists in bf16, until the step's gradients are computed.
    copies = trained * 2 if recipe.compute else 0
    given = tokens * config.hidden * (len(recipe.captured) + 1) * width
    # The rows that the loss is computed with are copied, in what it is computed in.
    rows = (recipe.draft_vocab or config.vocab) if recipe.compute or recipe.draft_vocab else 0
    copied = rows * config.hidden * WIDTHS[recipe.compute or recipe.dtype]
    return {
        "weights": trained * width // parts,
        "bf16 copies of weights": copies,
        "gradients": trained * width // parts,
        "optimizer": moments // parts,
        "the target's ends": ends // parts + copied,
        "states of the batch": given,
        "activations": sizes.kept,
        "at once": sizes.once,
        "more at an evaluation": max(0, sizes.evaluation - sizes.kept - sizes.once),
    }
