"""A head from layout to layout beyond what every pair of layouts is held to in tests/engines/test_layouts_pairs.py."""

import json
from dataclasses import replace

import pytest
from support.heads import (
    GQA,
    MLA,
    MODELOPT_KIMIK2,
    MODELOPT_LLAMA,
    TORCHSPEC_MLA,
    cut,
    random_slots,
    read_bytes,
    write_head,
)

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import MANIFEST, Hints, verify
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.engines import BY_NAME

VLLM, TRTLLM, MODELOPT = BY_NAME["vllm"], BY_NAME["trtllm"], BY_NAME["modelopt"]


def convert(source, out, layout, **hints):
    """Convert and return the manifest; then delete it, so that nothing can be read out of it later."""
    manifest = execute(plan(read_head(open_checkpoint(source), hints=Hints(**hints)), layout), out)
    verify(out, open_checkpoint(source))
    (out / MANIFEST).unlink()
    return manifest


def read_spec(folder):
    return read_head(open_checkpoint(folder)).spec


@pytest.mark.parametrize("spec", [MLA, GQA], ids=["mla", "gqa"])
@pytest.mark.parametrize("layout", [VLLM, TRTLLM], ids=["vllm", "trtllm"])
def test_a_layout_into_itself_changes_no_byte(tmp_path, spec, layout):
    source = write_head(tmp_path / "source", layout, spec, random_slots(spec))
    manifest = convert(source, tmp_path / "out", layout)
    assert {step.action for step in manifest.tensors} == {"copied"}
    assert read_bytes(tmp_path / "out") == read_bytes(source)


def test_a_later_layers_norm_goes_by_each_engines_name(tmp_path):
    """TensorRT-LLM reads the norm before a later layer's attention as hidden_norm, vLLM as input_layernorm."""
    spec = replace(MLA, layers=2)
    slots = random_slots(spec)
    source = write_head(tmp_path / "source", MODELOPT, spec, slots, cut(MODELOPT_KIMIK2, spec))
    before = read_bytes(source)
    norm = before["layers.1.input_layernorm.weight"]
    for layout, name in [(VLLM, "layers.1.input_layernorm.weight"), (TRTLLM, "layers.1.hidden_norm.weight")]:
        convert(source, tmp_path / layout.name, layout)
        after = read_bytes(tmp_path / layout.name)
        assert after[name] == norm
        assert all(after[n] == before[n] for n in before.keys() & after.keys())
        assert all(after[n] == norm for n in after.keys() - before.keys())
        assert before.keys() - after.keys() <= {"layers.1.input_layernorm.weight"}


EXPORTS = {
    "ModelOpt kimik2": (MLA, MODELOPT_KIMIK2, ("embed_tokens",)),
    "ModelOpt kimik2, 2 layers": (replace(MLA, layers=2), MODELOPT_KIMIK2, ("embed_tokens",)),
    "ModelOpt llama": (GQA, MODELOPT_LLAMA, ("embed_tokens",)),
    "ModelOpt llama, reduced": (replace(GQA, draft_vocab=40), MODELOPT_LLAMA, ("embed_tokens", "t2d")),
    "ModelOpt kimik2, reduced, which its config does not say": (
        replace(MLA, draft_vocab=40),
        MODELOPT_KIMIK2,
        ("embed_tokens", "t2d"),
    ),
    "TorchSpec MLA, with its embedding": (MLA, TORCHSPEC_MLA, ()),
}


@pytest.mark.parametrize("spec, config, without", EXPORTS.values(), ids=EXPORTS)
def test_a_trainers_export_is_served_by_vllm(tmp_path, spec, config, without):
    slots = random_slots(spec, without=without)
    source = write_head(tmp_path / "source", MODELOPT, spec, slots, cut(config, spec))
    convert(source, tmp_path / "out", VLLM)
    assert read_bytes(source).items() <= read_bytes(tmp_path / "out").items()
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found["draft_vocab_size"] == spec.draft_vocab, "vLLM cannot load a reduced head without the key"
    assert found["eagle_aux_hidden_state_layer_ids"] == [i + 1 for i in spec.captured]
    assert found["num_aux_hidden_states"] == 3
    assert read_spec(tmp_path / "out").captured == spec.captured
    if spec.draft_vocab == spec.vocab:
        convert(tmp_path / "out", tmp_path / "back", TRTLLM)
        assert set(read_bytes(tmp_path / "back").values()) == set(read_bytes(source).values())


def test_a_published_head_that_lists_vllms_layers_is_read_once_it_is_told(tmp_path):
    spec = replace(MLA, captured=(1, 29, 57))
    listed = cut(TORCHSPEC_MLA, replace(spec, captured=(2, 30, 58)))
    source = write_head(tmp_path / "source", MODELOPT, spec, random_slots(spec), listed)
    manifest = convert(source, tmp_path / "out", VLLM, captured_are="inputs")
    assert "set by the user" in manifest.captured_by
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    convert(tmp_path / "out", tmp_path / "trt", TRTLLM)
    found = json.loads((tmp_path / "trt" / "config.json").read_text())
    assert found["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 29, 57]
    assert "eagle3_layers_to_capture:\n  - 1\n  - 29\n  - 57" in (tmp_path / "trt" / "serve-trtllm.yaml").read_text()


def test_a_sharded_source_with_an_index_gives_the_same_output(tmp_path):
    from safetensors.torch import load_file, save_file

    whole = write_head(tmp_path / "whole", VLLM, MLA, random_slots(MLA))
    tensors = load_file(whole / "model.safetensors")
    shards = tmp_path / "shards"
    shards.mkdir()
    (shards / "config.json").write_text((whole / "config.json").read_text())
    names = sorted(tensors)
    weight_map = {}
    for i in range(3):
        part = names[i::3]
        save_file({name: tensors[name] for name in part}, shards / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{i}.safetensors")
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    convert(whole, tmp_path / "a", TRTLLM)
    convert(shards, tmp_path / "b", TRTLLM)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_mixed_dtypes_are_carried_as_they_are(tmp_path):
    slots = random_slots(MLA)
    slots["fc"], slots["norm"] = slots["fc"].float(), slots["norm"].half()
    source = write_head(tmp_path / "source", VLLM, MLA, slots)
    convert(source, tmp_path / "out", TRTLLM)
    assert read_bytes(tmp_path / "out") == read_bytes(source)
    assert read_spec(tmp_path / "out").dtype == "BF16"


def test_unknown_keys_reach_the_output_and_the_manifest_says_so(tmp_path):
    config = VLLM.write_config(MLA) | {"colour": "blue", "auto_map": {"AutoConfig": "x.py"}, "use_cache": True}
    config["eagle_config"] |= {"depth_hint": 3}
    source = write_head(tmp_path / "source", VLLM, MLA, random_slots(MLA), config)
    manifest = convert(source, tmp_path / "out", TRTLLM)
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found["colour"] == "blue" and found["eagle_config"]["depth_hint"] == 3
    assert "auto_map" not in found and "use_cache" not in found
    assert found["eagle_config"]["aux_hidden_state_layer_ids_are"] == "layer_outputs"
    assert set(manifest.config_copied) == {"colour", "eagle_config.depth_hint"}
    assert set(manifest.config_dropped) == {"auto_map", "use_cache"}
