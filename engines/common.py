"""What several layouts share: tensor names, marks, limits, and how a list of layers is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..checkpoint.schema import Json
from ..drafters.spec import Gqa, HeadSpec, Mla, Yarn
from .layout import Limit, Row
from .moves import Stack

VLLM_SOURCE = "https://github.com/vllm-project/vllm/blob/v0.32.0/vllm"

# The name of the one norm before attention in layers after the first. vLLM reads the first name, TensorRT-LLM
# and SGLang the second: https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/llama_eagle3.py
INPUT, HIDDEN = "input_layernorm", "hidden_norm"


def head_rows(layer: str, *, later: tuple[str, ...] = (INPUT,)) -> tuple[Row, ...]:
    """Return the rows of a head; `later` are the names of the norm before the attention of layers after the first."""
    return OUTSIDE + layer_rows(layer, later=later)


def layer_rows(layer: str, *, later: tuple[str, ...] = (INPUT,)) -> tuple[Row, ...]:
    """Return the rows of a head's decoder layers; see `head_rows`."""
    first = Row(f"{layer}.{INPUT}.weight", ("{i}.input_layernorm",), layers="first")
    return (
        first,
        *(replace(first, name=f"{layer}.{name}.weight", layers="later") for name in later),
        *(Row(f"{layer}.{name}", (slot,)) for name, slot in LAYER),
    )


def first_only(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Return the rows of a head whose only layer has no number in its name."""
    return tuple(replace(row, layers="first") for row in rows if row.layers != "later")


def instead(*tables: tuple[Row, ...]) -> tuple[Row, ...]:
    """Return rows that are read instead of others."""
    return tuple(replace(row, role="instead") for table in tables for row in table)


def beside(*tables: tuple[Row, ...]) -> tuple[Row, ...]:
    """Return rows that are read in addition to others, and must hold the same bytes."""
    return tuple(replace(row, role="beside") for table in tables for row in table)


def later_norm(name: str) -> tuple[Row, ...]:
    """Return the row of the norm before the attention of layers after the first, under one of its names."""
    return (Row(f"layers.{{i}}.{name}.weight", ("{i}.input_layernorm",), layers="later"),)


def fused_rows(layer: str) -> tuple[Row, ...]:
    """Return the rows for vLLM's fused linear layers, which vLLM also loads from disk.

    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/llama_eagle3.py#L292-L298
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_eagle3.py#L261-L266
    """
    qkv, gate_up = ("{i}.q_proj", "{i}.k_proj", "{i}.v_proj"), ("{i}.gate_proj", "{i}.up_proj")
    return (
        Row(f"{layer}.self_attn.qkv_proj.weight", qkv, Stack()),
        Row(f"{layer}.self_attn.qkv_proj.bias", tuple(f"{slot}.bias" for slot in qkv), Stack()),
        Row(f"{layer}.self_attn.fused_qkv_a_proj.weight", ("{i}.q_a_proj", "{i}.kv_a_proj_with_mqa"), Stack()),
        Row(f"{layer}.mlp.gate_up_proj.weight", gate_up, Stack()),
        Row(f"{layer}.mlp.gate_up_proj.bias", tuple(f"{slot}.bias" for slot in gate_up), Stack()),
    )


OUTSIDE = (
    Row("fc.weight", ("fc",)),
    Row("fc.bias", ("fc.bias",)),
    Row("fc_norm.{a}.weight", ("fc_norm.{a}",)),
    Row("input_norm.weight", ("input_norm",)),
    Row("mask_hidden", ("mask_hidden",)),
    Row("norm.weight", ("norm",)),
    Row("lm_head.weight", ("lm_head",)),
    Row("embed_tokens.weight", ("embed_tokens",)),
    Row("d2t", ("d2t",)),
    Row("t2d", ("t2d",)),
)

LAYER = (
    ("hidden_norm.weight", "{i}.hidden_norm"),
    ("post_attention_layernorm.weight", "{i}.post_attention_layernorm"),
    *(
        (f"self_attn.{part}.{kind}", "{i}." + part + ("" if kind == "weight" else ".bias"))
        for part in ("q_proj", "k_proj", "v_proj", "o_proj")
        for kind in ("weight", "bias")
    ),
    *(
        (f"self_attn.{part}.weight", "{i}." + part)
        for part in (
            "q_norm", "k_norm",
            "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj",
        )
    ),
    *(
        (f"mlp.{part}.{kind}", "{i}." + part + ("" if kind == "weight" else ".bias"))
        for part in ("gate_proj", "up_proj", "down_proj")
        for kind in ("weight", "bias")
    ),
)  # fmt: skip

# One-layer heads from trainers, which engines rename; and heads from ModelOpt's Megatron exporter and TensorRT-LLM
# with several layers (lines 943 to 961 of the file that `trtllm.MODEL` links to).
MIDLAYER = first_only(layer_rows("midlayer"))
MIDLAYERS = layer_rows("midlayer.{i}", later=(HIDDEN,))


def eagle_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config's eagle_config; empty if it has none."""
    nested: Json = config.get("eagle_config")
    return nested if isinstance(nested, Mapping) else {}


def has_midlayer(names: Iterable[str]) -> bool:
    """Return whether the decoder layer has its trainers' name, which engines replace."""
    return any(name.startswith("midlayer.") for name in names)


def listed_ids(value: Json | tuple[Any, ...]) -> tuple[int, ...] | None:
    """Return a list of layer ids from a config; None if there is none, or if it is not a list."""
    if not isinstance(value, (list, tuple)) or not value:
        return None
    return tuple(value) if all(isinstance(i, int) and not isinstance(i, bool) for i in value) else None


def as_outputs(inputs: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Convert layers counted by their inputs to outputs."""
    return tuple(i - 1 for i in inputs) if inputs else None


def norms_qk(spec: HeadSpec) -> bool:
    """Return whether a head norms its queries and keys, as Qwen3 does."""
    return isinstance(spec.attention, Gqa) and spec.norms.qk


def is_mla(spec: HeadSpec) -> bool:
    """Return whether a head has latent attention."""
    return isinstance(spec.attention, Mla)


def yarn_of(spec: HeadSpec) -> Yarn | None:
    return spec.rope.scaling if isinstance(spec.rope.scaling, Yarn) else None


def _mla_is_no_deepseek_yarn(spec: HeadSpec) -> bool:
    yarn = yarn_of(spec)
    return is_mla(spec) and spec.rope.scaling is not None and (yarn is None or yarn.attention_factor is not None)


def _mla_states_one_mscale(spec: HeadSpec) -> bool:
    yarn = yarn_of(spec)
    return is_mla(spec) and yarn is not None and (yarn.mscale is None) != (yarn.mscale_all_dim is None)


MLA_ROPE = (
    Limit(
        "K310",
        "mla-rope-no-deepseek-yarn",
        _mla_is_no_deepseek_yarn,
        "Engines read any scaled RoPE of an MLA head as DeepSeek's YaRN, and ignore attention_factor",
        "Serve this head with the code it was trained with, or train one with YaRN and no attention_factor.",
        f"{VLLM_SOURCE}/model_executor/models/deepseek_v2.py#L1115-L1120",
    ),
    Limit(
        "K311",
        "mla-one-mscale",
        _mla_states_one_mscale,
        "The config states only one of mscale and mscale_all_dim, and engines use different defaults for the other",
        "Set both to the values that the head was trained with.",
        f"{VLLM_SOURCE}/model_executor/layers/rotary_embedding/deepseek_scaling_rope.py#L52-L55",
    ),
)
