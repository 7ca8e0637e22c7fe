"""The output in compressed-tensors' form: its own converter's tensors, its own reader's numbers, its own config."""

import json

import pytest
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import NVFP4, NVFP4A16
from compressed_tensors.utils.match import match_name
from safetensors.torch import load_file

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import verify
from kconv.errors import RecipeInvalid, SourceFormatUnknown
from kconv.quantize.calibration import data_free
from kconv.quantize.modelopt_backend import plan_in_memory
from kconv.quantize.plan import plan_quantize
from kconv.quantize.recipe import load_recipe
from kconv.quantize.run import quantize
from kconv.targets.config import parse_target_config
from kconv.targets.weights import stored_weights


def recipe_of(name, **changes):
    return load_recipe(name).model_copy(update={"format": "compressed-tensors", **changes})


@pytest.fixture(scope="module")
def made(forms, tmp_path_factory):
    """Return the folder of a form under a recipe in compressed-tensors' form."""
    found = {}

    def find(form, name="nvfp4", **changes):
        key = (form, name, *changes.items())
        if key not in found:
            source = open_checkpoint(forms(form))
            plan = plan_quantize(source, parse_target_config(source.config), recipe_of(name, **changes), data_free())
            found[key] = tmp_path_factory.mktemp("packed") / "out"
            quantize(plan, found[key])
        return found[key]

    return find


def tensors_of(folder):
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("form", ("bf16", "int4", "llama"))
def test_the_tensors_are_those_that_compressed_tensors_converts_modelopts_to(form, made, quantized):
    theirs, ours = tensors_of(quantized(form)), tensors_of(made(form))
    modules = [name.removesuffix(".weight_scale_2") for name in theirs if name.endswith(".weight_scale_2")]
    assert modules
    converted = ModelOptNvfp4Converter(targets=modules).process(theirs)
    assert converted.keys() == ours.keys()
    assert [name for name in ours if not torch.equal(bits(converted[name]), bits(ours[name]))] == []


@pytest.mark.parametrize("scales", ("max", "mse"))
def test_compressed_tensors_own_reader_gives_the_numbers_that_kconv_reads(scales, made, quantized):
    folder = made("llama", weight_scales=scales)
    checkpoint, tensors = open_checkpoint(folder), tensors_of(folder)
    config = QuantizationConfig.model_validate(json.loads((folder / "config.json").read_text())["quantization_config"])
    [scheme] = config.config_groups.values()
    ours = stored_weights(checkpoint, parse_target_config(checkpoint.config))
    modules = [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]
    assert len(modules) > 10
    modelopts = stored_weights(plain := open_checkpoint(quantized("llama")), parse_target_config(plain.config))
    for module in modules:
        parts = {name.rpartition(".")[2]: t for name, t in tensors.items() if name.startswith(f"{module}.")}
        read = NVFP4PackedCompressor.decompress(parts, scheme)["weight"]
        mine = ours[f"{module}.weight"].read()
        assert torch.equal(mine, read.to(mine.dtype)), module
        if scales == "max":
            # A quotient by a reciprocal, for a product: the last bit of bf16 in few of them.
            other = modelopts[f"{module}.weight"].read()
            assert ((mine.float() - other.float()).abs() <= other.float().abs() * 2.0**-7).all()
            assert (mine != other).float().mean() < 1e-2


@pytest.mark.parametrize("weight_only", (False, True))
def test_the_config_is_compressed_tensors_own_and_covers_each_linear_layer_once(weight_only, made):
    folder = made("bf16", "nvfp4-experts", weight_only=weight_only)
    block = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(block)
    assert (config.format, config.quant_method) == ("nvfp4-pack-quantized", "compressed-tensors")
    [scheme] = config.config_groups.values()
    preset = NVFP4A16 if weight_only else NVFP4
    assert scheme == QuantizationScheme(targets=["Linear"], format="nvfp4-pack-quantized", **preset)
    assert not (folder / "hf_quant_config.json").exists()
    tensors = tensors_of(folder)
    packed = {name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")}
    plain = {name.removesuffix(".weight") for name, t in tensors.items() if name.endswith(".weight") and t.dim() == 2}
    plain -= {"model.embed_tokens"}
    ignored = {module for module in packed | plain for entry in config.ignore if match_name(module, entry)}
    assert len(packed) == 72 and ignored == plain
    assert any(name.endswith("input_global_scale") for name in tensors) != weight_only


def test_the_manifest_verifies_and_its_noise_is_measured(made, forms):
    from kconv.validate.quantized import check_quantized

    folder, source = made("int4", "nvfp4-experts"), open_checkpoint(forms("int4"))
    manifest = verify(folder, source)
    assert (manifest.layout, manifest.spec["recipe"]["format"]) == ("nvfp4-pack-quantized", "compressed-tensors")
    findings, noise = check_quantized(open_checkpoint(folder), source)
    assert findings == [] and noise.tensors == 72 and noise.median is not None and noise.median > 15


def test_it_is_not_quantized_again_nor_by_modelopt(made, forms):
    checkpoint = open_checkpoint(made("llama"))
    with pytest.raises(RecipeInvalid, match="already NVFP4"):
        plan_quantize(checkpoint, parse_target_config(checkpoint.config), load_recipe("nvfp4"), data_free())
    source = open_checkpoint(forms("bf16"))
    with pytest.raises(RecipeInvalid, match="does not write the format compressed-tensors"):
        plan_in_memory(source, parse_target_config(source.config), recipe_of("nvfp4"), None)


def test_a_group_that_is_not_nvfp4_is_named(made, tmp_path):
    folder = tmp_path / "out"
    folder.symlink_to(made("llama"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 32
    checkpoint = open_checkpoint(folder)
    with pytest.raises(SourceFormatUnknown, match="which are not NVFP4"):
        stored_weights(checkpoint, parse_target_config(config))
