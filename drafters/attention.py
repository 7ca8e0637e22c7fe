"""A head's attention in plain torch.

Attention has three parts: project the input to queries, keys and values with RoPE applied; let a context hold the
keys and values and attend over them; project back. The context decides what a query sees, so the same forward serves
a growing cache and the vectorized drafting chain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .rope import rotate_halves, rotate_pairs
from .spec import Gqa, Mla

# Bytes of float32 scores to hold at a time: some heads' then, of a long text.
SCORE_BYTES = 1 << 30


class Context(Protocol):
    """The keys and values of earlier entries, and which of them a query sees."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Add new entries and attend from them.

        Args:
            layer: draft layer, from 0.
            query: `[B, heads, T, qk_dim]`.
            key: `[B, kv_heads, T, qk_dim]`.
            value: `[B, kv_heads, T, v_dim]`.
            scale: factor of the dot products.

        Returns:
            `[B, heads, T, v_dim]`.
        """
        ...


class CausalContext:
    """A growing cache: each call appends T entries, and each entry sees itself and all entries before it."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Context.attend`."""
        if layer in self._entries:
            past_key, past_value = self._entries[layer]
            key, value = torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)
        self._entries[layer] = key, value
        key, value = repeat_heads(key, query), repeat_heads(value, query)
        scores = query @ key.transpose(-1, -2) * scale
        return softmax(hide_future(scores)) @ value


class ChainContext:
    """All drafting chains of a sequence at once, one call per draft step.

    The first call brings the entries of step 1, which have the target's states: chain t sees those at positions <= t.
    Each later call brings the next step's entries: chain t sees the same entries of step 1, and of the later steps only
    its own.
    """

    def __init__(self) -> None:
        self._entries: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Context.attend`; T is the number of chains in each call."""
        self._entries[layer].append((repeat_heads(key, query), repeat_heads(value, query)))
        batch, heads, chains, _ = query.shape
        lot = max(1, SCORE_BYTES // (4 * batch * chains**2))
        parts: list[Tensor] = []
        for at in range(0, heads, lot):
            own = slice(at, at + lot)
            parts.append(_along(query[:, own], [(k[:, own], v[:, own]) for k, v in self._entries[layer]], scale))
        return torch.cat(parts, 1)


def _along(query: Tensor, entries: Sequence[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """Return the attention output of all chains at a draft step, from the entries of the steps so far."""
    (first_key, first_value), *own = entries
    scores = hide_future(query @ first_key.transpose(-1, -2) * scale)
    own_scores = [(query * own_key).sum(-1, keepdim=True) * scale for own_key, _ in own]
    weights = softmax(torch.cat([scores, *own_scores], dim=-1))
    chains = first_key.shape[2]
    output = weights[..., :chains] @ first_value
    for step, (_, own_value) in enumerate(own):
        output = output + weights[..., chains + step, None] * own_value
    return output


def project_gqa(
    gqa: Gqa, weights: Mapping[str, Tensor], layer: int, x: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Project `x [B, T, attn_in]` to query `[B, heads, T, head_dim]`, key and value `[B, kv_heads, T, head_dim]`.

    cos and sin, here and below, are `[1 or B, 1, T, pairs]` in the dtype of x. Norms of queries and keys come before
    RoPE (https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/qwen3.py).
    """

    def heads_of(name: str, count: int) -> Tensor:
        slot = f"{layer}.{name}"
        projected = F.linear(x, weights[slot], weights.get(f"{slot}.bias"))
        return torch.unflatten(projected, -1, (count, gqa.head_dim)).transpose(1, 2)

    query, key = heads_of("q_proj", gqa.heads), heads_of("k_proj", gqa.kv_heads)
    if f"{layer}.q_norm" in weights:
        query = rms_norm(query, weights[f"{layer}.q_norm"], eps)
        key = rms_norm(key, weights[f"{layer}.k_norm"], eps)
    return (
        rotate_halves(query, cos, sin),
        rotate_halves(key, cos, sin),
        heads_of("v_proj", gqa.kv_heads),
    )


def project_mla(
    mla: Mla, weights: Mapping[str, Tensor], layer: int, x: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Project `x [B, T, attn_in]` to query and key `[B, heads, T, nope + rope]`, value `[B, heads, T, v_head_dim]`.

    The latent norms use the head's own eps, as engines do
    (https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_v2.py#L1082-L1098);
    transformers always uses 1e-6 there
    (https://github.com/huggingface/transformers/blob/v5.14.1/src/transformers/models/deepseek_v3/modeling_deepseek_v3.py#L382-L390).
    """
    nope, rope = mla.qk_nope_head_dim, mla.qk_rope_head_dim
    latent = rms_norm(F.linear(x, weights[f"{layer}.q_a_proj"]), weights[f"{layer}.q_a_layernorm"], eps)
    query = torch.unflatten(F.linear(latent, weights[f"{layer}.q_b_proj"]), -1, (mla.heads, -1)).transpose(1, 2)
    query_nope, query_rope = torch.split(query, [nope, rope], dim=-1)

    compressed = F.linear(x, weights[f"{layer}.kv_a_proj_with_mqa"])
    latent, key_rope = torch.split(compressed, [mla.kv_lora_rank, rope], dim=-1)
    latent = rms_norm(latent, weights[f"{layer}.kv_a_layernorm"], eps)
    expanded = torch.unflatten(F.linear(latent, weights[f"{layer}.kv_b_proj"]), -1, (mla.heads, -1)).transpose(1, 2)
    key_nope, value = torch.split(expanded, [nope, mla.v_head_dim], dim=-1)
    # One rotary key serves all heads.
    key_rope = rotate_pairs(key_rope[:, None], cos, sin).expand(-1, mla.heads, -1, -1)
    return (
        torch.cat([query_nope, rotate_pairs(query_rope, cos, sin)], dim=-1),
        torch.cat([key_nope, key_rope], dim=-1),
        value,
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize the last dim in fp32, then round to x's dtype before the gain, as engines do."""
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight


def softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dim in fp32, returned in the dtype of the scores."""
    return scores.softmax(dim=-1, dtype=torch.float32).to(scores.dtype)


def hide_future(scores: Tensor) -> Tensor:
    """Set scores `[..., T, S]` of the last T of S entries to -inf where the key is later than the query."""
    queries, keys = scores.shape[-2:]
    future = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)
    return scores.masked_fill(future, float("-inf"))


def repeat_heads(entries: Tensor, query: Tensor) -> Tensor:
    """Repeat `[B, kv_heads, T, dim]` to the query's heads; adjacent heads share one."""
    return entries.repeat_interleave(query.shape[1] // entries.shape[1], dim=1)
