"""The part of config.json that is the same in every layout that kconv writes."""

from __future__ import annotations

from typing import Any

from ..checkpoint.header import TORCH_NAMES
from ..drafters.base import Spec
from ..drafters.rope_keys import SCALINGS
from ..drafters.spec import HeadSpec, Mla, Rope


def identity(spec: HeadSpec) -> dict[str, Any]:
    """Return `architectures` and `model_type` in the form that vLLM, SGLang and TensorRT-LLM all accept.

    Only vLLM supports a head with norms of queries and keys:
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/registry.py#L665

    `deepseek_v3` would be the natural model_type of an MLA head, but vLLM rewrites it to its MTP draft:
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/speculative.py#L679
    """
    if isinstance(spec.attention, Mla):
        return {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2"}
    if spec.norms.qk:
        return {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
    return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}


def write_keys(spec: Spec) -> dict[str, Any]:
    """Return the config keys that every engine reads; layouts add identity and captured layers."""
    config: dict[str, Any] = {}
    for key in spec.drafter.keys_of(spec):
        value = _get(spec, key.field)
        if key.kind == "token" and value is None:
            continue
        for name in key.names:
            _put(config, name, list(value) if isinstance(value, tuple) else value)
    dtype = TORCH_NAMES.get(spec.dtype, "bfloat16")
    config |= {"hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": spec.max_positions}
    # transformers 4 reads torch_dtype, transformers 5 reads dtype.
    return config | {"torch_dtype": dtype, "dtype": dtype} | write_rope(spec.rope)


def write_rope(rope: Rope) -> dict[str, Any]:
    """Return the config keys of a RoPE, in both spellings, leaving no value to an engine's default."""
    scaling: dict[str, Any] = {}
    for kind, (cls, names) in SCALINGS.items():
        if isinstance(rope.scaling, cls):
            stated = {name: getattr(rope.scaling, field) for name, field in names.items()}
            scaling = {"type": kind, "rope_type": kind} | {k: v for k, v in stated.items() if v is not None}
    keys: dict[str, Any] = {"rope_theta": rope.theta}
    parameters = {"rope_type": "default"} | scaling | {"rope_theta": rope.theta}
    if scaling:
        keys["rope_scaling"] = scaling | {"rope_theta": rope.theta}
    if rope.partial_rotary_factor != 1.0:
        keys["partial_rotary_factor"] = parameters["partial_rotary_factor"] = rope.partial_rotary_factor
    return keys | {"rope_parameters": parameters}


def _put(config: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for part in parents:
        config = config.setdefault(part, {})
    config[last] = value


def _get(spec: Spec, path: str) -> str | float | tuple[int, ...] | None:
    value: Any = spec
    for part in path.split("."):
        value = getattr(value, part)
    return value
