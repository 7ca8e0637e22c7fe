"""What a target feeds an Eagle3 head: its hidden states and logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DeepseekV3ForCausalLM

from ..errors import TargetInvalid


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
def run_target(model: DeepseekV3ForCausalLM, tokens: torch.Tensor, captured: Sequence[int]) -> States:
    """Run a target over whole sequences.

    Args:
        model: as `load_target` gives it.
        tokens: ids [B, T], all T of them real (no padding).
        captured: 0-based layers whose outputs are wanted.

    Raises:
        TargetInvalid: a captured layer does not exist, or stands twice.
    """
    outputs, hidden = capture(model, tokens, captured)
    return States(outputs, hidden, model.lm_head(hidden))


@torch.no_grad()
def capture(
    model: DeepseekV3ForCausalLM, tokens: torch.Tensor, captured: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `States.captured` and `States.hidden`, without the logits, which are the widest part by far.

    Args and faults as of `run_target`.
    """
    layers = model.model.layers
    order = check_captured(captured, len(layers))
    # Hooks, not output_hidden_states: that holds every layer, and its last one is already normed.
    outputs: dict[int, torch.Tensor] = {}
    hooks = [layers[i].register_forward_hook(_keep(outputs, i)) for i in order]
    try:
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([outputs[i] for i in order], dim=-1), hidden


def check_captured(captured: Sequence[int], layers: int) -> list[int]:
    """Return captured layers in ascending order.

    Raises:
        TargetInvalid: there are none, one does not exist in a target of `layers` layers, or one stands twice.
    """
    order = sorted(set(captured))
    if not order or len(order) != len(captured) or not 0 <= order[0] <= order[-1] < layers:
        raise TargetInvalid(
            f"the layers {tuple(captured)} cannot be captured from a target of {layers} layers",
            fix=f"Name distinct layers between 0 and {layers - 1}, counted as outputs.",
        )
    return order


def _keep(outputs: dict[int, torch.Tensor], layer: int):
    def hook(_module: torch.nn.Module, _args: object, output: torch.Tensor) -> None:
        outputs[layer] = output

    return hook
