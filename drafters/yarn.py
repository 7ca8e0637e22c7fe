"""What YaRN scales besides the frequencies.

YaRN has two readings, one per kind of attention. They agree except as noted here.

* GQA: cos and sin are scaled by `attention_factor`; without it by `m(mscale) / m(mscale_all_dim)` where both
  are set and not zero, else by `m(1)`. The softmax keeps `head_dim ** -0.5`. transformers and vLLM agree:
  https://github.com/huggingface/transformers/blob/v5.14.1/src/transformers/modeling_rope_utils.py#L411-L415
  https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/rotary_embedding/yarn_scaling_rope.py#L38-L46
* MLA: cos and sin are scaled by `m(mscale) / m(mscale_all_dim)`, where a missing `mscale` is 1 and a missing
  `mscale_all_dim` is 0, and the softmax by `m(mscale_all_dim) ** 2` on top of `qk_head_dim ** -0.5`:
  https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/rotary_embedding/deepseek_scaling_rope.py#L52-L55
  https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_v2.py#L1129-L1136
  transformers applies the GQA rule to MLA's cos and sin, so it agrees if both or neither are set, and differs if
  only one is.

`m(s) = 0.1 * s * ln(factor) + 1`, and 1 for a factor of 1 or less. On MLA, vLLM ignores an `attention_factor`
other than 1.0, and for 1.0 it does *not* scale the softmax
(https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_v2.py#L1115-L1120);
here, as in transformers, it only replaces the factor of cos and sin.
"""

from __future__ import annotations

import math

from .spec import Gqa, Mla, Rope, Yarn


def m(yarn: Yarn, mscale: float) -> float:
    """Return YaRN's `m(s)`, as defined in the module's docstring."""
    return 0.1 * mscale * math.log(yarn.factor) + 1.0 if yarn.factor > 1 else 1.0


def cos_sin_factor(rope: Rope, attention: Gqa | Mla) -> float:
    """Return the factor of cos and sin: 1.0 except with YaRN (rules in the module's docstring)."""
    yarn = rope.scaling
    if not isinstance(yarn, Yarn):
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if isinstance(attention, Mla):
        mscale = 1.0 if yarn.mscale is None else yarn.mscale
        return m(yarn, mscale) / m(yarn, yarn.mscale_all_dim or 0.0)
    if yarn.mscale and yarn.mscale_all_dim:
        return m(yarn, yarn.mscale) / m(yarn, yarn.mscale_all_dim)
    return m(yarn, 1.0)


def softmax_scale(rope: Rope, attention: Gqa | Mla) -> float:
    """Return the factor of the dot product of query and key before the softmax."""
    if isinstance(attention, Gqa):
        return attention.head_dim**-0.5
    scale = (attention.qk_nope_head_dim + attention.qk_rope_head_dim) ** -0.5
    if isinstance(rope.scaling, Yarn):
        scale *= m(rope.scaling, rope.scaling.mscale_all_dim or 0.0) ** 2
    return scale
