"""Run a target: its hidden states, and its continuations of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from ..checkpoint.tensors import NAMES
from ..errors import PromptsInvalid, RecipeInvalid
from .config import check_captured
from .model import CausalLM
from .states import Kind


@dataclass(frozen=True)
class States:
    """The target's states over a batch, without gradients.

    Attributes:
        captured: outputs of the captured layers (the residual stream after each), concatenated in ascending
            order: [B, T, A * H].
        hidden: the state after the final norm, which `lm_head` reads: [B, T, H].
        logits: [B, T, V].
    """

    captured: torch.Tensor
    hidden: torch.Tensor
    logits: torch.Tensor


@torch.no_grad()
def run_target(model: CausalLM, tokens: torch.Tensor, captured: Sequence[int]) -> States:
    """Run a target over whole sequences, [B, T] ids without padding; `captured` are 0-based layers.

    Raises:
        TargetInvalid: a captured layer does not exist, or is listed twice.
    """
    outputs, hidden = capture(model, tokens, captured)
    return States(outputs, hidden, model.lm_head(hidden))


@torch.no_grad()
def capture(model: CausalLM, tokens: torch.Tensor, captured: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `States.captured` and `States.hidden` without the logits, which are by far the largest part.

    Args and errors as in `run_target`.
    """
    layers = model.model.layers
    order = check_captured(captured, len(layers))
    # Hooks, not output_hidden_states: that keeps every layer, and its last one is already normed.
    outputs: dict[int, torch.Tensor] = {}
    hooks = [layers[i].register_forward_hook(_keep(outputs, i)) for i in order]
    try:
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([outputs[i] for i in order], dim=-1), hidden


def _keep(outputs: dict[int, torch.Tensor], layer: int):
    def hook(_module: torch.nn.Module, _args: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        outputs[layer] = output[0] if isinstance(output, tuple) else output

    return hook


# Continuations of token prompts by the target itself.
#
# A separate loop: `model.generate` takes unset options from the target's generation_config (end tokens, top_k,
# temperature), but a drafter's acceptance is measured against the plain distribution.

BATCH = 32  # prompts decoded in parallel

Choose = Callable[[torch.Tensor], torch.Tensor]
"""Choose one id each [B] from logits [B, V]."""


def generate_greedy(
    model: CausalLM, prompts: Sequence[Sequence[int]], length: int, *, eos: Sequence[int] = ()
) -> list[list[int]]:
    """Continue each prompt with the target's most probable tokens; the prompts' lengths may differ.

    An id of `eos` ends a continuation, which keeps it. If `eos` is empty, each has `length` tokens.

    Raises:
        PromptsInvalid: a prompt is empty, or too long for the target.
    """
    return _generate(model, prompts, length, eos, lambda logits: logits.argmax(-1))


def generate_sampled(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    length: int,
    *,
    temperature: float,
    seed: int,
    eos: Sequence[int] = (),
) -> list[list[int]]:
    """Continue each prompt with tokens sampled from the target's whole distribution, as `generate_greedy` does.

    The temperature divides the logits. The same seed, prompts and machine give the same tokens.

    Raises:
        PromptsInvalid: a prompt is empty, or too long for the target.
        RecipeInvalid: the temperature is not above 0.
    """
    if temperature <= 0:
        raise RecipeInvalid(
            f"sampling at temperature {temperature} is impossible", fix="Use a temperature above 0, or decode greedily."
        )
    generator = torch.Generator(model.device).manual_seed(seed)

    def choose(logits: torch.Tensor) -> torch.Tensor:
        return torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator).squeeze(-1)

    return _generate(model, prompts, length, eos, choose)


@torch.no_grad()
def _generate(
    model: CausalLM, prompts: Sequence[Sequence[int]], length: int, eos: Sequence[int], choose: Choose
) -> list[list[int]]:
    longest = model.config.max_position_embeddings - length
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= longest:
            raise PromptsInvalid(
                f"prompt {i} has {len(prompt)} tokens; the target accepts 1 to {longest} before {length} new ones",
                fix="Remove this prompt, or shorten it.",
            )
    # Batching prompts of similar length needs the least padding.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: dict[int, list[int]] = {}
    for begin in range(0, len(order), BATCH):
        batch = order[begin : begin + BATCH]
        rows = _generate_batch(model, [prompts[i] for i in batch], length, eos, choose)
        found |= zip(batch, rows, strict=True)
    return [found[i] for i in range(len(prompts))]


def _generate_batch(
    model: CausalLM, prompts: list[Sequence[int]], length: int, eos: Sequence[int], choose: Choose
) -> list[list[int]]:
    tokens, mask = _pad_left(prompts, model.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    ends = torch.tensor(list(eos), dtype=torch.long, device=model.device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
    cache = DynamicCache(config=model.config)
    columns: list[torch.Tensor] = []
    for _ in range(length):
        logits = model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        ).logits
        chosen = choose(logits[:, -1])
        columns.append(chosen)
        ended |= torch.isin(chosen, ends)
        if ended.all():
            break
        tokens, positions = chosen[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=-1)
    rows = torch.stack(columns, dim=-1).tolist() if columns else [[] for _ in prompts]
    return [_until(row, eos) for row in rows]


def _pad_left(prompts: list[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask, each [B, T], with every prompt's last token in the last column."""
    width = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt, device=device)
        mask[row, width - len(prompt) :] = 1
    return tokens, mask


def _until(ids: list[int], eos: Sequence[int]) -> list[int]:
    """Cut a row after its first end token: it continued while others in its batch did."""
    first = next((i for i, token in enumerate(ids) if token in eos), len(ids))
    return ids[: first + 1]


@dataclass(frozen=True)
class LocalRunner:
    """A target in memory."""

    model: CausalLM

    @property
    def dtype(self) -> str:
        return NAMES[self.model.lm_head.weight.dtype]

    @property
    def at_once(self) -> int:
        return 1

    def capture(self, tokens: torch.Tensor, captured: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        states, hidden = capture(self.model, tokens.to(self.model.device), captured)
        return states.cpu(), hidden.cpu()

    def extend(self, kind: Kind, prompts: Sequence[Sequence[int]], length: int, seed: int) -> list[list[int]]:
        if kind == "sampled":
            return generate_sampled(self.model, prompts, length, temperature=1.0, seed=seed)
        return generate_greedy(self.model, prompts, length)
