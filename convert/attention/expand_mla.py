"""The exact part of MLA to MHA: everything but the two latent norms.

With linear maps L_q and L_kv in place of the normed latents, `q_a_layernorm(q_a_proj x)` and
`kv_a_layernorm(kv_a_proj x)`, an MLA head *is* an MHA head:

* a query or key head is [rope | nope | zeros]: RoPE turns the first `partial_rotary_factor * head_dim` dims of it,
  half-split, so MLA's interleaved pairs (0,1), (2,3), ... are put in the order 0, 2, ..., 1, 3, ...; the same order on
  both sides leaves every dot product as it is;
* the one rotary key is repeated for each head;
* a value head is [v | zeros], and o_proj has a column of zeros for each of these;
* MLA scales its softmax by `(nope + rope) ** -0.5` and YaRN's `m(mscale_all_dim) ** 2`, MHA by `head_dim ** -0.5`: the
  quotient goes into the queries, as does the quotient of what the two multiply cos and sin by. The config keeps
  mscale and mscale_all_dim: without them readers would scale cos and sin of an MHA head by `m(1)` (`head.yarn`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...errors import LayoutCannot
from ...head.rope import partial_factor
from ...head.spec import Gqa, Mla
from ...head.yarn import cos_sin_factor, softmax_scale
from .swap import Attention


def assemble_mha(mla: Attention, query_map: Tensor, kv_map: Tensor, head_dim: int | None = None) -> Attention:
    """Return the MHA that an MLA is with linear maps in place of its normed latents.

    Args:
        mla: the attention.
        query_map: L_q, `[q_lora_rank, attn_in]`.
        kv_map: L_kv, `[kv_lora_rank, attn_in]`.
        head_dim: of the output, padded with zeros; None for the least that holds it.

    Raises:
        LayoutCannot: the head does not fit into `head_dim`.
    """
    dims = mla.dims
    assert isinstance(dims, Mla)
    nope, rotary, heads, v_dim = dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.heads, dims.v_head_dim
    head_dim = fit_head_dim(dims, head_dim)
    target = Gqa(heads, heads, head_dim)
    rope = replace(mla.rope, partial_rotary_factor=partial_factor(rotary, head_dim))
    factor = cos_sin_factor(mla.rope, dims) / cos_sin_factor(rope, target)
    scale = softmax_scale(mla.rope, dims) / softmax_scale(rope, target)

    order = torch.cat([torch.arange(0, rotary, 2), torch.arange(1, rotary, 2)])
    query = (mla.weights["0.q_b_proj"] @ query_map).unflatten(0, (heads, nope + rotary)) * scale
    query_nope, query_rope = query.split([nope, rotary], dim=1)
    key_rope = mla.weights["0.kv_a_proj_with_mqa"][dims.kv_lora_rank :][order]
    expanded = (mla.weights["0.kv_b_proj"] @ kv_map).unflatten(0, (heads, nope + v_dim))
    key_nope, value = expanded.split([nope, v_dim], dim=1)
    query = torch.cat([query_rope[:, order] * factor**2, query_nope], dim=1)
    key = torch.cat([key_rope.expand(heads, -1, -1), key_nope], dim=1)
    output = mla.weights["0.o_proj"].unflatten(1, (heads, v_dim)).permute(1, 2, 0)
    padded = [_pad(rows, head_dim).flatten(0, 1) for rows in (query, key, value, output)]
    return Attention(
        target, rope, dict(zip(("0.q_proj", "0.k_proj", "0.v_proj", "0.o_proj"), padded, strict=True))
        | {"0.o_proj": padded[3].T.contiguous()},
    )  # fmt: skip


def fit_head_dim(dims: Mla, head_dim: int | None) -> int:
    """Return the head_dim to use: the least that holds queries, keys and values, where none is asked for.

    Raises:
        LayoutCannot: what is asked for is less.
    """
    least = max(dims.qk_nope_head_dim + dims.qk_rope_head_dim, dims.v_head_dim)
    if head_dim is not None and head_dim < least:
        raise LayoutCannot(
            f"a head of {dims.qk_nope_head_dim} + {dims.qk_rope_head_dim} dims, its values of {dims.v_head_dim}, "
            f"does not fit into a head_dim of {head_dim}",
            where="head_dim",
            fix=f"Say --head-dim auto, or a number from {least} on.",
        )
    return head_dim or least


def _pad(rows: Tensor, head_dim: int) -> Tensor:
    """Fill heads of rows `[heads, dim, n]` up with zeros to `[heads, head_dim, n]`."""
    return torch.cat([rows, rows.new_zeros(rows.shape[0], head_dim - rows.shape[1], rows.shape[2])], dim=1)
