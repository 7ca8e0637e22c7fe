"""SGLang's layout of an Eagle3 head.

Loaders: https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/llama_eagle3.py and
https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/kimi_k25_eagle3.py
"""

from __future__ import annotations

from typing import Any

from ..head.spec import Gqa, HeadSpec
from .config import write_keys
from .identity import identity
from .keys import CONVENTION, INPUTS, OUTPUTS, TOP
from .layout import Layout, Limit, Row, TargetLimit
from .limits import MLA_ROPE, SGLANG_SOURCE, is_mla, sglang_scales_otherwise
from .marks import eagle_config
from .rows import HIDDEN, INPUT, MIDLAYER, beside, head_rows, instead, later_norm

MLA_LOADER = f"{SGLANG_SOURCE}/models/kimi_k25_eagle3.py"
GQA_LOADER = f"{SGLANG_SOURCE}/models/llama_eagle3.py"
# SGLang's older names of fc_norm.
AUX_NORMS = tuple(Row(f"aux_norm_{level}.weight", (f"fc_norm.{a}",)) for a, level in enumerate(("low", "mid", "high")))
LM_HEAD = {
    "lm_head": "SGLang serves a random lm_head where draft_vocab_size is set and the tensor is not there "
    "(https://github.com/sgl-project/sglang/issues/27829)"
}

# Targets of which SGLang takes a list by DeepSeek's rule; those of Kimi K2.5 and later wrap such a model.
DEEPSEEKS = frozenset(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"))
CAPTURE = f"{SGLANG_SOURCE}/models/deepseek_v2.py"
TARGET_LIMITS = (
    TargetLimit(
        lambda spec, target: bool(target.model_type) and target.model_type not in DEEPSEEKS,
        "kconv writes SGLang's list of captured layers for a DeepSeek or Kimi-K2 target, and others take it otherwise",
        "Give the target that the head was trained on, or serve this head with vLLM or TensorRT-LLM.",
        f"{CAPTURE}#L3470-L3473",
    ),
    TargetLimit(
        lambda spec, target: target.layers is not None and spec.captured[-1] >= target.layers - 1,
        "SGLang captures before a layer runs, and so never the output of the target's last one",
        "Serve this head with vLLM or TensorRT-LLM.",
        f"{CAPTURE}#L3193-L3194",
    ),
)
EMBEDDING = {
    "embed_tokens": "SGLang takes the target's embedding in place of the head's own "
    f"({SGLANG_SOURCE}/speculative/eagle_worker_v2.py#L353-L363)"
}


def captured_keys(spec: HeadSpec) -> dict[str, Any]:
    """Return the keys of eagle_config by which SGLang finds the captured layers, for a DeepSeek or Kimi target.

    There it takes a list that begins with 1 for layer outputs, and any other for layer inputs:
    https://github.com/sgl-project/sglang/pull/25454
    """
    outputs = spec.captured[0] == 1
    return {
        "eagle_aux_hidden_state_layer_ids": [i if outputs else i + 1 for i in spec.captured],
        CONVENTION: OUTPUTS if outputs else INPUTS,
        "use_aux_hidden_state": True,
    }


def _write(spec: HeadSpec) -> dict[str, Any]:
    config: dict[str, Any] = identity(spec) | write_keys(spec)
    config["num_aux_hidden_states"] = len(spec.captured)
    config["eagle_config"] |= captured_keys(spec)
    return config


SGLANG = Layout(
    name="sglang",
    engine="SGLang 0.5.23 or newer (MHA/GQA: LlamaForCausalLMEagle3; MLA: Eagle3DeepseekV2ForCausalLM)",
    rows=head_rows("layers.{i}", later=(HIDDEN,)) + instead(MIDLAYER, AUX_NORMS) + beside(later_norm(INPUT)),
    told_by=lambda config, names: (
        "aux_norm_low.weight" in names
        or (CONVENTION in eagle_config(config) and TOP not in config and "num_aux_hidden_states" in config)
    ),
    write_config=_write,
    needs=LM_HEAD,
    replaces=EMBEDDING,
    target_limits=TARGET_LIMITS,
    limits=(
        *MLA_ROPE,
        Limit(
            lambda s: s.captured[0] == 0,
            "SGLang cannot be told to capture the output of layer 0 of a DeepSeek or Kimi target",
            "Serve this head with vLLM or TensorRT-LLM.",
            f"{CAPTURE}#L3470-L3473",
        ),
        Limit(
            lambda s: len(s.captured) * s.target_hidden == s.hidden,
            "SGLang skips fc where what it reads is as wide as the head",
            "Serve this head with vLLM.",
            f"{GQA_LOADER}#L238",
        ),
        Limit(
            lambda s: s.norms.before_residual,
            "SGLang takes the residual before hidden_norm, always (norm_before_residual is not read)",
            "Serve this head with vLLM.",
            f"{GQA_LOADER}#L99",
        ),
        Limit(
            lambda s: is_mla(s) and s.layers != 1,
            "SGLang's MLA head has one layer",
            "Serve this head with vLLM or TensorRT-LLM.",
            f"{MLA_LOADER}#L243",
        ),
        Limit(
            lambda s: is_mla(s) and s.norms.before_fc,
            "SGLang's MLA head has no norm before fc (norm_before_fc)",
            "Serve this head with TensorRT-LLM, or train one without norm_before_fc.",
            f"{MLA_LOADER}#L286-L295",
        ),
        Limit(
            lambda s: isinstance(s.attention, Gqa) and s.attention.bias,
            "SGLang drops the biases of q_proj, k_proj and v_proj in silence",
            "Serve this head with vLLM or TensorRT-LLM.",
            f"{GQA_LOADER}#L72",
        ),
        Limit(
            lambda s: isinstance(s.attention, Gqa) and s.fc_bias,
            "SGLang builds a bias of o_proj too where a GQA head's config asks for fc.bias, and leaves it unfilled",
            "Serve this head with TensorRT-LLM, or train one without the bias.",
            f"{SGLANG_SOURCE}/models/llama.py#L337-L341",
        ),
        Limit(
            lambda s: s.mlp_bias,
            "SGLang drops the biases of the MLP in silence",
            "Serve this head with TensorRT-LLM, or train one without mlp_bias.",
            f"{SGLANG_SOURCE}/models/llama.py#L101-L109",
        ),
        Limit(
            sglang_scales_otherwise,
            "SGLang reads no attention_factor of YaRN, and takes an mscale of 0 otherwise than the trainer does",
            "Serve this head with vLLM.",
            f"{SGLANG_SOURCE}/layers/rotary_embedding/yarn.py#L122-L131",
        ),
        Limit(
            is_mla,
            "SGLang needs kv_b_proj of an MLA head unquantized",
            "Leave kv_b_proj out when the head is quantized, or serve it with vLLM.",
            f"{MLA_LOADER}#L511-L515",
            holds="*.kv_b_proj.weight_scale*",
        ),
        Limit(
            lambda s: isinstance(s.attention, Gqa),
            "SGLang's fc of a GQA head is a plain linear: it drops the scales of a quantized one in silence",
            "Leave fc out when the head is quantized, or serve it with vLLM or TensorRT-LLM.",
            f"{GQA_LOADER}#L163-L167",
            holds="fc.weight_scale*",
        ),
        Limit(
            is_mla,
            "SGLang drops an MLA head's NVFP4 config, and would take its packed bytes for weights",
            "Serve the unquantized head, or this one with vLLM or TensorRT-LLM.",
            f"{MLA_LOADER}#L335-L340",
            holds="*.weight_scale_2",
        ),
    ),
)
