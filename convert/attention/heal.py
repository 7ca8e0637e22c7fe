"""Healing: a few steps of gradient descent towards the original head.

The converted head drafts K steps on the calibration's text, on hidden states of its own, and is drawn to what the
original drafts there (`distance_by_piece`). The target has no part in it: the head is to stay the one that was trained.

Steps of one size in every entry, as Adam's are, add up along the directions that all tokens share, and undo a good
start within fifty. So matrices move by Muon, whose steps have one size in every direction, and in coordinates where
their inputs are white (`to_white`). Each tensor's learning rate is relative to the size of what it gives, so that the
gauge of a latent, which is arbitrary, does not decide how fast it moves; and it is less for a start that is nearer.

What comes out is the nearer of the two, start or healed, on texts that healing did not see: those that ridges and
ladders were chosen on, and no gradient came from.

How far a head's drafts are from the original's.

Both heads draft K steps on a text, each on hidden states of its own. The distance is `KL(original || student)` of each
step's tokens, plus a tenth of the relative squared error of the hidden state that it hands on.

Matrices in coordinates where their inputs are white.

A head's inputs are far from even: all tokens share a mean, and a few directions hold most of the rest. A step that
has one size in every direction of a matrix then changes the output mostly along those, where it was right before.
With `L L^T = E[x x^T]` over the inputs x of a matrix W, `V = W L` computes the same from inputs `L^-1 x` that are
white; steps of V are even in what they do to the output. (Natural gradient with K-FAC's factor of the inputs,
arXiv 1503.05671, is the same change of coordinates.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...calibrate.batches import STEPS, Batch, Calibration, in_pieces
from ...calibrate.measure import WatchedInputs
from ...errors import TrainingFailed
from ...head.chain import count_chains, unroll
from ...head.forward import DraftHead
from .moments import Moments, factor
from .swap import GQA_SLOTS, MLA_SLOTS

HIDDEN = 0.1


def distance_by_piece(original: DraftHead, student: DraftHead, batch: Batch) -> Iterator[Tensor]:
    """Yield what the pieces of a batch (`in_pieces`) add to a head's distance from the original over it.

    Each is a scalar with a graph of its own: with its backward called before the next is asked for, one piece's
    logits are held at a time, and the gradients add up to those of the whole batch.

    Returns:
        Parts of the distance in nats, mean over positions and draft steps; their sum is that of the batch.
    """
    pieces = list(in_pieces([batch], original.spec.draft_vocab))
    places = batch.tokens.shape[0] * count_chains(batch.tokens.shape[1], STEPS)
    # The hidden state's error is relative to its size over the whole batch, which the first piece needs already.
    sizes = _sizes(original, pieces[1:])
    for index, piece in enumerate(pieces):
        with torch.no_grad():
            goals = list(unroll(original, piece.tokens, piece.captured, STEPS))
        if index == 0:
            sizes = [size + goal.returned.square().sum() for size, goal in zip(sizes, goals, strict=True)]
        total = torch.zeros((), device=piece.tokens.device)
        steps = unroll(student, piece.tokens, piece.captured, STEPS)
        for goal, step, size in zip(goals, steps, sizes, strict=True):
            p, q = goal.logits.float().log_softmax(-1), step.logits.float().log_softmax(-1)
            kl = (p.exp() * (p - q)).sum(-1).sum() / places
            apart = (step.returned - goal.returned).square().sum() / size
            total = total + kl + HIDDEN * apart
        yield total / STEPS


@torch.no_grad()
def _sizes(head: DraftHead, pieces: Sequence[Batch]) -> list[float | Tensor]:
    """Return the sum of squares of the hidden states that a head hands on, by draft step."""
    sizes: list[float | Tensor] = [0.0] * STEPS
    for piece in pieces:
        for k, step in enumerate(unroll(head, piece.tokens, piece.captured, STEPS)):
            sizes[k] = sizes[k] + step.returned.square().sum()
    return sizes


# Directions with less than this share of the mean are no finer. Less, and a step moves what only rare tokens read by
# much more than what all do: whole texts of such tokens then ended farther from the original than they began.
FLOOR = 0.1


@dataclass(frozen=True)
class Spread:
    """How a matrix's inputs spread, and how large what it makes of them is.

    Attributes:
        factor: L, lower triangular `[n, n]`.
        size: of an entry of V, root mean square: of what W gives, over the root of n. Entries of W that cancel on all
            inputs, as those behind a latent with too many entries do, have no part in it.
    """

    factor: Tensor
    size: float


@torch.no_grad()
def measure_spread(head: DraftHead, names: Iterable[str], batches: Iterable[Batch]) -> dict[str, Spread]:
    """Return the spread of the inputs of some of a head's matrices, K steps along the chain."""
    moments = {name: Moments(head.weights[name].shape[1], device=head.weights[name].device) for name in names}

    def note(name: str, x: Tensor) -> Tensor:
        moments[name].add(x.flatten(0, -2))
        return x

    with WatchedInputs({name: head.weights[name] for name in moments}, note):
        for piece in in_pieces(batches, head.spec.draft_vocab):
            for _ in unroll(head, piece.tokens, piece.captured, STEPS):
                pass
    # Each matrix's moments go as its factor comes: at Kimi-K2's size all of either are 5 GB.
    return {name: _spread(head.weights[name], moments.pop(name)) for name in list(moments)}


def _spread(weight: Tensor, moments: Moments) -> Spread:
    mean = moments.mean()
    given = (weight.to(mean.dtype) @ mean * weight).sum().clamp(min=0)
    return Spread(factor(mean, FLOOR).to(weight.dtype), float((given / weight.numel()).sqrt()))


def to_white(weight: Tensor, spread: Spread) -> Tensor:
    """Return V = W L."""
    return weight @ spread.factor


def from_white(weight: Tensor, spread: Spread) -> Tensor:
    """Return W = V L^-1."""
    return torch.linalg.solve_triangular(spread.factor, weight, upper=False, left=False)


RATE = 0.04
"""Peak learning rate, relative to the size of what a tensor gives, for a start at a distance of 1: what is off by e
costs about e^2 nats, so the rate goes with the square root of the distance (docs/attention.md has what it gives).
"""
MOMENTUM = 0.9
BETAS = (0.9, 0.95)
WARMUP = 0.05

# The latent of the queries stays as it was fitted: its gauge may have made entries hundreds of times smaller than
# others (`latents`), and a step of one size in all of them is then large in the queries.
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
                f"healing stopped: the loss is {loss} at step {step + 1} of {steps}",
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
