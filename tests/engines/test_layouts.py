"""Layouts: their names are ModelOpt's and transformers' own, and a layout is known by its marks."""

import importlib
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from support.heads import GQA, KIMI_MHA, KIMI_MLA, MLA, MODELOPT_KIMIK2, MODELOPT_LLAMA, PORTABLE, TORCHSPEC_MLA

from kconv.drafters.eagle3 import EAGLE3
from kconv.drafters.slots import needs
from kconv.drafters.spec import Norms
from kconv.engines import BY_NAME, LAYOUTS, by_name, detect
from kconv.engines.layout import stored, unclaimed
from kconv.errors import UnknownLayout

VLLM, TRTLLM, MODELOPT = BY_NAME["vllm"], BY_NAME["trtllm"], BY_NAME["modelopt"]
# What ModelOpt's exporter leaves to the target.
NOT_EXPORTED = {"embed_tokens.weight", "t2d"}


def exported(spec):
    return stored(MODELOPT, spec).keys() - NOT_EXPORTED


def check_exported_names(kind: str, layers: int, names: set[str]) -> None:
    """Run ModelOpt's exporter's own check over tensor names; it raises AssertionError.

    Args:
        kind: "llama" or "kimik2".
        layers: number of decoder layers.
        names: tensor names, as exported.
    """
    # By path: importing all of it takes ten seconds.
    spec = find_spec("modelopt")
    assert spec is not None and spec.submodule_search_locations
    package = sys.modules.setdefault("modelopt_export_plugins", ModuleType("modelopt_export_plugins"))
    package.__path__ = [str(Path(spec.submodule_search_locations[0], "torch", "export", "plugins"))]
    exporter = importlib.import_module("modelopt_export_plugins.hf_spec_export").EagleExporter
    eagle = SimpleNamespace(eagle_decoder_type=kind, num_hidden_layers=layers, use_aux_hidden_state=True)
    exporter(SimpleNamespace(eagle_config=eagle))._check_valid_sd(dict.fromkeys(names))


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("kind, spec", [("llama", GQA), ("kimik2", MLA), ("llama", replace(GQA, draft_vocab=40))])
def test_modelopts_exporter_accepts_these_names_and_needs_each_of_them(kind, spec, layers):
    names = set(exported(replace(spec, layers=layers)))
    check_exported_names(kind, layers, names)
    with pytest.raises(AssertionError, match="Unexpected key"):
        check_exported_names(kind, layers, {*names, "layers.0.self_attn.q_norm.weight"})
    for name in names - {"lm_head.weight", "d2t"} - {f"layers.{i}.input_layernorm.weight" for i in range(1, layers)}:
        with pytest.raises(AssertionError, match="Missing required key"):
            check_exported_names(kind, layers, names - {name})


# The two engines' loaders, name by name; where they differ, TensorRT-LLM's first.
OUTSIDE = ["fc.weight", "norm.weight", "lm_head.weight", "embed_tokens.weight"]
FIRST = [
    "layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight", "layers.0.post_attention_layernorm.weight",
    "layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight", "layers.0.mlp.down_proj.weight",
    "layers.0.self_attn.o_proj.weight",
]  # fmt: skip
ATTENTION = {
    "gqa": ["q_proj", "k_proj", "v_proj"],
    "mla": ["q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"],
}


@pytest.mark.parametrize("layout", [VLLM, TRTLLM, MODELOPT], ids=lambda layout: layout.name)
@pytest.mark.parametrize("spec", [GQA, MLA], ids=["gqa", "mla"])
def test_names_of_one_layer(layout, spec):
    attention = [f"layers.0.self_attn.{part}.weight" for part in ATTENTION[spec.kind]]
    assert stored(layout, spec).keys() == {*OUTSIDE, *FIRST, *attention}


def meaning(name: str) -> str:
    """Return the slot that a tensor's own name means; slots are named as transformers names its parameters."""
    slot = name.removesuffix(".weight").removeprefix("layers.").replace("self_attn.", "").replace("mlp.", "")
    later_norm = slot.endswith(".hidden_norm") and not slot.startswith("0.")
    return slot.replace("hidden_norm", "input_layernorm") if later_norm else slot


@pytest.mark.parametrize("layout", [VLLM, TRTLLM, MODELOPT], ids=lambda layout: layout.name)
@pytest.mark.parametrize("spec", PORTABLE.values(), ids=PORTABLE)
def test_a_tensor_holds_what_its_name_says(layout, spec):
    """A round trip would not notice gate and up changing places in every table."""
    rows = stored(layout, spec)
    assert {name: row.slots for name, row in rows.items()} == {name: (meaning(name),) for name in rows}


LATER_NORM = [(VLLM, "input_layernorm"), (TRTLLM, "hidden_norm"), (MODELOPT, "input_layernorm")]


@pytest.mark.parametrize("layout, norm", LATER_NORM)
def test_later_layers_have_one_norm_before_attention_and_each_engine_its_own_name_for_it(layout, norm):
    rows = stored(layout, replace(GQA, layers=3))
    for i in (1, 2):
        assert rows[f"layers.{i}.{norm}.weight"].slots == (f"{i}.input_layernorm",)
        both = (f"layers.{i}.input_layernorm.weight", f"layers.{i}.hidden_norm.weight")
        named = {row.slots for name, row in rows.items() if name in both}
        assert named == {(f"{i}.input_layernorm",)}
    assert rows["layers.0.hidden_norm.weight"].slots == ("0.hidden_norm",)


@pytest.mark.parametrize("layout", [VLLM, TRTLLM, MODELOPT], ids=lambda layout: layout.name)
def test_optional_tensors(layout):
    full = replace(GQA, draft_vocab=40, norms=Norms(before_fc=True, fc=True), mlp_bias=True, fc_bias=True)
    full = replace(full, attention=replace(GQA.attention, bias=True))
    assert stored(layout, full).keys() - stored(layout, GQA).keys() == {
        "d2t", "t2d", "input_norm.weight", "fc.bias", "fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight",
        *(f"layers.0.self_attn.{part}_proj.bias" for part in "qkvo"),
        *(f"layers.0.mlp.{part}_proj.bias" for part in ("gate", "up", "down")),
    }  # fmt: skip


@pytest.mark.parametrize("layout", [VLLM, TRTLLM, MODELOPT], ids=lambda layout: layout.name)
@pytest.mark.parametrize("spec", PORTABLE.values(), ids=PORTABLE)
def test_every_slot_of_a_head_has_a_place(layout, spec):
    assert {slot for row in stored(layout, spec).values() for slot in row.slots} == needs(spec).keys()
    assert not unclaimed(layout, spec).keys() & stored(layout, spec).keys()


@pytest.mark.parametrize("layout", [VLLM, TRTLLM, MODELOPT], ids=lambda layout: layout.name)
def test_published_sizes_follow_from_the_tables(layout):
    def parameters(spec, without=()):
        total = 0
        for name, row in stored(layout, spec).items():
            count = 1
            for dim in row.expected.shape:
                count *= dim
            total += 0 if name in without else count
        return total

    assert parameters(KIMI_MLA, without=("embed_tokens.weight",)) == 1_841_199_104
    assert parameters(KIMI_MLA) == 3_015_604_224
    assert parameters(KIMI_MHA) == 3_178_262_528


DETECTED = {
    "vLLM, by its top-level list": (VLLM.write_config(MLA), ["fc.weight"], VLLM),
    "ModelOpt's kimik2": (MODELOPT_KIMIK2, ["fc.weight"], MODELOPT),
    "ModelOpt's llama": (MODELOPT_LLAMA, ["fc.weight"], MODELOPT),
    "TorchSpec's MLA": (TORCHSPEC_MLA, ["fc.weight"], MODELOPT),
    "TensorRT-LLM, by the norm of layer 1": (
        TRTLLM.write_config(MLA),
        ["fc.weight", "layers.1.hidden_norm.weight"],
        TRTLLM,
    ),
    "ModelOpt, by the norm of layer 1": (
        MODELOPT_LLAMA,
        ["fc.weight", "layers.1.input_layernorm.weight"],
        MODELOPT,
    ),
}


@pytest.mark.parametrize("config, names, layout", DETECTED.values(), ids=DETECTED)
def test_detected(config, names, layout):
    assert detect(config, names) is layout


UNKNOWN = {
    "a target": ({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}, ["model.embed_tokens.weight"]),
    "nothing": ({}, []),
    "odd values": ({"architectures": 5, "model_type": [1]}, ["fc.weight"]),
}


@pytest.mark.parametrize("config, names", UNKNOWN.values(), ids=UNKNOWN)
def test_undetected_says_how_to_name_it(config, names):
    with pytest.raises(UnknownLayout) as caught:
        detect(config, names)
    assert (
        all(layout.name in caught.value.fix for layout in LAYOUTS if layout.drafter is EAGLE3)
        and "--from" in caught.value.fix
    )


def test_a_layout_has_one_name():
    assert [by_name(layout.name) for layout in LAYOUTS] == list(LAYOUTS)
    with pytest.raises(UnknownLayout) as caught:
        by_name("nonsense")
    assert "vllm" in caught.value.fix
