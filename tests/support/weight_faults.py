"""The weight faults of an audit: each is one plausible mistake of a converter, or of whoever wrote the config by hand.

A fault takes a head's spec and its weights by slot, and returns both as the mistake leaves them. All of them leave
names, shapes and dtypes as they were, so that files alone tell next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kconv.checkpoint.folder import Checkpoint, open_checkpoint
from kconv.checkpoint.tensors import read_tensor
from kconv.convert.read import Head, read_weights
from kconv.drafters.forward import DraftHead
from kconv.drafters.spec import HeadSpec, Mla, Yarn
from kconv.measure.drafting import count_halves, head_drafter, measure_states
from kconv.measure.figures import AcceptanceFigures
from kconv.measure.texts import Batch, Text, make_texts
from kconv.targets.config import TargetConfig, read_target_config
from kconv.targets.forward import States, run_target
from kconv.targets.model import load_target
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.text import read_corpus

STEPS = 3


def _by_row(largest: float, how: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def rounded(weight: Tensor) -> Tensor:
        scale = weight.abs().amax(1, keepdim=True) / largest
        return how(weight / scale) * scale

    return rounded


# How right heads are stored.
ROUNDINGS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "F32": lambda weight: weight,
    "BF16": lambda weight: weight.bfloat16().float(),
    "F16": lambda weight: weight.half().float(),
    "FP8": _by_row(448.0, lambda values: values.to(torch.float8_e4m3fn).float()),
    "INT8": _by_row(127.0, torch.round),
    "INT6": _by_row(31.0, torch.round),
}


@dataclass(frozen=True)
class Bed:
    """A target's texts and its states over them: the states of all layers, by the tokens of a batch."""

    target: Checkpoint
    config: TargetConfig
    texts: Sequence[Text]
    states: Sequence[tuple[Batch, States]]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(range(self.config.layers))

    def run(self, batch: Batch) -> States:
        rows = len(batch.tokens)
        for held, states in self.states:
            if held.prompt_length == batch.prompt_length and torch.equal(held.tokens[:rows], batch.tokens):
                return States(states.captured[:rows], states.hidden[:rows], states.logits[:rows])
        raise KeyError(batch.places)

    def whole(self, head: Head) -> dict[str, Tensor]:
        """Return a head's weights, in fp32, with what it shares with the target."""
        shared = {"embed_tokens": self.config.embed_tokens, "lm_head": self.config.lm_head}
        slots = {slot: read_tensor(self.target.tensors[name]) for slot, name in shared.items()} | read_weights(head)
        return {name: weight.float() if weight.is_floating_point() else weight for name, weight in slots.items()}

    def measure(self, text: Text, head: DraftHead) -> Sequence[AcceptanceFigures]:
        drafters = {"output": head_drafter(head, STEPS, self.layers)}
        pairs = count_halves(text, self.config.vocab)
        return measure_states(text, self.run, STEPS, drafters, bigram=pairs).acceptance


@torch.no_grad()
def make_bed(folder: Path) -> Bed:
    """Run a target once over texts that no head was trained on, and over its own continuations."""
    config, model, tokenizer = read_target_config(folder), load_target(folder, torch.float32), load_tokenizer(folder)
    prompts = [tokenizer.encode(text, 56) for text in [t for t in read_corpus().held_out if len(t) > 300][:12]]
    texts = make_texts(model, prompts, prompt_tokens=16, new_tokens=40, steps=STEPS, seed=0)
    layers = tuple(range(config.layers))
    states = [(batch, run_target(model, batch.tokens, layers)) for text in texts for batch in text.batches]
    return Bed(open_checkpoint(folder), config, texts, states)


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


def halves(slot: str, dim: int = 0) -> Fault:
    return weights(lambda _, s: {slot: torch.cat(s[slot].chunk(2, dim)[::-1], dim)})


def split(how: Callable[[Tensor, Tensor], Tensor]) -> Fault:
    """Split a fused gate and up in the middle, whatever its own order."""
    return weights(
        lambda _, s: dict(
            zip(("0.gate_proj", "0.up_proj"), how(s["0.gate_proj"], s["0.up_proj"]).chunk(2), strict=True)
        )
    )


def shards(gate: Tensor, up: Tensor) -> Tensor:
    return torch.cat([part for pair in zip(gate.chunk(2), up.chunk(2), strict=True) for part in pair])


def in_turn(rows: Tensor, heads: int, dim: int = 0) -> Tensor:
    """Take heads that stand in two groups as if one of each came in turn."""
    return rows.unflatten(dim, (2, heads // 2, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def q_groups(spec: HeadSpec, s: Slots) -> Slots:
    slot = "0.q_b_proj" if isinstance(spec.attention, Mla) else "0.q_proj"
    return {slot: in_turn(s[slot], spec.attention.heads)}


def rows_from(slot: str, first: int, how: Callable[[Tensor], Tensor]) -> Fault:
    return weights(lambda _, s: {slot: torch.cat([s[slot][:first], how(s[slot][first:])])})


# Of another audit: a block of rows or heads in another place.
BLOCKS: dict[str, Fault] = {
    "halves of gate": halves("0.gate_proj"),
    "halves of up": halves("0.up_proj"),
    "halves of down": halves("0.down_proj", 1),
    "gate and up by shards": split(shards),
    "gate and up row by row": split(lambda gate, up: torch.stack([gate, up], 1).flatten(0, 1)),
    "heads of q in groups": weights(q_groups),
    "heads of q and o in groups": weights(
        lambda spec, s: q_groups(spec, s) | {"0.o_proj": in_turn(s["0.o_proj"], spec.attention.heads, 1)}
    ),
    "lm_head moved from row 201": rows_from("lm_head", 201, lambda rows: rows.roll(1, 0)),
    "a block of lm_head reversed": weights(
        lambda _, s: {"lm_head": torch.cat([s["lm_head"][:64], s["lm_head"][64:256].flip(0), s["lm_head"][256:]])}
    ),
    "embedding moved": weights(lambda _, s: {"embed_tokens": s["embed_tokens"].roll(1, 0)}),
    "first two states swapped in fc": weights(
        lambda spec, s: {"fc": s["fc"].unflatten(1, (len(spec.captured), -1))[:, [1, 0, 2]].flatten(1)}
    ),
    "input_layernorm less one": weights(lambda _, s: {"0.input_layernorm": s["0.input_layernorm"] - 1}),
    "a state fed back after the norm": config(lambda spec: replace(spec, norms=replace(spec.norms, output=True))),
    "a normed residual": config(lambda spec: replace(spec, norms=replace(spec.norms, before_residual=True))),
}
