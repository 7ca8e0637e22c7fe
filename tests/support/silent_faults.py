"""What goes wrong with a head in silence: done to heads that are right, and served by the real engines.

Each is a folder that an engine loads without a word of what is wrong with it, or so the tables say; the tests and the
page docs/evidence/witnesses.md serve them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kconv.drafters.dflash import DFlashSpec, Markov
from kconv.drafters.dflash_captured import NESTED
from kconv.drafters.keys import CONVENTION, IDS, TOP

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]
BOTH = ("vllm", "sglang")


@dataclass(frozen=True)
class SilentFault:
    """A fault.

    Attributes:
        name: what was done.
        kind: of the head: "mla", "gqa", or the name of a block drafter.
        change: does it, to config and tensors in place.
        engines: who serves it without a word.
        unreached: a part of the name of a parameter that no tensor reaches then; "" where all are reached.
        dropped: whether the engine passes over what was done, so that it serves another head than the config says.
        warning: the rule that warns of it where its target is known; "" if errors alone name it.
        taken: returns what a block drafter is by its launch options, if it is taken for what its config says.
    """

    name: str
    kind: str
    change: Change
    engines: tuple[str, ...] = BOTH
    unreached: str = ""
    dropped: bool = False
    warning: str = ""
    taken: Callable[[DFlashSpec], DFlashSpec] = lambda spec: spec


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


def in_both(**keys: Any) -> Change:
    """State keys at the top level and in dflash_config, where they are; None takes one away."""

    def change(config: dict[str, Any], _: dict[str, torch.Tensor]) -> None:
        for part in (config, config[NESTED]):
            for key, value in keys.items():
                if key in part and value is None:
                    del part[key]
                elif key in part:
                    part[key] = value

    return change


def unstated(*keys: str) -> Change:
    """Take keys away from the top level of config.json."""

    def change(config: dict[str, Any], _: dict[str, torch.Tensor]) -> None:
        for key in keys:
            config.pop(key, None)

    return change


def as_modelopt_exports(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Name DSpark's class and the tensors of its heads as ModelOpt does."""
    config["architectures"] = ["DFlashDraftModel"]
    for name in [name for name in tensors if name.startswith(("markov_head.", "confidence_head."))]:
        flat = name.replace("markov_head.", "").replace("confidence_head.proj", "confidence_proj")
        tensors[flat] = tensors.pop(name)


def as_dflash(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Name DFlash's class and leave out the heads of DSpark, as if there had been none."""
    config["architectures"] = ["DFlashDraftModel"]
    for name in [name for name in tensors if name.startswith(("markov_head.", "confidence_head."))]:
        del tensors[name]


def not_dspark(spec: DFlashSpec) -> DFlashSpec:
    """Return a DSpark drafter as an engine takes it by DFlash's class."""
    return replace(spec, shift=False, markov=Markov())


SGLANG = ("sglang",)
# Of block drafters, which are served by other means; see `witness.serve_blocks`. vLLM reads `causal` in dflash_config,
# and refuses an `fc` of another width than the layers that it takes, and tensors that DFlash has not.
SILENT_BLOCKS = (
    SilentFault("each captured layer listed one too early, DFlash", "DFlash", in_both(target_layer_ids=[0, 4])),
    SilentFault("no captured layers listed, DFlash", "DFlash", in_both(target_layer_ids=None), SGLANG),
    SilentFault("another mask token", "DFlash", in_both(mask_token_id=0)),
    SilentFault("causal in dflash_config alone", "causal DFlash", unstated("is_causal"), SGLANG),
    SilentFault("trained causal, stated nowhere", "causal DFlash", in_both(is_causal=None, causal=None)),
    SilentFault("stated causal, trained bidirectional", "DFlash", in_both(is_causal=True, causal=True)),
    SilentFault("a different rope_theta, DFlash", "DFlash", rope(500.0)),
    SilentFault("no rope_theta stated", "DFlash", unstated("rope_theta", "rope_parameters", "rope_scaling")),
    SilentFault("partial_rotary_factor copied from the target", "DFlash", state(partial_rotary_factor=0.5)),
    SilentFault("a different rms_norm_eps", "DFlash", state(rms_norm_eps=0.3)),
    SilentFault("a larger block_size", "DFlash", state(block_size=8), taken=lambda spec: replace(spec, block=8)),
    SilentFault("fc.weight lost, DFlash", "DFlash", lose("fc.weight"), unreached="fc."),
    SilentFault("hidden_norm lost, DFlash", "DFlash", lose("hidden_norm.weight"), unreached="hidden_norm"),
    SilentFault("k_norm lost", "DFlash", lose("layers.1.self_attn.k_norm.weight"), unreached="k_norm"),
    SilentFault("the last norm lost, DFlash", "DFlash", lose("norm.weight"), unreached="norm"),
    SilentFault("v_proj lost, DFlash", "DFlash", lose("layers.1.self_attn.v_proj.weight"), unreached="qkv_proj"),
    SilentFault("DSpark by ModelOpt's class and names", "DSpark", as_modelopt_exports, SGLANG, taken=not_dspark),
    SilentFault("DSpark by DFlash's class, without its heads", "DSpark", as_dflash, taken=not_dspark),
    SilentFault("sample_from_anchor false, trained true", "DSpark", in_both(sample_from_anchor=False)),
    SilentFault("markov_w2 lost", "DSpark", lose("markov_head.markov_w2.weight"), unreached="markov_w2"),
)  # fmt: skip


def write(fault: SilentFault, head: Path, folder: Path) -> Path:
    """Write a right head with a fault into a new folder, without its manifest."""
    folder.mkdir(parents=True)
    config, tensors = json.loads((head / "config.json").read_text()), load_file(head / "model.safetensors")
    fault.change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
