"""Training the tiny target: batches, optimizer, load balance, and how well it predicts held-out text."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy
from transformers import DeepseekV3ForCausalLM

from ..errors import TrainingFailed
from .recipe import TinyRecipe

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP = 1.0

Progress = Callable[[int, int, float], None]
"""Called after each step with the steps done, the steps in all, and the step's loss in nats per token."""


@torch.no_grad()
def initialize(model: DeepseekV3ForCausalLM) -> None:
    """Set a fresh model's weights so that it learns from the first step.

    With embeddings as small as transformers draws them, the residual stream holds what untrained layers add to it
    and next to nothing of the token. Here it holds the token alone: embeddings are of unit scale, and each layer's
    outputs start at 0. In the demo's dims that gave 3.81 nats held out after 120 steps of AdamW at 3e-3, where
    200 steps from transformers' own weights gave 4.53 at best.
    """
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            torch.nn.init.zeros_(parameter)


def train(model: DeepseekV3ForCausalLM, tokens: torch.Tensor, recipe: TinyRecipe, progress: Progress) -> None:
    """Train a model in place on random windows of a token stream.

    Args:
        model: freshly initialized.
        tokens: the documents, one after the other: [N] int64.
        recipe: steps, batch, seq and the optimizer's settings.
        progress: called after each step.

    Raises:
        TrainingFailed: the loss is no longer a number.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    offsets = torch.arange(recipe.seq + 1)
    optimizer = torch.optim.AdamW(_groups(model, recipe), betas=BETAS, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, recipe))
    balance = Balance(model, recipe.balance)
    model.train()
    for step in range(recipe.steps):
        starts = torch.randint(len(tokens) - recipe.seq, (recipe.batch, 1), generator=generator)
        window = tokens[starts + offsets]
        logits = model(input_ids=window[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        if not math.isfinite(loss.item()):
            raise TrainingFailed(
                f"the tiny target's loss is {loss.item()} at step {step}", fix="Lower the recipe's lr."
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        balance.step()
        progress(step + 1, recipe.steps, loss.item())
    balance.close()
    model.eval()


class Balance:
    """DeepSeek-V3's balancing without an auxiliary loss: a router's bias rises for experts that get too little."""

    def __init__(self, model: DeepseekV3ForCausalLM, speed: float) -> None:
        self.speed = speed
        self.counts: dict[torch.nn.Module, torch.Tensor] = {}
        gates = [m for m in model.modules() if hasattr(m, "e_score_correction_bias")]
        self.hooks = [gate.register_forward_hook(self._count) for gate in gates]

    def _count(self, gate: torch.nn.Module, _args: object, output: tuple[torch.Tensor, ...]) -> None:
        bias = gate.get_buffer("e_score_correction_bias")
        self.counts[gate] = torch.bincount(output[2].flatten(), minlength=bias.numel()).float()

    def step(self) -> None:
        """Move each router's bias by `speed` towards the experts below the mean load of the last forward."""
        for gate, counts in self.counts.items():
            gate.get_buffer("e_score_correction_bias").add_(self.speed * torch.sign(counts.mean() - counts))

    def close(self) -> None:
        """Stop counting."""
        for hook in self.hooks:
            hook.remove()


@torch.no_grad()
def held_out_loss(model: DeepseekV3ForCausalLM, tokens: torch.Tensor, seq: int) -> float:
    """Return the mean negative log-likelihood of a token stream, in nats per token.

    Args:
        tokens: [N] int64; cut into windows of `seq` tokens, each read without what stands before it.
    """
    windows = (len(tokens) - 1) // seq
    inputs = tokens[: windows * seq].view(windows, seq)
    labels = tokens[1 : windows * seq + 1].view(windows, seq)
    total = 0.0
    for inputs_, labels_ in zip(inputs.split(16), labels.split(16), strict=True):
        logits = model(input_ids=inputs_, use_cache=False).logits
        total += cross_entropy(logits.flatten(0, 1), labels_.flatten(), reduction="sum").item()
    return total / labels.numel()


def unigram_loss(train: torch.Tensor, held_out: torch.Tensor, vocab: int) -> float:
    """Return the held-out loss, in nats per token, of add-one smoothed token frequencies: what any model must beat."""
    counts = torch.bincount(train, minlength=vocab).double() + 1
    return -(counts / counts.sum()).log()[held_out].mean().item()


def _rate(step: int, recipe: TinyRecipe) -> float:
    warm = min(1.0, (step + 1) / recipe.warmup)
    return warm * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))


def _groups(model: DeepseekV3ForCausalLM, recipe: TinyRecipe) -> list[dict]:
    ends = [model.model.embed_tokens.weight, model.lm_head.weight]
    inner = [p for p in model.parameters() if all(p is not end for end in ends)]
    return [
        {"params": ends, "lr": recipe.ends_lr, "weight_decay": 0.0},
        {"params": [p for p in inner if p.ndim > 1], "lr": recipe.lr, "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in inner if p.ndim == 1], "lr": recipe.lr, "weight_decay": 0.0},
    ]
