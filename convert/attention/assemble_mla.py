"""MLA from its parts.

Engines build their kernels for Kimi-K2's own latent (512) and rotary dims (64); a smaller latent is filled up with
zeros. RMSNorm then divides by the mean over 512 entries, not over r: the rows of kv_a_proj grow by sqrt(512 / r) and
the gain shrinks by the same, and what leaves the norm is what left it before, its epsilon included. Rotary pairs that
are added hold zeros, behind a ladder of the same frequencies (`ladder.lengthen`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...head.rope import partial_factor
from ...head.spec import Gqa, Mla, Rope
from ...head.yarn import cos_sin_factor, softmax_scale
from .ladder import Ladder, lengthen
from .rotary import Split
from .swap import Attention


@dataclass(frozen=True)
class Shape:
    """The dims of an MLA head, and how much of them is used.

    Attributes:
        latent: entries of the latent that hold something; at most `kv_lora_rank`.
        rotary: rotary dims that hold something; at most `qk_rope_head_dim`.
        q_lora_rank: of the queries' latent, which SGLang and vLLM need.
        kv_lora_rank, qk_rope_head_dim: as the engine sees them.
    """

    latent: int = 512
    rotary: int = 64
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64


@dataclass(frozen=True)
class Latents:
    """What is behind the two norms: down `[r, attn_in]` with gain 1, and up.

    Attributes:
        query_down, query_up: `[q_lora_rank, attn_in]` and `[heads, nope + rope, q_lora_rank]`, softmax scale 1.
        kv_down, kv_up: `[latent, attn_in]` and `[kv_heads, nope + v_head_dim, latent]`.
    """

    query_down: Tensor
    query_up: Tensor
    kv_down: Tensor
    kv_up: Tensor


def assemble_mla(split: Split, latents: Latents, output: Tensor, ladder: Ladder, heads: int) -> Attention:
    """Return the MLA of these parts.

    Args:
        split: the shared rotary key; the other dims are the latents'.
        latents: of queries, and of keys and values.
        output: o_proj, `[hidden, heads, v_head_dim]`.
        ladder: the rotary embedding.
        heads: query heads.
    """
    nope, rotary, v_dim = split.key_nope.shape[1], len(split.key_rope), output.shape[2]
    dims = Mla(heads, len(latents.query_down), len(latents.kv_down), nope, rotary, v_dim)
    scale = 1 / softmax_scale(ladder.rope, dims)
    by_dim = output.new_full((nope + rotary, 1), scale)
    by_dim[nope:] /= cos_sin_factor(ladder.rope, dims) ** 2
    group = heads // len(latents.kv_up)
    return Attention(
        dims,
        ladder.rope,
        {
            "0.q_a_proj": latents.query_down,
            "0.q_a_layernorm": output.new_ones(dims.q_lora_rank),
            "0.q_b_proj": (latents.query_up * by_dim).flatten(0, 1),
            "0.kv_a_proj_with_mqa": torch.cat([latents.kv_down, split.key_rope]),
            "0.kv_a_layernorm": output.new_ones(dims.kv_lora_rank),
            "0.kv_b_proj": latents.kv_up.repeat_interleave(group, dim=0).flatten(0, 1),
            "0.o_proj": output.flatten(1, 2),
        },
    )


def as_gqa(split: Split, value: Tensor, output: Tensor, ladder: Ladder) -> Attention:
    """Return the same attention before its rank is cut, as a GQA with one more set of dims: to see what RoPE costs.

    Args:
        split: the shared rotary key and the rest.
        value: `[kv_heads, v_dim, attn_in]`.
        output: `[hidden, heads, v_dim]`.
        ladder: the rotary embedding.
    """
    kv_heads, heads = len(split.key_nope), len(split.query_nope)
    rotary, nope = len(split.key_rope), split.key_nope.shape[1]
    head_dim = max(rotary + nope, value.shape[1])
    dims = Gqa(heads, kv_heads, head_dim)
    rope: Rope = replace(ladder.rope, partial_rotary_factor=partial_factor(rotary, head_dim))
    halves = torch.cat([torch.arange(0, rotary, 2), torch.arange(1, rotary, 2)])
    query = torch.cat([split.query_rope[:, halves] / cos_sin_factor(rope, dims) ** 2, split.query_nope], dim=1)
    key = torch.cat([split.key_rope[halves].expand(kv_heads, -1, -1), split.key_nope], dim=1)

    def pad(rows: Tensor) -> Tensor:
        zeros = rows.new_zeros(rows.shape[0], head_dim - rows.shape[1], rows.shape[2])
        return torch.cat([rows, zeros], dim=1).flatten(0, 1)

    return Attention(
        dims,
        rope,
        {
            "0.q_proj": pad(query / softmax_scale(rope, dims)),
            "0.k_proj": pad(key),
            "0.v_proj": pad(value),
            "0.o_proj": pad(output.permute(1, 2, 0)).T.contiguous(),
        },
    )


def pad_mla(mla: Attention, shape: Shape) -> Attention:
    """Return an MLA with its latent and rotary dims filled up with zeros to an engine's, computing the same.

    The softmax scale hangs on the number of dims, so the queries take the quotient.
    """
    dims = mla.dims
    assert isinstance(dims, Mla)
    wide = replace(dims, kv_lora_rank=shape.kv_lora_rank, qk_rope_head_dim=shape.qk_rope_head_dim)
    more_latent, more_rope = wide.kv_lora_rank - dims.kv_lora_rank, wide.qk_rope_head_dim - dims.qk_rope_head_dim
    rope = lengthen(mla.rope, dims.qk_rope_head_dim // 2, wide.qk_rope_head_dim // 2)
    weights = dict(mla.weights)
    growth = (wide.kv_lora_rank / dims.kv_lora_rank) ** 0.5

    query = weights["0.q_b_proj"].unflatten(0, (dims.heads, -1)) * (
        softmax_scale(mla.rope, dims) / softmax_scale(rope, wide)
    )
    weights["0.q_b_proj"] = _more(query, more_rope, dim=1).flatten(0, 1)
    down, key_rope = weights["0.kv_a_proj_with_mqa"].split([dims.kv_lora_rank, dims.qk_rope_head_dim])
    weights["0.kv_a_proj_with_mqa"] = torch.cat([_more(down * growth, more_latent), _more(key_rope, more_rope)])
    gain = weights["0.kv_a_layernorm"] / growth
    weights["0.kv_a_layernorm"] = torch.cat([gain, gain.new_ones(more_latent)])
    weights["0.kv_b_proj"] = _more(weights["0.kv_b_proj"], more_latent, dim=1)
    return Attention(wide, rope, weights)


def _more(rows: Tensor, count: int, dim: int = 0) -> Tensor:
    shape = list(rows.shape)
    shape[dim] = count
    return torch.cat([rows, rows.new_zeros(shape)], dim=dim)
