"""Healing: a few steps of gradient descent towards the original head. What belongs here: the loop and its loss.

The converted head drafts K steps on the calibration's text, on hidden states of its own, and is drawn to what the
original drafts there: `KL(original || converted)` of each step's tokens, plus a tenth of the relative squared error
of the hidden state that it hands on. The target has no part in it: the head is to stay the one that was trained.

Two things keep the first steps from undoing the start. The shared rotary key and its queries are on one scale
(`rotary`); and each tensor's learning rate is relative to the size of its own entries, so that the gauge of a latent,
which is arbitrary, does not decide how fast it moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...errors import TrainingFailed
from ...head.chain import unroll
from ...head.forward import DraftHead
from .calibration import Batch, Calibration
from .swap import GQA_SLOTS, MLA_SLOTS
from .trace import STEPS

RATE = 0.001
"""Peak learning rate, relative to the root mean square of a tensor's entries."""
BETAS = (0.9, 0.95)
WARMUP = 0.05
HIDDEN = 0.1
CLIP = 1.0

ATTENTION = (*GQA_SLOTS, *MLA_SLOTS)
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
    """Return a converted head after some steps towards the original.

    Args:
        original: the head before its conversion.
        converted: the same head with another attention.
        calibration: its fitted part is trained on, one batch a step, in a new order with each pass.
        steps: how many; 0 returns the head as it is.
        slots: what is trained, where the head has it.
        rate: peak learning rate, relative to the size of each tensor's entries.
        seed: of the order.
        progress: told after each step.

    Raises:
        TrainingFailed: the loss is no longer a number.
    """
    if steps == 0:
        return converted
    names = [name for name in converted.weights if name in slots or (name.startswith("fc_norm") and "fc" in slots)]
    trained = {name: converted.weights[name].detach().clone().requires_grad_() for name in names}
    student = DraftHead(converted.spec, {**converted.weights, **trained})
    groups = [{"params": [weight], "lr": rate * _size(weight)} for weight in trained.values()]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share(step, steps))
    generator = torch.Generator().manual_seed(seed)
    mine, order = calibration.indices("fit"), list[int]()
    for step in range(steps):
        order = order or torch.randperm(len(mine), generator=generator).tolist()
        loss = distance(original, student, calibration.batches[mine[order.pop()]])
        if not math.isfinite(loss.item()):
            raise TrainingFailed(
                f"healing broke off: the loss is {loss.item()} at step {step + 1} of {steps}",
                fix="Heal for fewer steps, or give more text.",
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        progress(step + 1, steps, loss.item())
    return DraftHead(student.spec, {name: weight.detach() for name, weight in student.weights.items()})


def distance(original: DraftHead, student: DraftHead, batch: Batch) -> Tensor:
    """Return how far a head's drafts are from the original's over a batch, in nats, mean over draft steps."""
    with torch.no_grad():
        wanted = list(unroll(original, batch.tokens, batch.captured, STEPS))
    total = torch.zeros((), device=batch.tokens.device)
    for goal, step in zip(wanted, unroll(student, batch.tokens, batch.captured, STEPS), strict=True):
        p, q = goal.logits.float().log_softmax(-1), step.logits.float().log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1).mean()
        apart = (step.returned - goal.returned).square().sum() / goal.returned.square().sum()
        total = total + kl + HIDDEN * apart
    return total / STEPS


def _size(weight: Tensor) -> float:
    # Zeros that fill up a head get no gradient, and must not make the rest slow.
    live = weight.detach()[weight.detach() != 0]
    return float(live.double().square().mean().sqrt()) if live.numel() else 0.0


def _share(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / max(1.0, WARMUP * steps))
    return warm * 0.5 * (1 + math.cos(math.pi * step / steps))
