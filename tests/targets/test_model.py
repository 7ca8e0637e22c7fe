"""Loading a target: the same weights as transformers finds, and nothing missing, left over or of a wrong shape."""

import json
import shutil

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from kconv.errors import SourceFormatUnknown, TargetInvalid, TargetTooLarge
from kconv.targets.model import load_target


@pytest.fixture
def folder(tiny_target, tmp_path):
    """Return a copy of the tiny target that a test may spoil."""
    return shutil.copytree(tiny_target, tmp_path / "target")


def change_config(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tensors(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_transformers_own_loader_finds_the_same_model(tiny_target, model):
    values = json.loads((tiny_target / "config.json").read_text()) | {"model_type": "deepseek_v3"}
    theirs, info = DeepseekV3ForCausalLM.from_pretrained(
        tiny_target, config=DeepseekV3Config(**values), dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())
    ours = model.state_dict()
    assert ours.keys() == theirs.state_dict().keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.state_dict().items())
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, theirs.eval()(tokens).logits)


def test_the_dtype_is_the_callers_except_for_the_routers_bias(tiny_target, model):
    loaded = load_target(tiny_target, torch.bfloat16)
    for name, tensor in loaded.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            assert torch.equal(tensor, model.state_dict()[name])
        else:
            assert torch.equal(tensor, model.state_dict()[name].bfloat16())
    assert not loaded.training


def test_a_wrapped_target_is_the_same_target(folder, model):
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))

    def wrap(tensors):
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["vision_tower.patch_embed.proj.weight"] = torch.zeros(3)
        tensors["mm_projector.proj.0.weight"] = torch.zeros(3)

    change_tensors(folder, wrap)
    loaded = load_target(folder, torch.float32).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.3.mlp.experts.2.up_proj.weight",
        "model.layers.3.mlp.gate.e_score_correction_bias",
    ],
)
def test_a_missing_tensor_is_named(folder, name):
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(TargetInvalid, match=f"1 missing .first: {name}"):
        load_target(folder, torch.float32)


@pytest.mark.parametrize("name", ["model.layers.3.mlp.experts.99.up_proj.weight", "extra"])
def test_an_unknown_tensor_is_named(folder, name):
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(1)}))
    with pytest.raises(TargetInvalid, match=f"1 unknown .first: {name}"):
        load_target(folder, torch.float32)


def test_a_wrong_shape_is_named(folder):
    # The same number of values, so nothing else could notice.
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].T.contiguous()}))
    with pytest.raises(TargetInvalid, match=r"lm_head\.weight is F32"):
        load_target(folder, torch.float32)


def test_a_target_in_an_unknown_form_is_refused_before_a_weight_is_read(folder):
    change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(SourceFormatUnknown, match=r"quantized \('gptq'\)"):
        load_target(folder, torch.float32)


def test_packed_integers_are_refused_though_the_config_is_silent(folder):
    name = "model.layers.3.mlp.experts.2.up_proj.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(SourceFormatUnknown, match=f"{name} is I8"):
        load_target(folder, torch.float32)


@pytest.mark.parametrize("spare, is_refused", [(-1, True), (0, False)])
def test_a_target_larger_than_the_memory_that_is_left_is_refused(folder, model, monkeypatch, spare, is_refused):
    # As many numbers as transformers' own model has, of two bytes each.
    size = sum(tensor.numel() for tensor in model.state_dict().values()) * 2
    left = psutil.virtual_memory()._replace(available=size + spare)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: left)
    monkeypatch.setattr(psutil, "swap_memory", lambda: type("Swap", (), {"free": 0}))
    if is_refused:
        with pytest.raises(TargetTooLarge, match=r"GB of memory as bfloat16, but .* GB are free"):
            load_target(folder, torch.bfloat16)
    else:
        load_target(folder, torch.bfloat16)


def test_another_family_than_the_weights_is_refused(folder):
    change_config(folder, model_type="llama")
    with pytest.raises(TargetInvalid, match=r"missing .*unknown"):
        load_target(folder, torch.float32)


@pytest.mark.parametrize("name", ["no_such_model", "vit", "t5"])
def test_what_transformers_has_no_causal_model_for_is_refused_by_name(folder, name):
    change_config(folder, model_type=name)
    with pytest.raises(TargetInvalid, match=name):
        load_target(folder, torch.float32)


def test_what_transformers_cannot_build_is_named(folder):
    change_config(folder, hidden_act="no such function")
    with pytest.raises(TargetInvalid, match="no such function"):
        load_target(folder, torch.float32)
