"""The error of each part stands where it arises, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.heads import random_slots

from kconv.drafters.forward import DraftHead
from kconv.drafters.spec import Gqa, HeadSpec, Mla, Norms, Rope
from kconv.measure.parts import PARTS, Parts

GQA = HeadSpec(
    attention=Gqa(4, kv_heads=2, head_dim=8), hidden=32, target_hidden=16, intermediate=48, layers=1, vocab=40,
    draft_vocab=40, rope=Rope(1e4), captured=(1, 2, 3), eps=1e-5, dtype="F32", max_positions=64,
)  # fmt: skip
MLA = replace(
    GQA, attention=Mla(2, q_lora_rank=8, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
)
TOUCHED = {
    "fc": "fc",
    "0.input_layernorm": "norms",
    "0.hidden_norm": "norms",
    "0.post_attention_layernorm": "norms",
    "norm": "norms",
    "0.o_proj": "attention",
    "0.up_proj": "mlp",
    "lm_head": "lm_head",
}


def measure(spec: HeadSpec, slot: str | None, other: HeadSpec | None = None) -> dict[str, float]:
    slots = {n: t for n, t in random_slots(spec, seed=0).items() if n != "t2d"}
    changed = {n: t for n, t in random_slots(other or spec, seed=0).items() if n != "t2d"}
    if slot:
        changed[slot] = changed[slot] * 1.25
    parts = Parts(DraftHead(spec, slots), DraftHead(other or spec, changed), spec.captured)
    assert parts.comparable
    generator = torch.Generator().manual_seed(0)
    for length in (5, 9):
        tokens = torch.randint(spec.vocab, (2, length), generator=generator)
        parts.add(tokens, torch.randn(2, length, 3 * spec.target_hidden, generator=generator))
    return {row.part: row.rms_error for row in parts.figures("held-out")}


@pytest.mark.parametrize("spec", [GQA, MLA, replace(GQA, layers=2, norms=Norms(before_residual=True, fc=True))])
@pytest.mark.parametrize(("slot", "part"), TOUCHED.items())
def test_a_changed_weight_shows_in_its_own_part(spec, slot, part):
    found = measure(spec, slot)
    assert list(found) == list(PARTS)
    assert {name for name, error in found.items() if error > 0} == {part}
    if slot in ("fc", "lm_head") and not spec.fc_bias:
        assert found[part] == pytest.approx(0.25, rel=1e-5)


def test_the_same_head_has_no_error_anywhere():
    assert set(measure(MLA, None).values()) == {0.0}


@settings(max_examples=10)
@given(st.integers(1, 3), st.sampled_from([8, 16]))
def test_another_kind_of_attention_differs_in_attention_alone(kv_heads, dim):
    other = replace(GQA, attention=Gqa(kv_heads * 2, kv_heads=kv_heads, head_dim=dim))
    source = {n: t for n, t in random_slots(MLA, seed=0).items() if n != "t2d"}
    own = {n: t for n, t in random_slots(other, seed=1).items() if n != "t2d"}
    output = {n: source.get(n, t) if source.get(n, t).shape == t.shape else t for n, t in own.items()}
    attention = {n for n in own if "proj" in n and n.split(".")[-1] in ("q_proj", "k_proj", "v_proj", "o_proj")}
    parts = Parts(DraftHead(MLA, source), DraftHead(other, output | {n: own[n] for n in attention}), MLA.captured)
    assert parts.comparable
    parts.add(torch.arange(8)[None], torch.randn(1, 8, 48, generator=torch.Generator().manual_seed(0)))
    assert {row.part for row in parts.figures("sampled") if row.rms_error > 0} == {"attention"}


def test_another_vocabulary_has_no_error_of_lm_head():
    """Its rows are other tokens'."""
    slots = {n: t for n, t in random_slots(GQA, seed=0).items() if n != "t2d"}
    fewer = replace(GQA, draft_vocab=20)
    pruned = slots | {"lm_head": slots["lm_head"][:20], "d2t": torch.arange(20)}
    parts = Parts(DraftHead(GQA, slots), DraftHead(fewer, pruned), GQA.captured)
    parts.add(torch.arange(8)[None], torch.randn(1, 8, 48))
    assert [row.part for row in parts.figures("greedy")] == ["fc", "norms", "attention", "mlp"]


def test_heads_of_other_widths_are_not_compared():
    wide = replace(GQA, hidden=64)
    slots = [{n: t for n, t in random_slots(s, seed=0).items() if n != "t2d"} for s in (GQA, wide)]
    assert not Parts(DraftHead(GQA, slots[0]), DraftHead(wide, slots[1]), GQA.captured).comparable
