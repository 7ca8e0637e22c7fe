"""What goes wrong with a head in silence: done to heads that are right, and served by the real engines.

Each is a folder that an engine loads without a word of what is wrong with it, or so the tables say; the tests and the
page docs/witnesses.md serve them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kconv.drafters.keys import CONVENTION, IDS, TOP

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]
BOTH = ("vllm", "sglang")


@dataclass(frozen=True)
class SilentFault:
    """A fault.

    Attributes:
        name: what was done.
        kind: of the head, "mla" or "gqa".
        change: does it, to config and tensors in place.
        engines: who serves it without a word.
        unreached: a part of the name of a parameter that no tensor reaches then; "" where all are reached.
        dropped: whether the engine passes over what was done, so that it serves another head than the config says.
        warning: the rule that warns of it where its target is known; "" if errors alone name it.
    """

    name: str
    kind: str
    change: Change
    engines: tuple[str, ...] = BOTH
    unreached: str = ""
    dropped: bool = False
    warning: str = ""


def early(config: dict[str, Any], _: dict[str, torch.Tensor]) -> None:
    """List each captured layer one too early, in the engine's own way of counting."""
    for at, key in ((config, TOP), (config.get("eagle_config", {}), IDS)):
        at.pop(CONVENTION, None)
        if key in at:
            at[key] = [i - 1 for i in at[key]]


def unlisted(config: dict[str, Any], _: dict[str, torch.Tensor]) -> None:
    """List no captured layers."""
    config.pop(TOP, None)
    config.pop("eagle_config", None)


def as_trained(config: dict[str, Any], _: dict[str, torch.Tensor]) -> None:
    """List the layers as ModelOpt does: outputs, in eagle_config alone."""
    if layers := config.pop(TOP, None):
        config.setdefault("eagle_config", {})[IDS] = [i - 1 for i in layers]
    for key in ("num_aux_hidden_states", CONVENTION):
        config.pop(key, None)


def lose(*names: str) -> Change:
    """Lose tensors."""

    def change(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            del tensors[name]

    return change


def rope(theta: float) -> Change:
    """State another base of RoPE, wherever one is stated."""

    def change(config: dict[str, Any], _: dict[str, torch.Tensor]) -> None:
        for part in (config, config.get("rope_parameters"), config.get("rope_scaling")):
            if part and "rope_theta" in part:
                part["rope_theta"] = theta

    return change


def state(**keys: Any) -> Change:
    """State keys in config.json."""
    return lambda config, _: config.update(keys)


def biased(key: str, *linears: str) -> Change:
    """Give linears a bias, and say so."""

    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config[key] = True
        generator = torch.Generator().manual_seed(0)
        for linear in linears:
            weight = tensors[f"{linear}.weight"]
            tensors[f"{linear}.bias"] = torch.randn(weight.shape[0], generator=generator).to(weight.dtype)

    return change


ATTENTION, MLP = "layers.0.self_attn", "layers.0.mlp"
SHORT_POSITIONS = "max_position_embeddings below the text's length"
SILENT = (
    SilentFault("each captured layer listed one too early", "mla", early),
    SilentFault("each captured layer listed one too early, GQA", "gqa", early),
    SilentFault("no captured layers listed", "mla", unlisted),
    SilentFault("ModelOpt's list, which counts outputs", "gqa", as_trained, ("vllm",)),
    SilentFault("fc.weight lost", "mla", lose("fc.weight"), unreached="fc."),
    SilentFault("fc.weight lost, GQA", "gqa", lose("fc.weight"), unreached="fc."),
    SilentFault("hidden_norm lost", "mla", lose("layers.0.hidden_norm.weight"), unreached="hidden_norm"),
    SilentFault("input_layernorm lost", "gqa", lose("layers.0.input_layernorm.weight"), unreached="input_layernorm"),
    SilentFault("the last norm lost", "mla", lose("norm.weight"), unreached="norm"),
    SilentFault("lm_head lost", "gqa", lose("lm_head.weight"), ("sglang",), unreached="lm_head"),
    SilentFault("v_proj lost", "gqa", lose(f"{ATTENTION}.v_proj.weight"), unreached="qkv_proj"),
    SilentFault("kv_b_proj lost", "mla", lose(f"{ATTENTION}.kv_b_proj.weight"), unreached="kv_b_proj"),
    SilentFault("up_proj lost", "mla", lose(f"{MLP}.up_proj.weight"), unreached="gate_up_proj"),
    SilentFault("down_proj lost", "gqa", lose(f"{MLP}.down_proj.weight"), unreached="down_proj"),
    SilentFault("a different rope_theta", "mla", rope(500.0)),
    SilentFault("a different rope_theta, GQA", "gqa", rope(500.0)),
    # As long as the prompts.
    SilentFault(SHORT_POSITIONS, "gqa", state(max_position_embeddings=64), ("vllm",), warning="K215"),
    SilentFault("trained with hidden_norm before the residual", "gqa", state(norm_before_residual=True), ("sglang",),
                dropped=True),
    SilentFault("trained with biases of q, k and v", "gqa",
                biased("attention_bias", *(f"{ATTENTION}.{p}_proj" for p in "qkv")), ("sglang",),
                unreached="o_proj.bias", dropped=True),
    SilentFault("trained with biases of the MLP", "mla",
                biased("mlp_bias", *(f"{MLP}.{p}_proj" for p in ("gate", "up", "down"))), ("sglang",), dropped=True),
)  # fmt: skip


def write(fault: SilentFault, head: Path, folder: Path) -> Path:
    """Write a right head with a fault into a new folder, without its manifest."""
    folder.mkdir(parents=True)
    config, tensors = json.loads((head / "config.json").read_text()), load_file(head / "model.safetensors")
    fault.change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
