"""Replace a head's attention weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ...drafters.base import Spec
from ...drafters.eagle3 import only_eagle3
from ...drafters.slots import needs
from ...drafters.spec import Gqa, Mla, Rope
from ...errors import LayoutCannot

# torch is imported where needed: refusing a head that cannot be converted takes less time than the import.
if TYPE_CHECKING:
    from torch import Tensor

    from ...drafters.forward import DraftHead

Kind = Literal["mha", "mla"]

GQA_SLOTS = tuple(f"0.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
MLA_SLOTS = tuple(
    f"0.{name}"
    for name in (
        "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Attention:
    """An attention with its weights, by slot name: `GQA_SLOTS` or `MLA_SLOTS`."""

    dims: Gqa | Mla
    rope: Rope
    weights: Mapping[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """The dims of an MLA head, and how much of them is used.

    Attributes:
        latent: entries of the latent in use; at most `kv_lora_rank`.
        rotary: rotary dims in use; at most `qk_rope_head_dim`.
        q_lora_rank: of the queries' latent, which SGLang and vLLM require.
        kv_lora_rank, qk_rope_head_dim: as the engine sees them.
    """

    latent: int = 512
    rotary: int = 64
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64


@dataclass(frozen=True)
class Latents:
    """The maps before and after the two norms: down `[r, attn_in]` with gain 1, and up.

    Attributes:
        query_down, query_up: `[q_lora_rank, attn_in]` and `[heads, nope + rope, q_lora_rank]`, softmax scale 1.
        kv_down, kv_up: `[latent, attn_in]` and `[kv_heads, nope + v_head_dim, latent]`.
    """

    query_down: Tensor
    query_up: Tensor
    kv_down: Tensor
    kv_up: Tensor


def attention_of(head: DraftHead) -> Attention:
    """Return a head's attention in fp64, the dtype for converting it."""
    from .moments import DTYPE

    slots = MLA_SLOTS if isinstance(head.spec.attention, Mla) else GQA_SLOTS
    return Attention(head.spec.attention, head.spec.rope, {slot: head.weights[slot].to(DTYPE) for slot in slots})


def with_attention(head: DraftHead, attention: Attention) -> DraftHead:
    """Return a head with another attention, and its other weights unchanged."""
    from ...drafters.forward import DraftHead

    spec = replace(head.spec, attention=attention.dims, rope=attention.rope)
    dtype = head.weights["fc"].dtype
    known = needs(spec)
    kept = {name: weight for name, weight in head.weights.items() if name in known}
    return DraftHead(spec, kept | {name: weight.to(dtype) for name, weight in attention.weights.items()})


def check_convertible(spec: Spec, kind: Kind) -> None:
    """Refuse a head that already has this kind of attention, or parts that the kind does not support.

    Raises:
        LayoutCannot: it is another family's drafter, or the head has that attention, more than one layer, biases, or
            norms of queries and keys.
    """
    spec = only_eagle3(spec, "converts the attention of")
    if isinstance(spec.attention, Mla) == (kind == "mla"):
        raise LayoutCannot(
            f"the head's attention is already {spec.kind.upper()}",
            where="--attention",
            fix="Remove --attention. The conversion is then exact.",
        )
    if spec.layers != 1:
        raise LayoutCannot(
            f"the head has {spec.layers} layers, but only the attention of one-layer heads can be converted",
            where="num_hidden_layers",
            fix="Serve this head with its original attention.",
        )
    if spec.norms.qk:
        raise LayoutCannot(
            "the head norms its queries and keys, but an MLA head has no place for these norms",
            where="norms.qk",
            fix="Serve this head with its original attention.",
        )
    if isinstance(spec.attention, Gqa) and spec.attention.bias:
        raise LayoutCannot(
            "the head's attention has biases, but engines silently drop those of an MLA head",
            where="attention_bias",
            fix="Serve this head with its original attention.",
        )
