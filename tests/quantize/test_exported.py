"""An export that ModelOpt might make: taken where it is the plan's, and named for each value that is not."""

import json
import shutil
from importlib.metadata import version

import pytest
import torch
from safetensors.torch import load_file, save_file

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import verify
from kconv.errors import TensorMissing, TensorValue
from kconv.quantize.modelopt_backend import take_export

NORM = "model.layers.2.input_layernorm.weight"
EXPERT = "model.layers.2.mlp.experts.1.up_proj"
ATTENTION = "model.layers.2.self_attn.o_proj.weight"  # INT4 leaves it; in FP8 it is dequantized


@pytest.fixture
def export(quantized, tmp_path):
    """Return a function that makes an export of a form: the streaming backend's tensors, changed, in one file."""

    def make(form, change=lambda tensors: None):
        streamed = quantized(form, "nvfp4-experts")
        tensors = {n: t for file in sorted(streamed.glob("*.safetensors")) for n, t in load_file(file).items()}
        change(tensors)
        folder = tmp_path / "export"
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        shutil.copyfile(streamed / "config.json", folder / "config.json")
        return folder

    return make


@pytest.mark.parametrize("form", ["int4", "fp8"])
def test_what_is_the_plans_is_taken_and_the_backend_recorded(form, export, forms, plan):
    folder = export(form)
    take_export(plan(forms(form), "nvfp4-experts"), folder)
    spec = verify(folder, open_checkpoint(forms(form))).spec
    versions = {"modelopt": version("nvidia-modelopt"), "torch": torch.__version__}
    assert {name: spec[name] for name in ("backend", *versions)} == {"backend": "modelopt"} | versions


def test_the_streaming_backend_is_recorded_too(quantized):
    assert json.loads((quantized("int4", "nvfp4-experts") / "kconv.json").read_text())["spec"]["backend"] == "stream"


def one_value(name, value):
    return lambda tensors: tensors[name].view(-1)[:1].fill_(value)


SPOILED = {
    "a norm with NaN": ("int4", one_value(NORM, float("nan")), f"1 values of {NORM} are NaN or Inf"),
    "a block scale that is NaN": (
        "int4",
        lambda tensors: tensors[f"{EXPERT}.weight_scale"].view(torch.uint8).view(-1)[:1].fill_(0x7F),
        f"1 values of {EXPERT}.weight_scale are NaN",
    ),
    "an input scale that is NaN": ("int4", one_value(f"{EXPERT}.input_scale", float("nan")), "input_scale are NaN"),
    "an input scale of zero": ("int4", one_value(f"{EXPERT}.input_scale", 0.0), "input_scale 0.0, but a scale"),
    "a global scale of zero": ("int4", one_value(f"{EXPERT}.weight_scale_2", 0.0), "weight_scale_2 0.0, but a scale"),
    "a negative scale": ("int4", one_value(f"{EXPERT}.weight_scale_2", -1.0), "weight_scale_2 -1.0, but a scale"),
    "a subnormal scale": ("int4", one_value(f"{EXPERT}.weight_scale_2", 1e-40), "a scale must be a normal"),
    "a norm of another": ("int4", one_value(NORM, 7.0), f"ModelOpt changed {NORM}"),
    "attention left in bf16, of another": ("fp8", one_value(ATTENTION, 7.0), f"ModelOpt changed {ATTENTION}"),
}


@pytest.mark.parametrize("form, change, phrase", SPOILED.values(), ids=SPOILED)
def test_each_value_that_cannot_be_is_named(form, change, phrase, export, forms, plan):
    folder = export(form, change)
    with pytest.raises(TensorValue, match=phrase):
        take_export(plan(forms(form), "nvfp4-experts"), folder)
    assert not (folder / "kconv.json").exists()


def test_a_tensor_that_is_not_there_is_named(export, forms, plan):
    with pytest.raises(TensorMissing, match=f"1 tensors, among them {NORM}"):
        take_export(plan(forms("int4"), "nvfp4-experts"), export("int4", lambda tensors: tensors.pop(NORM)))
