"""What several engines have no place for."""

from __future__ import annotations

from ..head.spec import Gqa, HeadSpec, Mla, Yarn
from ..head.yarn import cos_sin_factor, m
from .layout import Limit

VLLM_SOURCE = "https://github.com/vllm-project/vllm/blob/v0.32.0/vllm"
SGLANG_SOURCE = "https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt"
# Two files as of one commit each, between 1.3 and 1.4; the lines are given where they are named.
TRTLLM_MODEL = (
    "https://github.com/NVIDIA/TensorRT-LLM/blob/00679c66c3e38f6d2651ad0a5bef0f94d862e36c/"
    "tensorrt_llm/_torch/models/modeling_speculative.py"
)
TRTLLM_ROPE = (
    "https://github.com/NVIDIA/TensorRT-LLM/blob/b386a7fff981548964f58eb5f7e2a8e015c661bb/"
    "tensorrt_llm/_torch/attention/backends/interface.py"
)


def is_mla(spec: HeadSpec) -> bool:
    """Say whether a head has latent attention."""
    return isinstance(spec.attention, Mla)


def yarn_of(spec: HeadSpec) -> Yarn | None:
    """Return a head's YaRN, None where it has none."""
    return spec.rope.scaling if isinstance(spec.rope.scaling, Yarn) else None


def _mla_is_no_deepseek_yarn(spec: HeadSpec) -> bool:
    yarn = yarn_of(spec)
    return is_mla(spec) and spec.rope.scaling is not None and (yarn is None or yarn.attention_factor is not None)


def _mla_states_one_mscale(spec: HeadSpec) -> bool:
    yarn = yarn_of(spec)
    return is_mla(spec) and yarn is not None and (yarn.mscale is None) != (yarn.mscale_all_dim is None)


MLA_ROPE = (
    Limit(
        _mla_is_no_deepseek_yarn,
        "engines take each scaled RoPE of an MLA head for DeepSeek's YaRN, and read no attention_factor",
        "Serve this head with the code it was trained by, or train one with YaRN and no attention_factor.",
        f"{VLLM_SOURCE}/model_executor/models/deepseek_v2.py#L1115-L1120",
    ),
    Limit(
        _mla_states_one_mscale,
        "the config states one of mscale and mscale_all_dim, and engines put different values for the other",
        "State both, as the head was trained.",
        f"{VLLM_SOURCE}/model_executor/layers/rotary_embedding/deepseek_scaling_rope.py#L52-L55",
    ),
)
FC_NORMS_TWICE = Limit(
    lambda s: s.norms.before_fc and s.norms.fc,
    "TensorRT-LLM drops the norm before fc (norm_before_fc) where there is one for each state (fc_norm)",
    "Serve this head with vLLM.",
    f"{TRTLLM_MODEL}#L1009-L1018",
)


def trtllm_scales_otherwise(spec: HeadSpec) -> bool:
    """Say whether TensorRT-LLM scales cos and sin of a GQA head by another factor than transformers and vLLM.

    It reads every YaRN as DeepSeek's, `m(mscale) / m(mscale_all_dim)` with 1 and 0 for what is not stated, and no
    `attention_factor`.
    """
    yarn = yarn_of(spec)
    if yarn is None or not isinstance(spec.attention, Gqa):
        return False
    factor = m(yarn, 1.0 if yarn.mscale is None else yarn.mscale) / m(yarn, yarn.mscale_all_dim or 0.0)
    return factor != cos_sin_factor(spec.rope, spec.attention)


def sglang_scales_otherwise(spec: HeadSpec) -> bool:
    """Say whether SGLang scales cos and sin of a GQA head by another factor than transformers and vLLM.

    It takes the quotient where both values are stated, also where one is 0, and reads no `attention_factor`:
    https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/layers/rotary_embedding/yarn.py
    """
    yarn = yarn_of(spec)
    if yarn is None or not isinstance(spec.attention, Gqa):
        return False
    one, all_dim = yarn.mscale, yarn.mscale_all_dim
    factor = m(yarn, 1.0) if one is None or all_dim is None else m(yarn, one) / m(yarn, all_dim)
    return factor != cos_sin_factor(spec.rope, spec.attention)
