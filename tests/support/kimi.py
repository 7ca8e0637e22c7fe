"""Kimi-K2 as it is published: the draft heads for it, which every other spec of the tests is made from, and names.

Light to import: scripts that measure memory use it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kconv.drafters.spec import Gqa, HeadSpec, Mla, Rope, Yarn

YARN = Yarn(factor=64.0, original_max_positions=4096, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
KIMI_MLA = HeadSpec(
    attention=Mla(64, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    hidden=7168,
    target_hidden=7168,
    intermediate=18432,
    layers=1,
    vocab=163840,
    draft_vocab=163840,
    rope=Rope(50000.0, YARN),
    captured=(1, 29, 57),
    eps=1e-5,
    dtype="BF16",
    max_positions=262144,
)
KIMI_MHA = replace(
    KIMI_MLA,
    attention=Gqa(64, 64, 128),
    intermediate=12288,
    eps=1e-6,
    rope=Rope(50000.0, replace(YARN, beta_fast=32.0)),
)


def small(base: HeadSpec, width: int, vocab: int, **changes: Any) -> HeadSpec:
    """Return a spec cut down to a width and a vocabulary, with further fields changed."""
    dims = {"hidden": width, "target_hidden": width, "vocab": vocab, "draft_vocab": vocab}
    return replace(base, **dims | {"captured": (1, 3, 5)} | changes)


MLP = ("gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def linear_modules(prefix: str, *, layers: int, experts: int) -> list[str]:
    """Return the names, a dense layer first; with a vision tower where there is a prefix."""
    names = [f"{prefix}lm_head"]
    for layer in range(layers):
        base = f"{prefix}model.layers.{layer}"
        names += [f"{base}.self_attn.{part}" for part in ATTENTION]
        if layer == 0:
            names += [f"{base}.mlp.{part}" for part in MLP]
        else:
            names += [f"{base}.mlp.gate", *(f"{base}.mlp.shared_experts.{part}" for part in MLP)]
            names += [f"{base}.mlp.experts.{i}.{part}" for i in range(experts) for part in MLP]
    if prefix:
        names += ["vision_tower.encoder.blocks.0.wqkv", "mm_projector.proj.0"]
    return names
