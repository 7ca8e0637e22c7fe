"""The linear modules of a Kimi-K2 of any depth, by name."""

from __future__ import annotations

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
