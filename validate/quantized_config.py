"""A quantized target's config against its source's.

Not compared are token ids, which generation_config.json states as well, and the part of a wrapped target that is no
text model: exporters write both anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..convert.rope import read_rope
from ..errors import KconvError
from ..targets.config import TargetConfig
from .report import Finding
from .rules.comparisons import AS_THE_SOURCE

# Each key of the text model that decides a number, with what its absence means to every reader; None where readers
# differ, or fail. An exporter may write such a value down, or leave it out.
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_v2.py#L305-L387
# https://github.com/huggingface/transformers/blob/v5.14.1/src/transformers/models/deepseek_v3/configuration_deepseek_v3.py#L82-L116
KEYS: Mapping[str, Any] = {
    "hidden_size": None,
    "num_hidden_layers": None,
    "vocab_size": None,
    "max_position_embeddings": None,
    "hidden_act": None,
    "rms_norm_eps": None,
    "intermediate_size": None,
    # Attention.
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "q_lora_rank": None,
    "kv_lora_rank": None,
    "qk_nope_head_dim": None,
    "qk_rope_head_dim": None,
    "v_head_dim": None,
    "attention_bias": False,
    "rope_interleave": True,
    # Experts, and how they are chosen and weighed.
    "first_k_dense_replace": None,
    "moe_layer_freq": 1,
    "moe_intermediate_size": None,
    "n_routed_experts": None,
    "n_shared_experts": None,
    "num_experts_per_tok": None,
    "n_group": None,
    "topk_group": None,
    "topk_method": None,
    "scoring_func": None,
    "norm_topk_prob": None,
    "routed_scaling_factor": None,
}


def check_config(output: TargetConfig, source: TargetConfig) -> list[Finding]:
    """Return a finding for each key by which a quantized target is another model than its source.

    Args:
        output: the quantized target's config.
        source: the config of what it was made from.
    """
    theirs = dict(_deciding(source))
    return [_another(key, mine, theirs[key]) for key, mine in _deciding(output) if mine != theirs[key]]


def _deciding(config: TargetConfig) -> Iterator[tuple[str, Any]]:
    for key, unstated in KEYS.items():
        value = config.text.get(key)
        yield key, unstated if value is None else value
    yield "tie_word_embeddings", config.tied
    yield "rope_parameters", _rope(config)


def _rope(config: TargetConfig) -> Any:
    """Return RoPE in one spelling of the two; as it stands where it is of a kind that kconv does not read."""
    try:
        return read_rope(config.rope)
    except KconvError:
        return config.rope


def _another(key: str, mine: Any, its: Any) -> Finding:
    said, wanted = ("not stated" if value is None else repr(value) for value in (mine, its))
    return Finding(
        rule="K393",
        severity="error",
        where=f"config.json: {key}",
        message=f"it is {said}, and the source's is {wanted}",
        fix=AS_THE_SOURCE,
    )
