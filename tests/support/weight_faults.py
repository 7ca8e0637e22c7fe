"""The weight faults of an audit: each is one plausible mistake of a converter, or of whoever wrote the config by hand.

A fault takes a head's spec and its weights by slot, and returns both as the mistake leaves them. All of them leave
names, shapes and dtypes as they were, so that files alone tell next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kconv.drafters.spec import HeadSpec, Mla, Yarn

Slots = dict[str, Tensor]
Fault = Callable[[HeadSpec, Mapping[str, Tensor]], tuple[HeadSpec, Slots]]


def weights(how: Callable[[HeadSpec, Slots], Mapping[str, Tensor]]) -> Fault:
    """Return the fault that puts other weights in the place of some."""

    def fault(spec: HeadSpec, slots: Mapping[str, Tensor]) -> tuple[HeadSpec, Slots]:
        changed = {name: tensor.contiguous() for name, tensor in how(spec, dict(slots)).items()}
        return spec, dict(slots) | changed

    return fault


def config(how: Callable[[HeadSpec], HeadSpec]) -> Fault:
    """Return the fault that states another config."""
    return lambda spec, slots: (how(spec), dict(slots))


def swap(one: str, other: str) -> Fault:
    return weights(lambda _, s: {one: s[other], other: s[one]})


def scale(slot: str, factor: float) -> Fault:
    return weights(lambda _, s: {slot: s[slot] * factor})


# Kimi-K2's own, for heads that have none.
KIMI = Yarn(64.0, 4096, 32.0, 1.0, 1.0, 1.0)


def rope(**keys: object) -> Fault:
    return config(lambda spec: replace(spec, rope=replace(spec.rope, **keys)))


def yarn(**keys: float | None) -> Fault:
    """State another YaRN than the head's, of a head without one one that it has not."""

    def how(spec: HeadSpec) -> HeadSpec:
        own = spec.rope.scaling if isinstance(spec.rope.scaling, Yarn) else KIMI
        return replace(spec, rope=replace(spec.rope, scaling=replace(own, **keys)))

    return config(how)


def mla(spec: HeadSpec) -> Mla:
    assert isinstance(spec.attention, Mla)
    return spec.attention


def regrouped(rows: Tensor) -> Tensor:
    """Put rows whose rotary pairs are neighbors, (0, 1), (2, 3), as halves: 0, 2, ..., 1, 3, ..."""
    return torch.cat([rows[..., 0::2, :], rows[..., 1::2, :]], dim=-2)


def q_pairs(spec: HeadSpec, s: Slots) -> Mapping[str, Tensor]:
    nope = mla(spec).qk_nope_head_dim
    heads = s["0.q_b_proj"].unflatten(0, (mla(spec).heads, -1))
    return {"0.q_b_proj": torch.cat([heads[:, :nope], regrouped(heads[:, nope:])], dim=1).flatten(0, 1)}


def k_pairs(spec: HeadSpec, s: Slots) -> Mapping[str, Tensor]:
    latent = mla(spec).kv_lora_rank
    rows = s["0.kv_a_proj_with_mqa"]
    return {"0.kv_a_proj_with_mqa": torch.cat([rows[:latent], regrouped(rows[latent:])])}


def rope_first(spec: HeadSpec, s: Slots) -> Mapping[str, Tensor]:
    nope = mla(spec).qk_nope_head_dim
    heads = s["0.q_b_proj"].unflatten(0, (mla(spec).heads, -1))
    return {"0.q_b_proj": torch.cat([heads[:, nope:], heads[:, :nope]], dim=1).flatten(0, 1)}


def kv_transposed(spec: HeadSpec, s: Slots) -> Mapping[str, Tensor]:
    """The dims of all heads side by side, where the heads' own dims should be."""
    rows = s["0.kv_b_proj"].unflatten(0, (mla(spec).heads, -1))
    return {"0.kv_b_proj": rows.transpose(0, 1).flatten(0, 1)}


def kv_swapped(spec: HeadSpec, s: Slots) -> Mapping[str, Tensor]:
    nope = mla(spec).qk_nope_head_dim
    rows = s["0.kv_b_proj"].unflatten(0, (mla(spec).heads, -1))
    return {"0.kv_b_proj": torch.cat([rows[:, nope:], rows[:, :nope]], dim=1).flatten(0, 1)}


def kv_blockwise(spec: HeadSpec, s: Slots) -> Mapping[str, Tensor]:
    """All keys and then all values."""
    nope = mla(spec).qk_nope_head_dim
    rows = s["0.kv_b_proj"].unflatten(0, (mla(spec).heads, -1))
    return {"0.kv_b_proj": torch.cat([rows[:, :nope].flatten(0, 1), rows[:, nope:].flatten(0, 1)])}


def o_heads(spec: HeadSpec, s: Slots) -> Mapping[str, Tensor]:
    """The heads in another order."""
    columns = s["0.o_proj"].unflatten(1, (spec.attention.heads, -1))
    return {"0.o_proj": columns.roll(1, dims=1).flatten(1)}


def fc_order(spec: HeadSpec, s: Slots) -> Mapping[str, Tensor]:
    """The captured states from the last to the first."""
    return {"fc": s["fc"].unflatten(1, (len(spec.captured), -1)).flip(1).flatten(1)}


def captured(by: int) -> Fault:
    return config(lambda spec: replace(spec, captured=tuple(layer + by for layer in spec.captured)))


FAULTS: dict[str, Fault] = {
    "gate and up swapped": swap("0.gate_proj", "0.up_proj"),
    "RoPE pairing of q and k": weights(lambda spec, s: {**q_pairs(spec, s), **k_pairs(spec, s)}),
    "RoPE pairing of k": weights(k_pairs),
    "kv_b transposed": weights(kv_transposed),
    "k and v swapped in kv_b": weights(kv_swapped),
    "kv_b blockwise": weights(kv_blockwise),
    "q's rotary dims first": weights(rope_first),
    "heads of o": weights(o_heads),
    "hidden_norm x 1.1": scale("0.hidden_norm", 1.1),
    "hidden_norm x 1.01": scale("0.hidden_norm", 1.01),
    "kv_a norm x 1.2": scale("0.kv_a_layernorm", 1.2),
    "final norm x 1.3": scale("norm", 1.3),
    "norms swapped": swap("0.hidden_norm", "0.input_layernorm"),
    "order in fc": weights(fc_order),
    "lm_head shifted": weights(lambda _, s: {"lm_head": s["lm_head"].roll(1, dims=0)}),
    "captured - 1": captured(-1),
    "captured + 1": captured(1),
    "other captured": config(lambda spec: replace(spec, captured=(0, 2, 6))),
    "eps 1e-3": config(lambda spec: replace(spec, eps=1e-3)),
    "eps 1e-6": config(lambda spec: replace(spec, eps=1e-6)),
    "YaRN factor": yarn(factor=32.0),
    "YaRN original length": yarn(original_max_positions=2048),
    "YaRN beta": yarn(beta_fast=8.0),
    "YaRN mscale": yarn(mscale_all_dim=None, mscale=None),
    "no YaRN": lambda spec, slots: rope(scaling=None if spec.rope.scaling else KIMI)(spec, slots),
    "RoPE theta": lambda spec, slots: rope(theta=10000.0 if spec.rope.theta > 10000 else 50000.0)(spec, slots),
}
