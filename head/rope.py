"""Rotary position embedding of a head. What belongs here: frequencies, cos and sin, two ways to turn a vector.

YaRN has two readings, one for each attention, and they agree except where said here.

* GQA: cos and sin are scaled by `attention_factor`; without it by `m(mscale) / m(mscale_all_dim)` where both
  are set and not zero, else by `m(1)`. The softmax keeps `head_dim ** -0.5`. transformers and vLLM agree:
  https://github.com/huggingface/transformers/blob/v5.14.1/src/transformers/modeling_rope_utils.py#L411-L415
  https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/rotary_embedding/yarn_scaling_rope.py#L38-L46
* MLA: cos and sin are scaled by `m(mscale) / m(mscale_all_dim)`, where a missing `mscale` is 1 and a missing
  `mscale_all_dim` is 0, and the softmax by `m(mscale_all_dim) ** 2` on top of `qk_head_dim ** -0.5`:
  https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/rotary_embedding/deepseek_scaling_rope.py#L52-L55
  https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_v2.py#L1129-L1136
  transformers reads MLA's cos and sin by the GQA rule, so it agrees where both or neither are set, and
  differs where only one of the two is.

`m(s) = 0.1 * s * ln(factor) + 1`, and 1 for a factor of 1 or less. On MLA, vLLM ignores an `attention_factor`
other than 1.0, and takes 1.0 to mean that the softmax is *not* scaled
(https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_v2.py#L1115-L1120);
here, as in transformers, it replaces the factor of cos and sin and nothing else.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import ConfigUnsupported
from .spec import Gqa, Linear, Llama3, Mla, Rope, Yarn


def rotary_dims(attention: Gqa | Mla, rope: Rope) -> int:
    """Return how many dims of a query or key head are turned.

    GQA truncates `head_dim * partial_rotary_factor` as engines do
    (https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/rotary_embedding/__init__.py#L69-L72).

    Raises:
        ConfigUnsupported: the number is odd or none is left, or MLA has a partial factor.
    """
    if isinstance(attention, Mla):
        if rope.partial_rotary_factor != 1.0:
            raise ConfigUnsupported(
                f"partial_rotary_factor is {rope.partial_rotary_factor} on an MLA head",
                where="partial_rotary_factor",
                fix="Remove it: qk_rope_head_dim says which dims MLA turns.",
            )
        dims = attention.qk_rope_head_dim
    else:
        dims = int(attention.head_dim * rope.partial_rotary_factor)
    if dims < 2 or dims % 2:
        raise ConfigUnsupported(
            f"RoPE would turn {dims} dims of a head, and it turns pairs",
            where="qk_rope_head_dim" if isinstance(attention, Mla) else "head_dim x partial_rotary_factor",
            fix="Give the head an even number of rotary dims.",
        )
    return dims


def inverse_frequencies(rope: Rope, dims: int) -> Tensor:
    """Return the angle that each pair turns by per position, fp32 radians, shape `[dims / 2]`."""
    plain = 1.0 / rope.theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    match rope.scaling:
        case Yarn() as yarn:
            return _yarn_frequencies(yarn, plain, rope.theta, dims)
        case Llama3() as llama3:
            return _llama3_frequencies(llama3, plain)
        case Linear(factor):
            return plain / factor
        case _:
            return plain


def _yarn_frequencies(yarn: Yarn, plain: Tensor, theta: float, dims: int) -> Tensor:
    """Blend from kept (fast pairs) to divided by `factor` (slow pairs), as in arXiv 2309.00071, section 3.2."""

    def pair_with(turns: float) -> float:
        """Return which pair makes this many turns over the original context."""
        return dims * math.log(yarn.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with(yarn.beta_fast)), 0)
    # Engines clamp the last *pair* by the number of *dims*, and so does whoever trained with them.
    high = min(math.ceil(pair_with(yarn.beta_slow)), dims - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dims // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def _llama3_frequencies(llama3: Llama3, plain: Tensor) -> Tensor:
    """Keep short wavelengths, divide long ones by `factor`, and blend between the two bounds."""
    turns = llama3.original_max_positions * plain / (2 * math.pi)
    if llama3.low_freq_factor == llama3.high_freq_factor:
        kept = (turns > llama3.high_freq_factor).float()
    else:
        span = llama3.high_freq_factor - llama3.low_freq_factor
        kept = ((turns - llama3.low_freq_factor) / span).clamp(0, 1)
    return plain / llama3.factor * (1 - kept) + plain * kept


def _m(yarn: Yarn, mscale: float) -> float:
    return 0.1 * mscale * math.log(yarn.factor) + 1.0 if yarn.factor > 1 else 1.0


def cos_sin_factor(rope: Rope, attention: Gqa | Mla) -> float:
    """Return what cos and sin are multiplied by: 1.0 except with YaRN (rules in the module's docstring)."""
    yarn = rope.scaling
    if not isinstance(yarn, Yarn):
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if isinstance(attention, Mla):
        mscale = 1.0 if yarn.mscale is None else yarn.mscale
        return _m(yarn, mscale) / _m(yarn, yarn.mscale_all_dim or 0.0)
    if yarn.mscale and yarn.mscale_all_dim:
        return _m(yarn, yarn.mscale) / _m(yarn, yarn.mscale_all_dim)
    return _m(yarn, 1.0)


def softmax_scale(rope: Rope, attention: Gqa | Mla) -> float:
    """Return what the dot product of a query and a key is multiplied by before the softmax."""
    if isinstance(attention, Gqa):
        return attention.head_dim**-0.5
    scale = (attention.qk_nope_head_dim + attention.qk_rope_head_dim) ** -0.5
    if isinstance(rope.scaling, Yarn):
        scale *= _m(rope.scaling, rope.scaling.mscale_all_dim or 0.0) ** 2
    return scale


def cos_sin(rope: Rope, attention: Gqa | Mla, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of each pair at each position, YaRN's factor included.

    Args:
        positions: `[..., T]` integers.

    Returns:
        Two fp32 tensors of shape `[..., T, rotary dims / 2]`.
    """
    frequencies = inverse_frequencies(rope, rotary_dims(attention, rope)).to(positions.device)
    angles = positions[..., None].float() * frequencies
    factor = cos_sin_factor(rope, attention)
    return angles.cos() * factor, angles.sin() * factor


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the leading dims of a head half-split (neox): dim j pairs with dim j + rotary dims / 2.

    Args:
        x: `[..., T, head_dim]`; dims past the rotary ones pass unchanged.
        cos, sin: `[..., T, rotary dims / 2]` in the dtype of x.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn neighbouring dims (DeepSeek's interleaved order): dim 2j pairs with dim 2j + 1.

    Args:
        x: `[..., T, rotary dims]`.
        cos, sin: `[..., T, rotary dims / 2]` in the dtype of x.
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
