"""Configs of draft heads as their makers write them, at full size, and the same cut down to a small spec."""

from __future__ import annotations

from typing import Any

from kconv.checkpoint.manifest import Hints
from kconv.convert.config import ReadConfig, read_config
from kconv.drafters.eagle3 import EAGLE3
from kconv.drafters.spec import HeadSpec, Mla
from kconv.engines import by_name

from .heads import KIMI_MHA as KIMI_MHA
from .heads import KIMI_MLA as KIMI_MLA

_EAGLE = {
    "eagle_aux_hidden_state_layer_ids": [1, 29, 57],
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
_YARN = {
    "type": "yarn",
    "factor": 64.0,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}

TORCHSPEC_MLA: dict[str, Any] = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "torch_dtype": "bfloat16",
    "rope_theta": 50000.0,
    "rope_scaling": _YARN,
    "eagle_config": _EAGLE,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "pad_token_id": 0,
}
# States neither the captured layers nor the draft's vocabulary.
TORCHSPEC_MHA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 7168,
    "intermediate_size": 12288,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 262144,
    "vocab_size": 163840,
    "rope_theta": 50000.0,
    "rope_scaling": _YARN | {"beta_fast": 32.0},
    "attention_bias": False,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "torch_dtype": "bfloat16",
}
_MODELOPT_EAGLE = _EAGLE | {
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}
# ModelOpt 0.47's kimik2 template: keys of the target's mixture of experts, and no draft_vocab_size.
MODELOPT_KIMIK2: dict[str, Any] = {key: value for key, value in TORCHSPEC_MLA.items() if key != "draft_vocab_size"} | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "first_k_dense_replace": 1,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "rope_scaling": _YARN | {"rope_type": "yarn", "rope_theta": 50000.0},
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "transformers_version": "4.51.3",
    "eagle_config": _MODELOPT_EAGLE,
}
# ModelOpt 0.47's llama template, which injects a YaRN of its own.
MODELOPT_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.01,
    "intermediate_size": 14336,
    "max_position_embeddings": 262144,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": None,
    "use_cache": True,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048},
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_theta": 10000,
    "eagle_config": _MODELOPT_EAGLE,
}


def cut(config: dict[str, Any], spec: HeadSpec) -> dict[str, Any]:
    """Return a maker's config with a small spec's dims and captured layers in the keys that it has."""
    dims: dict[str, Any] = {
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "vocab_size": spec.vocab,
        "draft_vocab_size": spec.draft_vocab,
        "max_position_embeddings": spec.max_positions,
        "num_attention_heads": spec.attention.heads,
        "num_key_value_heads": spec.attention.heads,
    }
    if isinstance(spec.attention, Mla):
        dims |= {key: value for key, value in vars(spec.attention).items() if key != "heads"}
    else:
        dims |= {"num_key_value_heads": spec.attention.kv_heads, "head_dim": spec.attention.head_dim}
    small = config | {key: value for key, value in dims.items() if key in config}
    if "eagle_config" in config:
        ids = {"eagle_aux_hidden_state_layer_ids": list(spec.captured)}
        small["eagle_config"] = config["eagle_config"] | ids
    return small


def read(config: dict[str, Any], dtype: str = "BF16", tensors: Any = None, **hints: Any) -> ReadConfig:
    """Read a config as a head's, with no tensor to look at but the given ones."""
    return read_config(config, tensors or {}, drafter=EAGLE3, dtype=dtype, hints=Hints(**hints))


def written(spec: HeadSpec, **changes: Any) -> dict[str, Any]:
    """Return a sound vLLM config with keys changed; a key set to `...` is taken out."""
    config = by_name("vllm").write_config(spec) | changes
    return {key: value for key, value in config.items() if value is not ...}
