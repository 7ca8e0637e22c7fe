"""Healing: a few steps of gradient descent towards the original head.

The converted head drafts K steps on the calibration's text, on hidden states of its own, and is drawn to what the
original drafts there (`distance`). The target has no part in it: the head is to stay the one that was trained.

Steps of one size in every entry, as Adam's are, add up along the directions that all tokens share, and undo a good
start within fifty. So matrices move by Muon, whose steps have one size in every direction, and in coordinates where
their inputs are white (`white`). Each tensor's learning rate is relative to the size of what it gives, so that the
gauge of a latent, which is arbitrary, does not decide how fast it moves; and it is less for a start that is nearer.

What comes out is the nearer of the two, start or healed, on texts that healing did not see: those that ridges and
ladders were chosen on, and no gradient came from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import TrainingFailed
from ...head.forward import DraftHead
from .calibration import Batch, Calibration
from .distance import distance_by_piece
from .swap import GQA_SLOTS, MLA_SLOTS
from .white import from_white, measure_spread, to_white

RATE = 0.04
"""Peak learning rate, relative to the size of what a tensor gives, for a start at a distance of 1: what is off by e
costs about e^2 nats, so the rate goes with the square root of the distance (docs/attention.md has what it gives).
"""
MOMENTUM = 0.9
BETAS = (0.9, 0.95)
WARMUP = 0.05

# The latent of the queries stays as it was fitted: its gauge may have made entries hundreds of times smaller than
# others (`latent`), and a step of one size in all of them is then large in the queries.
FITTED = ("0.q_a_proj", "0.q_a_layernorm")
ATTENTION = tuple(slot for slot in (*GQA_SLOTS, *MLA_SLOTS) if slot not in FITTED)
REST = (
    "fc", "input_norm", "norm",
    *(f"0.{name}" for name in (
        "input_layernorm", "hidden_norm", "post_attention_layernorm", "gate_proj", "up_proj", "down_proj",
    )),
)  # fmt: skip
"""What is healed beside the attention. The embedding and lm_head are not: they are the target's, or as large."""

Progress = Callable[[int, int, float], None]
"""Called after each step with the steps done, the steps in all, and the step's loss."""


def heal(
    original: DraftHead,
    converted: DraftHead,
    calibration: Calibration,
    steps: int,
    *,
    slots: Sequence[str] = (*ATTENTION, *REST),
    rate: float = RATE,
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> DraftHead:
    """Return a converted head after some steps towards the original, or the very head where they led away from it.

    Args:
        original: the head before its conversion.
        converted: the same head with another attention.
        calibration: its fitted part is trained on, one batch a step, in a new order with each pass.
        steps: how many.
        slots: what is trained, where the head has it.
        rate: peak learning rate, as `RATE`.
        seed: of the order.
        progress: told after each step.

    Raises:
        TrainingFailed: the loss is no longer a number.
    """
    if steps == 0:
        return converted
    before = _mean_distance(original, converted, calibration)
    healed = _descend(original, converted, calibration, steps, slots, rate * before**0.5, seed, progress)
    return healed if _mean_distance(original, healed, calibration) < before else converted


@torch.no_grad()
def _mean_distance(original: DraftHead, head: DraftHead, calibration: Calibration) -> float:
    found = [
        sum(float(part) for part in distance_by_piece(original, head, batch)) for batch in calibration.part("choose")
    ]
    return sum(found) / len(found)


def _descend(
    original: DraftHead,
    converted: DraftHead,
    calibration: Calibration,
    steps: int,
    slots: Sequence[str],
    rate: float,
    seed: int,
    progress: Progress,
) -> DraftHead:
    names = [name for name in converted.weights if name in slots or (name.startswith("fc_norm") and "fc" in slots)]
    start = {name: converted.weights[name].detach() for name in names}
    names = [name for name, weight in start.items() if weight.ndim == 2]
    spread = measure_spread(converted, names, calibration.part("fit"))
    trained = {name: to_white(w, spread[name]) if name in spread else w.clone() for name, w in start.items()}
    for weight in trained.values():
        weight.requires_grad_()

    def assemble() -> DraftHead:
        now = {name: from_white(w, spread[name]) if name in spread else w for name, w in trained.items()}
        return DraftHead(converted.spec, {**converted.weights, **now})

    matrices = [{"params": [trained[name]], "lr": rate * spread[name].size} for name in spread]
    gains = [{"params": [w], "lr": rate * _size(w)} for name, w in trained.items() if name not in spread]
    optimizers = _optimizers(matrices, gains)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: _share(step, steps)) for one in optimizers]
    generator = torch.Generator().manual_seed(seed)
    mine, order = calibration.indices("fit"), list[int]()
    for step in range(steps):
        order = order or torch.randperm(len(mine), generator=generator).tolist()
        loss = _take_gradient(original, assemble(), calibration.batch(mine[order.pop()]), list(trained))
        if not math.isfinite(loss):
            raise TrainingFailed(
                f"healing broke off: the loss is {loss} at step {step + 1} of {steps}",
                fix="Heal for fewer steps, or give more text.",
            )
        for one in (*optimizers, *schedules):
            one.step()
        for one in optimizers:
            one.zero_grad()
        progress(step + 1, steps, loss)
    return DraftHead(converted.spec, {name: weight.detach() for name, weight in assemble().weights.items()})


def _take_gradient(original: DraftHead, student: DraftHead, batch: Batch, names: Sequence[str]) -> float:
    """Add up the distance's gradient piece by piece, take it back to what the student is made of, and return the loss.

    The way back from a head's weights to the coordinates that move is a triangular solve for each matrix: it is gone
    once, behind all pieces.
    """
    leaves = {name: student.weights[name].detach().requires_grad_() for name in names}
    cut, loss = DraftHead(student.spec, {**student.weights, **leaves}), 0.0
    for part in distance_by_piece(original, cut, batch):
        part.backward()
        loss += part.item()
    torch.autograd.backward([student.weights[name] for name in names], [leaf.grad for leaf in leaves.values()])
    return loss


def _optimizers(matrices: list[dict[str, Any]], gains: list[dict[str, Any]]) -> list[torch.optim.Optimizer]:
    """Return Muon for matrices and AdamW for gains."""
    made: list[torch.optim.Optimizer] = []
    if matrices:
        # With this factor a step has the size that AdamW's has, whatever the matrix's shape.
        made.append(torch.optim.Muon(matrices, momentum=MOMENTUM, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    if gains:
        made.append(torch.optim.AdamW(gains, betas=BETAS, weight_decay=0.0))
    return made


def _size(gain: Tensor) -> float:
    return float(gain.detach().double().square().mean().sqrt())


def _share(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / max(1.0, WARMUP * steps))
    return warm * 0.5 * (1 + math.cos(math.pi * step / steps))
