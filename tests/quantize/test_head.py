"""Quantizing a head: which linears, whose scales, what is measured, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch
from support.heads import GQA, MLA, random_slots

from kconv.checkpoint.formats import Fp8
from kconv.drafters.forward import DraftHead
from kconv.drafters.slots import needs
from kconv.errors import (
    CalibrationInvalid,
    ConversionInaccurate,
    InputScalesInvalid,
    PromptsInvalid,
    TensorShape,
    TensorValue,
)
from kconv.measure.batches import Calibration, Part, StatesBatch
from kconv.measure.trace import trace
from kconv.quantize.head.formats import FORMATS, FP8, NVFP4, choice_of, groups_of
from kconv.quantize.head.quantize import measure, quantize_linears

DIMS = {"hidden": 64, "target_hidden": 64, "intermediate": 96, "captured": (1, 3, 5)}
SPECS = {"gqa": replace(GQA, **DIMS), "mla": replace(MLA, **DIMS)}
SPEC = SPECS["gqa"]


def weights_of(spec) -> dict[str, torch.Tensor]:
    slots = random_slots(spec, seed=5)
    return {n: (w * 0.1 if w.ndim == 2 else w * 0.1 + 1.0).to(w.dtype) for n, w in slots.items()}


def states_of(spec, batches: int = 10, length: int = 12) -> Calibration:
    generator = torch.Generator().manual_seed(6)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    made = [
        StatesBatch(
            torch.randint(spec.vocab, (2, length), generator=generator),
            drawn(2, length, len(spec.captured) * spec.target_hidden),
            drawn(2, length, spec.target_hidden),
        )
        for _ in range(batches)
    ]
    return Calibration(made, drawn(spec.vocab, spec.target_hidden), "drawn states")


@pytest.fixture(scope="module")
def quantized():
    return {
        (kind, name): quantize_linears(spec, weights_of(spec), format_, states_of(spec), min_retention=0)
        for kind, spec in SPECS.items()
        for name, format_ in FORMATS.items()
    }


each = pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in SPECS for name in FORMATS])


@each
def test_what_is_quantized_and_what_is_excluded_are_all_linears(quantized, kind, name):
    spec = SPECS[kind]
    plain = {s.removesuffix(".bias") for s, need in needs(spec).items() if len(need.shape) == 2}
    plain -= quantized[kind, name].linears.keys() | {"embed_tokens"}
    assert plain == {
        "gqa": {"fc", "lm_head"},
        "mla": {"fc", "lm_head", *(f"0.{p}" for p in ("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj")),
                "0.kv_a_proj_with_mqa"},
    }[kind]  # fmt: skip


# What engines call the modules of a draft of one layer, for a target of 61.
NAMES = {
    "vLLM": ("model.layers.61.self_attn.{}", "model.layers.61.mlp.{}", "model.fc"),
    "TensorRT-LLM": ("model.midlayer.self_attn.{}", "model.midlayer.mlp.{}", "model.fc"),
    "SGLang": ("model.self_attn.{}", "model.mlp.{}", "model.fc"),
}
# How each tests an entry: as a part of a name, or as a wildcard on the name and on what it is part of.
PART, WILDCARD = (lambda entry, name: entry in name), (lambda entry, name: fnmatchcase(name, entry))
READINGS = {"vLLM": (PART, WILDCARD), "TensorRT-LLM": (WILDCARD,), "SGLang": (PART,)}


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("engine", NAMES)
def test_each_engine_excludes_what_is_plain_and_nothing_else(engine, kind):
    attention, mlp, fc = NAMES[engine]
    entries = choice_of(SPECS[kind]).exclude

    def is_excluded(name: str) -> bool:
        return any(reading(entry, name) for entry in entries for reading in READINGS[engine])

    assert is_excluded(fc) and is_excluded("lm_head")
    assert not any(is_excluded(mlp.format(part)) for part in ("gate_up_proj", "gate_proj", "down_proj"))
    parts = {"gqa": ("qkv_proj", "q_proj", "o_proj"), "mla": ("fused_qkv_a_proj", "q_b_proj", "kv_b_proj", "o_proj")}
    assert {is_excluded(attention.format(part)) for part in parts[kind]} == {kind == "mla"}
    assert not any(fnmatchcase("kv_b_proj", entry) for entry in entries)


@each
def test_what_engines_fuse_has_one_scale_of_the_largest_weight_and_input(quantized, kind, name):
    made, weights = quantized[kind, name], weights_of(SPECS[kind])
    shared = "weight_scale" if name == "fp8" else "weight_scale_2"
    groups = groups_of(SPECS[kind], FORMATS[name])
    assert ("0.gate_proj", "0.up_proj") in groups and (kind == "mla" or ("0.q_proj", "0.k_proj", "0.v_proj") in groups)
    for group in groups:
        largest = max(float(weights[slot].abs().max()) for slot in group)
        for slot in group:
            assert made.linears[slot][shared] == torch.tensor(largest) / FORMATS[name].largest
            assert made.linears[slot]["input_scale"] == made.linears[group[0]]["input_scale"]


@pytest.mark.parametrize("name", FORMATS)
def test_input_scales_are_of_every_draft_step_of_the_text_that_is_not_held_out(quantized, name):
    head = DraftHead(SPEC, {n: w.float() if w.is_floating_point() else w for n, w in weights_of(SPEC).items()})
    states = states_of(SPEC)
    largest = {part: [float(step.x.abs().max()) for step in trace(head, states.part(part))] for part in PARTS}
    assert quantized["gqa", name].input_amax["0.q_proj"] == max(largest["fit"] + largest["choose"])
    # Of three steps each, and another figure with the text that is held out.
    assert {part: len(found) // 3 for part, found in largest.items()} == {"fit": 8, "choose": 1, "held-out": 1}


PARTS = ("fit", "choose", "held-out")


@each
def test_the_stored_weights_are_near_the_originals(quantized, kind, name):
    weights, bound = weights_of(SPECS[kind]), {"fp8": 0.04, "nvfp4": 0.12}[name]
    for slot, stored in quantized[kind, name].linears.items():
        original = weights[slot].float()
        error = (FORMATS[name].stored.unpack(stored) - original).norm() / original.norm()
        assert 0 < error < bound, (slot, float(error))


def test_what_is_measured_has_rounded_weights_and_rounded_inputs(quantized):
    """A format that rounds neither loses nothing; each alone loses something."""
    head = DraftHead(SPEC, {n: w.float() if w.is_floating_point() else w for n, w in weights_of(SPEC).items()})
    linears, states = quantized["gqa", "fp8"].linears, states_of(SPEC)
    given = {id(stored["weight"]): head.weights[slot] for slot, stored in linears.items()}

    class Exact(Fp8):
        def unpack(self, stored):
            return given[id(stored["weight"])].clone()

    exact_weights = replace(FP8, stored=Exact())
    exact_inputs = replace(FP8, round=lambda x, scale: x)
    both = replace(exact_weights, round=exact_inputs.round)
    kl = {n: sum(measure(head, f, linears, states).kl) for n, f in (
        ("neither", both), ("weights", exact_inputs), ("inputs", exact_weights), ("all", FP8)
    )}  # fmt: skip
    assert abs(kl["neither"]) < 1e-9 < min(kl["weights"], kl["inputs"]) and kl["all"] > max(kl["weights"], kl["inputs"])


def test_more_loss_than_is_allowed_is_refused_and_fp8_named_where_it_keeps_enough(quantized):
    kept = {name: quantized["gqa", name].held_out.kept for name in FORMATS}
    assert kept["nvfp4"] < kept["fp8"] < 1.5
    between = (kept["nvfp4"] + kept["fp8"]) / 2
    for format_, keep, is_named in ((NVFP4, between, True), (NVFP4, 1.5, False), (FP8, 1.5, False)):
        with pytest.raises(ConversionInaccurate, match="of the original's acceptance length") as caught:
            quantize_linears(SPEC, weights_of(SPEC), format_, states_of(SPEC), min_retention=keep)
        assert (f"In FP8 it retains {kept['fp8']:.2%}: --format fp8." in caught.value.fix) == is_named
        assert ("--format" in caught.value.fix) == is_named


def filled(slot: str, value: float) -> dict[str, torch.Tensor]:
    weights = weights_of(SPEC)
    return weights | {slot: weights[slot].index_fill(0, torch.arange(len(weights[slot])), value)}


def spoiled(value: float, part: Part = "fit") -> Calibration:
    states = states_of(SPEC)
    for batch in states.part(part):
        batch.captured[0, 0, 0] = value
    return states


OTHER = replace(SPEC, captured=(1, 3))
REFUSED = {
    "a weight of zeros": (SPEC, filled("0.up_proj", 0.0), states_of(SPEC), TensorValue, "is all zeros"),
    "a weight with NaN": (SPEC, filled("0.o_proj", float("nan")), states_of(SPEC), TensorValue, "NaN or Inf"),
    "a weight with Inf": (SPEC, filled("0.q_proj", float("inf")), states_of(SPEC), TensorValue, "NaN or Inf"),
    "states with NaN": (SPEC, weights_of(SPEC), spoiled(float("nan")), CalibrationInvalid, "NaN or Inf"),
    "states with Inf": (SPEC, weights_of(SPEC), spoiled(float("inf")), CalibrationInvalid, "NaN or Inf"),
    "held-out states with NaN": (
        SPEC, weights_of(SPEC), spoiled(float("nan"), "held-out"), CalibrationInvalid, "NaN or Inf",
    ),
    "a linear that reads Inf": (
        SPEC, filled("0.post_attention_layernorm", 3e38), states_of(SPEC), InputScalesInvalid, "amax",
    ),
    "a linear that reads zeros": (
        SPEC, filled("0.post_attention_layernorm", 0.0), states_of(SPEC), InputScalesInvalid, "0.gate_proj is 0",
    ),
    "states of other layers": (SPEC, weights_of(SPEC), states_of(OTHER), CalibrationInvalid, "width 128"),
    "another lm_head": (
        SPEC, weights_of(SPEC), replace(states_of(SPEC), lm_head=torch.zeros(9, 64)), CalibrationInvalid, r"\[9, 64\]",
    ),
    "no states": (SPEC, weights_of(SPEC), replace(states_of(SPEC), batches=[]), CalibrationInvalid, "0 rows"),
    "too few to hold some out": (SPEC, weights_of(SPEC), states_of(SPEC, 9), CalibrationInvalid, "and 0 sequences"),
    "texts of four tokens": (SPEC, weights_of(SPEC), states_of(SPEC, length=4), PromptsInvalid, "too short"),
}  # fmt: skip


@pytest.mark.parametrize(("spec", "weights", "states", "fault", "phrase"), REFUSED.values(), ids=REFUSED)
def test_refused(spec, weights, states, fault, phrase):
    with pytest.raises(fault, match=phrase) as caught:
        quantize_linears(spec, weights, FP8, states)
    assert caught.value.fix


def test_nvfp4_takes_columns_in_groups_of_sixteen():
    narrow = replace(SPEC, intermediate=40)
    with pytest.raises(TensorShape, match="down_proj has 40 columns"):
        quantize_linears(narrow, weights_of(narrow), NVFP4, states_of(narrow))
    assert quantize_linears(narrow, weights_of(narrow), FP8, states_of(narrow), min_retention=0).linears
