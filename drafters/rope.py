"""Rotary position embedding of a head.

`yarn` has the other things that YaRN scales besides the frequencies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import ConfigUnsupported
from .spec import Gqa, Linear, Llama3, Mla, Rope, Yarn
from .yarn import cos_sin_factor


def rotary_dims(attention: Gqa | Mla, rope: Rope) -> int:
    """Return how many dims of a query or key head are rotated.

    GQA truncates `head_dim * partial_rotary_factor` as engines do
    (https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/rotary_embedding/__init__.py#L69-L72).

    Raises:
        ConfigUnsupported: the number is odd or zero, or MLA has a partial factor.
    """
    if isinstance(attention, Mla):
        if rope.partial_rotary_factor != 1.0:
            raise ConfigUnsupported(
                f"partial_rotary_factor is {rope.partial_rotary_factor} on an MLA head",
                where="partial_rotary_factor",
                fix="Remove it. qk_rope_head_dim decides which dims MLA rotates.",
            )
        dims = attention.qk_rope_head_dim
    else:
        dims = int(attention.head_dim * rope.partial_rotary_factor)
    if dims < 2 or dims % 2:
        raise ConfigUnsupported(
            f"RoPE rotates pairs of dims, but {dims} is not a positive even number",
            where="qk_rope_head_dim" if isinstance(attention, Mla) else "head_dim x partial_rotary_factor",
            fix="Give the head an even number of rotary dims.",
        )
    return dims


def partial_factor(rotary: int, head_dim: int) -> float:
    """Return the `partial_rotary_factor` with which a GQA head of `head_dim` has `rotary` rotary dims.

    It is the quotient, or the next float above it if rounding makes its product with `head_dim` fall short of a whole
    number. 64 / 392 * 392 does so: it truncates to 63.
    """
    quotient = rotary / head_dim
    return quotient if int(head_dim * quotient) == rotary else math.nextafter(quotient, 1.0)


def inverse_frequencies(rope: Rope, dims: int) -> Tensor:
    """Return the angle per position of each pair, fp32 radians, shape `[dims / 2]`."""
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
    """Blend from unchanged (fast pairs) to divided by `factor` (slow pairs), as in arXiv 2309.00071, section 3.2."""

    def pair_with(turns: float) -> float:
        """Return the pair that makes this many turns over the original context."""
        return dims * math.log(yarn.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with(yarn.beta_fast)), 0)
    # Engines clamp the last *pair* by the number of *dims*, and so do trainers.
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


def cos_sin(rope: Rope, attention: Gqa | Mla, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of each pair at each position, including YaRN's factor.

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
    """Rotate the leading dims of a head half-split (neox): dim j pairs with dim j + rotary dims / 2.

    Args:
        x: `[..., T, head_dim]`; dims after the rotary ones pass unchanged.
        cos, sin: `[..., T, rotary dims / 2]` in the dtype of x.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent dims (DeepSeek's interleaved order): dim 2j pairs with dim 2j + 1.

    Args:
        x: `[..., T, rotary dims]`.
        cos, sin: `[..., T, rotary dims / 2]` in the dtype of x.
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
