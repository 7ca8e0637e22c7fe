"""Healing: some steps of gradient descent towards the original head, and towards what the target accepts.

The converted head drafts K steps on the calibration text, on its own hidden states. Its loss (`loss_by_piece`) is its
distance from the original's drafts, and how often the target would refuse its own. Where a latent is too small for what
the original computes, another head accepts more than the nearest one does: the second term finds it, the first keeps
all that the text does not ask for.

Steps of equal size in every entry, like Adam's, add up along the directions that all tokens share, and ruin a good
start within fifty steps. So matrices use Muon, whose steps have equal size in every direction, in coordinates where
their inputs are white (`to_white`). Each tensor's learning rate is relative to the size of its output, so that the
arbitrary gauge of a latent does not decide how fast it moves; and it is smaller for a nearer start.

The result is the better of the two, start or healed, on texts that healing did not see: those that chose ridges and
ladders, and gave no gradient.

Why white coordinates: a head's inputs are far from isotropic. All tokens share a mean, and a few directions hold most
of the rest. A step with equal size in every direction of a matrix then changes the output mostly along those
directions, which were right before. With `L L^T = E[x x^T]` over the inputs x of a matrix W, `V = W L` computes the
same from white inputs `L^-1 x`, and steps of V affect the output evenly. (Natural gradient with K-FAC's factor of the
inputs, arXiv 1503.05671, is the same change of coordinates.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...drafters.chain import count_chains, overlap_at, served_shares, unroll
from ...drafters.forward import DraftHead
from ...errors import TrainingFailed
from ...measure.batches import STEPS, Calibration, StatesBatch, in_pieces
from ...measure.trace import WatchedInputs
from ...muon import Muon
from .moments import Moments, factor
from .swap import GQA_SLOTS, MLA_SLOTS

HIDDEN = 1.0
"""Weight of the hidden state's relative squared error, in nats."""


@dataclass(frozen=True)
class Loss:
    """What a head loses, in nats, mean over positions and draft steps.

    Attributes:
        apart: its distance from the original: `KL(original || student)` of the drafted tokens, and `HIDDEN` times the
            relative squared error of the hidden state that is passed on.
        refused: minus the logarithm of the share of its drafts that the target accepts (`drafters.chain.overlap`), as
            in LK losses (https://arxiv.org/abs/2602.23881): of all heads that a small latent allows, the nearest one is
            not the one that the target accepts most.
    """

    apart: Tensor
    refused: Tensor

    @property
    def total(self) -> Tensor:
        """The sum of both, which healing minimizes."""
        return self.apart + self.refused


def loss_by_piece(
    original: DraftHead, student: DraftHead, calibration: Calibration, batch: StatesBatch
) -> Iterator[Loss]:
    """Yield the terms that the pieces of a batch (`in_pieces`) add to a head's loss; their sum is that of the batch.

    Each has a separate graph: if its backward is called before the next is requested, only one piece's logits are in
    memory, and the gradients add up to those of the whole batch.
    """
    pieces = list(in_pieces([batch], original.spec.vocab))
    places = batch.tokens.shape[0] * count_chains(batch.tokens.shape[1], STEPS) * STEPS
    # The hidden state's error is relative to its size over the whole batch, which the first piece already needs.
    sizes = _sizes(original, pieces[1:])
    for index, piece in enumerate(pieces):
        with torch.no_grad():
            goals = list(unroll(original, piece.tokens, piece.captured, STEPS))
            served = served_shares(calibration.logits(piece), original.target_ids)
        if index == 0:
            sizes = [size + goal.returned.square().sum() for size, goal in zip(sizes, goals, strict=True)]
        apart, refused = served.new_zeros(()), served.new_zeros(())
        steps = unroll(student, piece.tokens, piece.captured, STEPS)
        for k, (goal, step, size) in enumerate(zip(goals, steps, sizes, strict=True), start=1):
            p, q = goal.logits.float().log_softmax(-1), step.logits.float().log_softmax(-1)
            apart = apart + (p.exp() * (p - q)).sum() / places
            apart = apart + HIDDEN * (step.returned - goal.returned).square().sum() / size / STEPS
            # Computed again for the gradient: what it would keep is as large as the logits.
            accepted = checkpoint(partial(_accepted, served, k), q, use_reentrant=False)
            refused = refused - accepted.clamp(min=SMALLEST).log().sum() / places
        yield Loss(apart, refused)


def _accepted(served: Tensor, k: int, q: Tensor) -> Tensor:
    return overlap_at(served, k, q.exp())


# Of an accepted share: less than this counts as this, so that a token outside the draft vocabulary has a logarithm.
SMALLEST = 1e-6


@torch.no_grad()
def _sizes(head: DraftHead, pieces: Sequence[StatesBatch]) -> list[float | Tensor]:
    """Return the sum of squares of the hidden states that a head passes on, by draft step."""
    sizes: list[float | Tensor] = [0.0] * STEPS
    for piece in pieces:
        for k, step in enumerate(unroll(head, piece.tokens, piece.captured, STEPS)):
            sizes[k] = sizes[k] + step.returned.square().sum()
    return sizes


# Directions with less than this share of the mean count as equal. With a smaller value a step moves what only rare
# tokens read much more than the rest: whole texts of such tokens then ended farther from the original than they began.
FLOOR = 0.1


@dataclass(frozen=True)
class Spread:
    """The spread of a matrix's inputs, and the size of its outputs.

    Attributes:
        factor: L, lower triangular `[n, n]`.
        size: root mean square of an entry of V: the output of W, divided by the square root of n. Entries of W that
            cancel on all inputs, such as those after a latent with too many entries, do not count.
    """

    factor: Tensor
    size: float


@torch.no_grad()
def measure_spread(head: DraftHead, names: Iterable[str], batches: Iterable[StatesBatch]) -> dict[str, Spread]:
    """Return the spread of the inputs of some of a head's matrices, K steps along the chain."""
    moments = {name: Moments(head.weights[name].shape[1], device=head.weights[name].device) for name in names}

    def note(name: str, x: Tensor) -> Tensor:
        moments[name].add(x.flatten(0, -2))
        return x

    with WatchedInputs({name: head.weights[name] for name in moments}, note):
        for piece in in_pieces(batches, head.spec.draft_vocab):
            for _ in unroll(head, piece.tokens, piece.captured, STEPS):
                pass
    # Each matrix's moments are freed once its factor is computed: at Kimi-K2's size all of either take 5 GB.
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


RATE = 0.07
"""Peak learning rate, relative to the size of a tensor's output, for a start at a distance of 1. An error of e costs
about e^2 nats, so the rate goes with the square root of the distance (docs/attention.md has results).
"""
STEP_TOKENS = 1536
"""A step reads batches until it has so many tokens: three or more of 512, and more of shorter texts."""
MOMENTUM = 0.9
BETAS = (0.9, 0.95)
WARMUP = 0.05

# The latent of the queries stays as fitted: its gauge may have made entries hundreds of times smaller than others
# (`latents`), and a step of equal size in all of them is then large in the queries.
FITTED = ("0.q_a_proj", "0.q_a_layernorm")
ATTENTION = tuple(slot for slot in (*GQA_SLOTS, *MLA_SLOTS) if slot not in FITTED)
REST = (
    "fc", "input_norm", "norm",
    *(f"0.{name}" for name in (
        "input_layernorm", "hidden_norm", "post_attention_layernorm", "gate_proj", "up_proj", "down_proj",
    )),
)  # fmt: skip
"""What to heal besides the attention. The embedding and lm_head are the target's, or as large, and stay fixed."""

Progress = Callable[[int, int, float], None]
"""Called after each step with the steps done, the steps in total, and the step's loss."""


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
    """Return a converted head after some steps of healing, or the same head if they made its loss greater.

    Args:
        calibration: training uses its fitted part, `STEP_TOKENS` a step, in a new order for each pass.
        slots: what to train, if the head has it.
        rate: peak learning rate, as in `RATE`.
    """
    if steps == 0:
        return converted
    before = mean_loss(original, converted, calibration)
    rate *= float(before.apart) ** 0.5
    healed = descend(original, converted, calibration, steps, slots, rate, seed, progress)
    return healed if mean_loss(original, healed, calibration).total < before.total else converted


def train_alike(
    original: DraftHead,
    converted: DraftHead,
    calibration: Calibration,
    steps: int,
    *,
    slots: Sequence[str] = (*ATTENTION, *REST),
    progress: Progress = lambda *_: None,
) -> DraftHead:
    """Return the original after the steps that heal a conversion of it: the same texts, loss, rate and slots.

    Healing trains a head on, which gains acceptance whatever the conversion lost. What the conversion costs is what it
    has less than the original after the same steps.

    Its arguments are those of `heal`. Of the original and the trained one it returns what the target accepts more, on
    texts that gave no gradient.
    """
    rate = RATE * float(mean_loss(original, converted, calibration).apart) ** 0.5
    trained = descend(original, original, calibration, steps, slots, rate, progress=progress)
    refused = (mean_loss(original, head, calibration).refused for head in (trained, original))
    return trained if next(refused) < next(refused) else original


@torch.no_grad()
def mean_loss(original: DraftHead, head: DraftHead, calibration: Calibration) -> Loss:
    """Return the mean over the batches that choose."""
    count = len(calibration.indices("choose"))
    apart, refused = torch.zeros(2, device=calibration.lm_head.device)
    for batch in calibration.part("choose"):
        for part in loss_by_piece(original, head, calibration, batch):
            apart, refused = apart + part.apart / count, refused + part.refused / count
    return Loss(apart, refused)


def descend(
    original: DraftHead,
    converted: DraftHead,
    calibration: Calibration,
    steps: int,
    slots: Sequence[str],
    rate: float,
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> DraftHead:
    """Return a converted head after some steps at a peak rate, wherever they led; see `heal`."""
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
    texts = in_order(calibration, generator)
    for step in range(steps):
        loss = _take_gradient(original, assemble(), calibration, take_tokens(texts), list(trained))
        if not math.isfinite(loss):
            raise TrainingFailed(
                f"healing stopped: the loss is {loss} at step {step + 1} of {steps}",
                fix="Heal for fewer steps, or pass more text.",
            )
        for one in (*optimizers, *schedules):
            one.step()
        for one in optimizers:
            one.zero_grad()
        progress(step + 1, steps, loss)
    return DraftHead(converted.spec, {name: weight.detach() for name, weight in assemble().weights.items()})


def in_order(calibration: Calibration, generator: torch.Generator) -> Iterator[StatesBatch]:
    """Yield the fitted batches without end, in a new order for each pass."""
    mine = calibration.indices("fit")
    while True:
        for place in torch.randperm(len(mine), generator=generator).tolist():
            yield calibration.batch(mine[place])


def take_tokens(texts: Iterator[StatesBatch]) -> list[StatesBatch]:
    """Return batches of `STEP_TOKENS` tokens or more."""
    taken = [next(texts)]
    while sum(batch.tokens.numel() for batch in taken) < STEP_TOKENS:
        taken.append(next(texts))
    return taken


def _take_gradient(
    original: DraftHead,
    student: DraftHead,
    calibration: Calibration,
    batches: Sequence[StatesBatch],
    names: Sequence[str],
) -> float:
    """Sum the loss's gradient piece by piece, propagate it to the student's parameters, and return the loss.

    The way back from a head's weights to the trained coordinates is a triangular solve per matrix, done once after all
    pieces. Each batch counts by its tokens.
    """
    leaves = {name: student.weights[name].detach().requires_grad_() for name in names}
    cut, loss = DraftHead(student.spec, {**student.weights, **leaves}), 0.0
    tokens = sum(batch.tokens.numel() for batch in batches)
    for batch in batches:
        for part in loss_by_piece(original, cut, calibration, batch):
            share = part.total * (batch.tokens.numel() / tokens)
            share.backward()
            loss += share.item()
    torch.autograd.backward([student.weights[name] for name in names], [leaf.grad for leaf in leaves.values()])
    return loss


def _optimizers(matrices: list[dict[str, Any]], gains: list[dict[str, Any]]) -> list[torch.optim.Optimizer]:
    made: list[torch.optim.Optimizer] = []
    if matrices:
        # With this factor a step has the size of AdamW's, whatever the matrix's shape.
        made.append(Muon(matrices, momentum=MOMENTUM, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    if gains:
        made.append(torch.optim.AdamW(gains, betas=BETAS, weight_decay=0.0))
    return made


def _size(gain: Tensor) -> float:
    return float(gain.detach().double().square().mean().sqrt())


def _share(step: int, steps: int) -> float:
    """Return the share of the rate at a step: a warm-up, and a straight way to zero."""
    return min(1.0, (step + 1) / max(1.0, WARMUP * steps)) * (1 - step / steps)
