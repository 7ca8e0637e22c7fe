"""The config keys of draft heads, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Values = Mapping[str, Any]

# Where a config lists the captured layers.
IDS = "eagle_aux_hidden_state_layer_ids"
TOP, NESTED = IDS, f"eagle_config.{IDS}"
# What kconv writes next to each list; no engine reads it.
CONVENTION = "aux_hidden_state_layer_ids_are"
OUTPUTS, INPUTS = "layer_outputs", "layer_inputs"


@dataclass(frozen=True)
class Key:
    """Where a config holds one field of the spec.

    Attributes:
        field: dotted path of the field in `HeadSpec`.
        names: dotted paths in config.json. Reading takes those that exist and refuses a contradiction; writing fills
            each of them, since engines look in different places.
        kind: "count" (positive int), "depth" (a count of layers), "vocabulary" (a count of tokens), "fraction" (a
            small number above 0), "flag" or "token" (id, list of ids or null).
        default: computes the field's value from what was read before it, if the config lacks the key; None if a missing
            key is an error.
        also: dotted paths that are read too, but never written.
    """

    field: str
    names: tuple[str, ...]
    kind: str
    default: Callable[[Values], Any] | None = None
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConfigTable:
    """How the config of one layout differs from the keys below.

    Attributes:
        nested: an object whose keys replace those of the top level; empty if there is none.
        ballast: keys that mean nothing outside this layout.
        otherwise: keys with another meaning here than below, and the only values that kconv supports; they are not
            read, and not copied.
        must_state: keys whose absence could be read in two ways, with the sentence that says so.
        adapt: returns replacements for keys whose values differ from what the head was trained with.
        trained: what the layout's trainer uses for facts (`convert.facts`) that the config does not state.
    """

    nested: str = ""
    ballast: frozenset[str] = frozenset()
    otherwise: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    must_state: Mapping[str, str] = field(default_factory=dict)
    adapt: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    trained: Mapping[str, Any] = field(default_factory=dict)


def _off(_: Values) -> bool:
    return False


def _none(_: Values) -> None:
    return None


COMMON = (
    Key("hidden", ("hidden_size",), "count"),
    Key("target_hidden", ("target_hidden_size",), "count", lambda v: v["hidden"]),
    Key("intermediate", ("intermediate_size",), "count"),
    Key("layers", ("num_hidden_layers",), "depth"),
    Key("vocab", ("vocab_size",), "vocabulary"),
    # ModelOpt's kimik2 template omits the key even when it exports a reduced vocabulary:
    # https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/export/plugins/hf_spec_configs.py#L58
    Key("draft_vocab", ("draft_vocab_size",), "vocabulary", lambda v: v["lm_head_rows"] or v["vocab"]),
    Key("eps", ("rms_norm_eps",), "fraction"),
    Key("mlp_bias", ("mlp_bias",), "flag", _off),
    Key("fc_bias", ("bias",), "flag", _off),
    Key("norms.before_residual", ("norm_before_residual",), "flag", _off),
    # TensorRT-LLM reads it inside eagle_config only, vLLM in either place.
    Key("norms.before_fc", ("norm_before_fc", "eagle_config.norm_before_fc"), "flag", _off),
    # The second name is SGLang's older one.
    Key("norms.fc", ("fc_norm",), "flag", _off, also=("use_aux_norm",)),
    # The second name is TensorRT-LLM's older one.
    Key("norms.output", ("norm_output", "eagle_config.return_hidden_post_norm"), "flag", _off),
    Key("tokens.bos", ("bos_token_id",), "token", _none),
    Key("tokens.eos", ("eos_token_id",), "token", _none),
    Key("tokens.pad", ("pad_token_id",), "token", _none),
)

GQA = (
    Key("attention.heads", ("num_attention_heads",), "count"),
    Key("attention.kv_heads", ("num_key_value_heads",), "count", lambda v: v["attention.heads"]),
    Key("attention.head_dim", ("head_dim",), "count", lambda v: v["hidden"] // v["attention.heads"]),
    Key("attention.bias", ("attention_bias",), "flag", _off),
)

MLA = (
    # TensorRT-LLM requires num_key_value_heads for an MLA head too.
    Key("attention.heads", ("num_attention_heads", "num_key_value_heads"), "count"),
    Key("attention.q_lora_rank", ("q_lora_rank",), "count"),
    Key("attention.kv_lora_rank", ("kv_lora_rank",), "count"),
    Key("attention.qk_nope_head_dim", ("qk_nope_head_dim",), "count"),
    Key("attention.qk_rope_head_dim", ("qk_rope_head_dim",), "count"),
    Key("attention.v_head_dim", ("v_head_dim",), "count"),
)

# Keys that change what a head computes, and the only values that kconv supports. Any other value is refused.
FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "tie_word_embeddings": (False, None),
    "quantization_config": (None,),
    "logit_scale": (1, None),
    "use_sliding_window": (False, None),
    "qkv_bias": (False, None),
    "rope_interleave": (True, None),
    # Kimi K3's draft heads are trained without RoPE; vLLM's and SGLang's Eagle3 classes ignore the key and apply RoPE:
    # https://github.com/lightseekorg/TorchSpec/blob/a31111ee47e5815638d9a830d79c34eb4f5c4502/configs/draft_models/kimi_k3_eagle3_mla.json#L19
    "mla_use_nope": (False, None),
    # RoPE under names that vLLM or TensorRT-LLM reads (RopeParams.from_config). TensorRT-LLM even takes rotary_emb_base
    # for the number of rotary dims, and lets a top-level original_max_position_embeddings win:
    # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/transformers_utils/config.py#L627-L637
    # https://github.com/NVIDIA/TensorRT-LLM/blob/b386a7fff981548964f58eb5f7e2a8e015c661bb/tensorrt_llm/_torch/attention/backends/interface.py
    "rotary_pct": (1, None),
    "rotary_emb_fraction": (1, None),
    "rotary_dim": (None,),
    "rotary_emb_base": (None,),
    "original_max_position_embeddings": (None,),
    # https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/llama.py#L335
    "rope_is_neox_style": (True,),
    # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/llama.py#L280
    "is_causal": (True,),
    # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_v2.py#L1138
    "index_topk": (None,),
    "eagle_config.use_aux_hidden_state": (True, None),
    "eagle_config.use_input_layernorm_in_first_layer": (True, None),
    "eagle_config.use_last_layernorm": (True, None),
    "eagle_config.use_mtp_layernorm": (False, None),
    "eagle_config.next_layer_regular": (True, None),
    "eagle_config.eh_proj_before_attn": (False, None),
    "eagle_config.parallel_draft_step": (1, None),
    "eagle_config.parallel_draft_heads_num_layers": (1, None),
}

# Read elsewhere: RoPE (convert.rope), captured layers (convert.captured), identity, dtype.
ELSEWHERE = frozenset(
    """
    architectures model_type dtype torch_dtype rope_theta rope_scaling rope_parameters
    partial_rotary_factor max_position_embeddings num_aux_hidden_states
    eagle_aux_hidden_state_layer_ids eagle_config.eagle_aux_hidden_state_layer_ids
    eagle_config.aux_hidden_state_layer_ids_are aux_hidden_state_layer_ids_are kv_lora_rank sliding_window layer_types
    """.split()
)

# Keys that transformers writes into every config, and the mixture-of-experts keys that ModelOpt's kimik2 template
# copies although a head's MLP is dense. Nothing in a draft head depends on them.
BALLAST = frozenset(
    """
    _name_or_path _attn_implementation auto_map transformers_version use_cache initializer_range
    attention_dropout pretraining_tp chunk_size_feed_forward diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size ep_size aux_loss_alpha seq_aux id2label label2id
    forced_bos_token_id forced_eos_token_id is_decoder is_encoder_decoder length_penalty max_length
    min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_scores problem_type pruned_heads remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate sep_token_id decoder_start_token_id
    suppress_tokens begin_suppress_tokens bad_words_ids exponential_decay_length_penalty
    finetuning_task prefix task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torchscript typical_p use_bfloat16 cross_attention_hidden_size
    add_cross_attention max_window_layers first_k_dense_replace moe_intermediate_size moe_layer_freq
    n_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok
    num_nextn_predict_layers routed_scaling_factor scoring_func topk_group topk_method qk_head_dim
    """.split()
)
