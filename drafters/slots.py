"""Every tensor a head can have: its meaning and its only shape formula.

A slot is a canonical name, independent of any file layout. A layout's rows say which tensor stores a slot, and which
reversible operation it applies; the stored shape follows from the formula here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from .spec import Gqa, HeadSpec, Mla


def _always(_: HeadSpec) -> bool:
    return True


def _never(_: HeadSpec) -> bool:
    return False


@dataclass(frozen=True)
class Slot:
    """A tensor's meaning and its only shape formula.

    Attributes:
        name: canonical name; `{i}` is the layer, `{a}` the index of a captured state.
        shape: comma-separated dims, each a sum of products of names in `dims(spec)`.
        when: whether a head of this spec has the slot.
        absent_when: whether a head of this spec may omit the tensor.
        layers: which layers have it: "all", "first" or "later"; empty for slots outside the layers.
        dtype: safetensors dtypes it may have; empty if it has the head's weight dtype.
    """

    name: str
    shape: str
    when: Callable[[HeadSpec], bool] = _always
    absent_when: Callable[[HeadSpec], bool] = _never
    layers: str = ""
    dtype: tuple[str, ...] = ()


INTEGER = ("I64", "I32")


def _is_gqa(spec: HeadSpec) -> bool:
    return isinstance(spec.attention, Gqa)


def _is_mla(spec: HeadSpec) -> bool:
    return isinstance(spec.attention, Mla)


def _has_bias(spec: HeadSpec) -> bool:
    return isinstance(spec.attention, Gqa) and spec.attention.bias


def _norms_qk(spec: HeadSpec) -> bool:
    return isinstance(spec.attention, Gqa) and spec.norms.qk


def _is_reduced(spec: HeadSpec) -> bool:
    return spec.draft_vocab != spec.vocab


def _shares_lm_head(spec: HeadSpec) -> bool:
    """Engines share the target's lm_head, which covers the full vocabulary, so the widths must agree."""
    return not _is_reduced(spec) and _shares_embedding(spec)


def _shares_embedding(spec: HeadSpec) -> bool:
    """Engines share the target's embedding if the widths agree."""
    return spec.hidden == spec.target_hidden


SLOTS: tuple[Slot, ...] = (
    Slot("fc", "hidden, captured*target_hidden"),
    Slot("fc.bias", "hidden", lambda s: s.fc_bias),
    Slot("fc_norm.{a}", "target_hidden", lambda s: s.norms.fc),
    Slot("input_norm", "captured*target_hidden", lambda s: s.norms.before_fc),
    Slot("{i}.input_layernorm", "hidden", layers="all"),
    Slot("{i}.hidden_norm", "hidden", layers="first"),
    Slot("{i}.q_proj", "heads*head_dim, attn_in", _is_gqa, layers="all"),
    Slot("{i}.k_proj", "kv_heads*head_dim, attn_in", _is_gqa, layers="all"),
    Slot("{i}.v_proj", "kv_heads*head_dim, attn_in", _is_gqa, layers="all"),
    Slot("{i}.q_proj.bias", "heads*head_dim", _has_bias, layers="all"),
    Slot("{i}.k_proj.bias", "kv_heads*head_dim", _has_bias, layers="all"),
    Slot("{i}.v_proj.bias", "kv_heads*head_dim", _has_bias, layers="all"),
    Slot("{i}.q_norm", "head_dim", _norms_qk, layers="all"),
    Slot("{i}.k_norm", "head_dim", _norms_qk, layers="all"),
    Slot("{i}.q_a_proj", "q_lora_rank, attn_in", _is_mla, layers="all"),
    Slot("{i}.q_a_layernorm", "q_lora_rank", _is_mla, layers="all"),
    Slot("{i}.q_b_proj", "heads*qk_nope_head_dim+heads*qk_rope_head_dim, q_lora_rank", _is_mla, layers="all"),
    Slot("{i}.kv_a_proj_with_mqa", "kv_lora_rank+qk_rope_head_dim, attn_in", _is_mla, layers="all"),
    Slot("{i}.kv_a_layernorm", "kv_lora_rank", _is_mla, layers="all"),
    Slot("{i}.kv_b_proj", "heads*qk_nope_head_dim+heads*v_head_dim, kv_lora_rank", _is_mla, layers="all"),
    Slot("{i}.o_proj", "hidden, attn_out", layers="all"),
    Slot("{i}.o_proj.bias", "hidden", _has_bias, layers="all"),
    Slot("{i}.post_attention_layernorm", "hidden", layers="all"),
    Slot("{i}.gate_proj", "intermediate, hidden", layers="all"),
    Slot("{i}.up_proj", "intermediate, hidden", layers="all"),
    Slot("{i}.down_proj", "hidden, intermediate", layers="all"),
    Slot("{i}.gate_proj.bias", "intermediate", lambda s: s.mlp_bias, layers="all"),
    Slot("{i}.up_proj.bias", "intermediate", lambda s: s.mlp_bias, layers="all"),
    Slot("{i}.down_proj.bias", "hidden", lambda s: s.mlp_bias, layers="all"),
    Slot("norm", "hidden"),
    Slot("lm_head", "draft_vocab, hidden", absent_when=_shares_lm_head),
    Slot("embed_tokens", "vocab, hidden", absent_when=_shares_embedding),
    Slot("d2t", "draft_vocab", _is_reduced, dtype=INTEGER),
    Slot("t2d", "vocab", _is_reduced, absent_when=_is_reduced, dtype=("BOOL",)),  # follows from d2t,
)


def dims(spec: HeadSpec, layer: int = 0) -> dict[str, int]:
    """Return the numbers that the shape formulas use, for one layer of a head."""
    attention = spec.attention
    known = {
        "hidden": spec.hidden,
        "target_hidden": spec.target_hidden,
        "captured": len(spec.captured),
        "intermediate": spec.intermediate,
        "vocab": spec.vocab,
        "draft_vocab": spec.draft_vocab,
        "attn_in": (2 if layer == 0 else 1) * spec.hidden,
    }
    if isinstance(attention, Mla):
        return known | vars(attention) | {"attn_out": attention.heads * attention.v_head_dim}
    return known | vars(attention) | {"attn_out": attention.heads * attention.head_dim}


def shape(formula: str, known: dict[str, int]) -> tuple[int, ...]:
    """Evaluate a shape formula, e.g. `"heads*head_dim, attn_in"` to `(128, 256)`."""
    return tuple(
        sum(math.prod(known[factor.strip()] for factor in term.split("*")) for term in dim.split("+"))
        for dim in formula.split(",")
    )


@dataclass(frozen=True)
class Need:
    """A slot of one head, with numbers instead of formulas."""

    slot: Slot
    shape: tuple[int, ...]


@cache
def needs(spec: HeadSpec) -> dict[str, Need]:
    """Return each slot that a head of this spec has or may have, by filled-in name, in table order."""
    found: dict[str, Need] = {}
    for slot in SLOTS:
        if not slot.when(spec):
            continue
        for layer in layers_of(slot.layers, spec.layers):
            formula_dims = dims(spec, layer)
            for a in range(len(spec.captured) if "{a}" in slot.name else 1):
                found[slot.name.format(i=layer, a=a)] = Need(slot, shape(slot.shape, formula_dims))
    return found


def layers_of(which: str, count: int) -> range:
    """Return the layer numbers for "all", "first", "later" or "" (outside the layers: one entry)."""
    return {"all": range(count), "first": range(1), "later": range(1, count), "": range(1)}[which]
