"""The streaming road: ModelOpt's bits, everything accounted for, and what cannot be right named before it is taken."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.quantized_targets import make_form, write_shards

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import read_manifest, verify
from kconv.checkpoint.staging import keep_staging
from kconv.errors import CorruptIndex, OutputFailed, RecipeInvalid, TensorShape, TensorValue
from kconv.quantize.calibration import data_free
from kconv.quantize.plan import plan_quantize
from kconv.quantize.recipe import parse_recipe
from kconv.quantize.run import quantize
from kconv.quantize.stream import Workplace, make_unit
from kconv.targets.config import parse_target_config
from kconv.targets.weights import stored_weights

FORMS = ("bf16", "int4", "fp8")
EXPERT = "model.layers.2.mlp.experts.1.up_proj"


def tensors_of(folder):
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def stored_of(folder):
    checkpoint = open_checkpoint(folder)
    return stored_weights(checkpoint, parse_target_config(checkpoint.config))


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("form", FORMS)
def test_each_module_is_what_modelopt_packs_of_the_source(form, forms, quantized):
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    source, made = stored_of(forms(form)), tensors_of(quantized(form))
    modules = [name.removesuffix(".weight_scale_2") for name in made if name.endswith(".weight_scale_2")]
    assert len(modules) == 6 * (3 * 4 + 3) + 3 + 7 * 4
    fused = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    fused |= {"q_a_proj": "kv_a_proj_with_mqa", "kv_a_proj_with_mqa": "q_a_proj"}
    for module in modules:
        weight = source[f"{module}.weight"].read()
        base, _, last = module.rpartition(".")
        partner = source[f"{base}.{fused[last]}.weight"].read() if last in fused else weight
        amax = torch.maximum(weight.abs().amax(), partner.abs().amax())
        scale_2 = amax.float() / (6.0 * 448.0)
        packed, scale, _ = NVFP4QTensor.quantize(weight, 16, None, scale_2, try_tensorrt=False)
        assert torch.equal(made[f"{module}.weight"], packed._quantized_data), module
        assert torch.equal(bits(made[f"{module}.weight_scale"]), bits(scale)), module
        assert torch.equal(made[f"{module}.weight_scale_2"].reshape(()), scale_2), module
        assert made[f"{module}.input_scale"].item() == 1.0


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_quantized_keeps_its_bytes_or_its_numbers(form, forms, quantized):
    source, out = stored_of(forms(form)), stored_of(quantized(form, "nvfp4-experts"))
    assert source.keys() == out.keys()
    for name, weight in source.items():
        if ".experts." not in name:
            assert torch.equal(bits(out[name].read()), bits(weight.read())), name


@pytest.mark.parametrize("form", FORMS)
def test_every_source_tensor_is_accounted_for_and_every_byte_verified(form, forms, quantized):
    source = open_checkpoint(forms(form))
    manifest = verify(quantized(form), source)
    taken = [record.name for step in manifest.tensors for record in step.sources]
    assert sorted(taken) == sorted(source.tensors)
    assert {step.action for step in manifest.tensors} <= {"copied", "quantized", "dequantized", "added"}
    assert manifest.spec["input_scale"].startswith("data-free")


def test_a_wrapped_target_keeps_its_vision_tower_and_loses_its_stale_block(forms, quantized):
    source, out = forms("int4", wrapped=True), quantized("int4", "nvfp4-experts", wrapped=True)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
    assert "quantization_config" in before["text_config"]
    assert "quantization_config" not in after["text_config"]
    assert after["text_config"]["model_type"] == "deepseek_v3"
    assert after["quantization_config"]["quant_method"] == "modelopt"
    assert before["vision_config"] == after["vision_config"]
    theirs, ours = tensors_of(source), tensors_of(out)
    vision = [name for name in theirs if name.startswith(("vision_tower", "mm_projector"))]
    assert len(vision) == 2 and all(torch.equal(theirs[name], ours[name]) for name in vision)
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    side = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert side["exclude_modules"] == after["quantization_config"]["ignore"]
    assert not any(name.endswith((".weight_packed", ".weight_shape")) for name in ours)


def test_what_was_written_of_many_tensors_is_read_again(forms, plan, tmp_path, monkeypatch):
    """A record of a file with 250,000 tensors has more values than a config may have."""
    decided = plan(forms("bf16"))
    with monkeypatch.context() as patch:
        patch.setattr("kconv.checkpoint.schema.MAX_JSON_VALUES", 100)
        quantize(decided, tmp_path / "out")
    verify(tmp_path / "out")


def read_so_far() -> int:
    """Return what this process has asked the kernel to read, whatever the page cache held."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("form", FORMS)
def test_what_is_packed_is_read_twice_and_the_rest_once(form, forms, plan, tmp_path):
    (unit,) = plan(forms(form)).units
    place = Workplace(keep_staging(tmp_path / "out", "0" * 16))
    make_unit(unit, place, inputs="")  # what libraries read when they are first used
    before = read_so_far()
    make_unit(unit, place, inputs="")
    twice = sum(info.size for module in unit.modules for info in module.weight.infos)
    # The kernel counts the read of the counter too.
    assert 0 <= read_so_far() - before - (unit.bytes_in + twice) < 4096


def test_weight_only_has_no_input_scale_and_says_so(forms, quantized):
    out = quantized("bf16", "nvfp4-weight-only")
    assert not any(name.endswith("input_scale") for name in tensors_of(out))
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_algo"] == "W4A16_NVFP4"
    assert read_manifest(out).spec["input_scale"] == "none"


def test_fused_modules_in_two_files_share_one_scale(tiny_target, plan, tmp_path):
    source = make_form(tiny_target, tmp_path / "source", "bf16")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    write_shards(tensors, source, 40)  # so many that gates and ups part
    assert len(open_checkpoint(source).files) > 30
    quantize(plan(source, shard=20_000), tmp_path / "out")
    made = tensors_of(tmp_path / "out")
    gates = [name for name in made if name.endswith("gate_proj.weight_scale_2")]
    assert gates and all(made[name] == made[name.replace("gate_proj", "up_proj")] for name in gates)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 20
    verify(tmp_path / "out", open_checkpoint(source))


@pytest.fixture
def spoiled(tiny_target, tmp_path):
    """Return a function that makes a form of the target with some tensors changed."""

    def make(form, change):
        folder = make_form(tiny_target, tmp_path / "source", form)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


def set_all(name, value):
    return lambda tensors: tensors[name].fill_(value)


def set_one(name, value):
    def change(tensors):
        tensors[name].view(-1)[5] = value

    return change


VALUES = {
    "zero": ("bf16", set_all(f"{EXPERT}.weight", 0.0), "is all zeros"),
    "NaN": ("bf16", set_one(f"{EXPERT}.weight", float("nan")), "NaN or Inf"),
    "Inf": ("bf16", set_one(f"{EXPERT}.weight", float("inf")), "NaN or Inf"),
    "zero scales of INT4": ("int4", set_all(f"{EXPERT}.weight_scale", 0.0), "is all zeros"),
    "a NaN scale of INT4": ("int4", set_one(f"{EXPERT}.weight_scale", float("nan")), "NaN or Inf"),
    "a NaN scale of FP8": ("fp8", set_all(f"{EXPERT}.weight_scale_inv", float("nan")), "NaN or Inf"),
    "NaN in what is carried": ("bf16", set_one("lm_head.weight", float("nan")), "1 values of lm_head.weight are NaN"),
}


@pytest.mark.parametrize("form, change, phrase", VALUES.values(), ids=VALUES)
def test_values_that_cannot_be_are_named_and_nothing_is_left_that_a_reader_takes(form, change, phrase, spoiled, plan):
    source = spoiled(form, change)
    out = source.parent / "out"
    with pytest.raises(TensorValue, match=phrase):
        quantize(plan(source), out)
    assert not out.exists()
    for left in source.parent.rglob("*"):
        assert left.is_relative_to(source) or left.name != "config.json"


def test_columns_that_make_no_groups_are_named(spoiled, plan):
    def cut(tensors):
        tensors[f"{EXPERT}.weight"] = tensors[f"{EXPERT}.weight"][:, :60].contiguous()

    with pytest.raises(TensorShape, match=r"is \[32, 60\], but 60 columns do not form groups of 16"):
        plan(spoiled("bf16", cut))


def test_a_missing_shard_is_named(forms, plan, tmp_path):
    source = shutil.copytree(forms("int4"), tmp_path / "source")
    next(iter(sorted(source.glob("*.safetensors")))).unlink()
    with pytest.raises(CorruptIndex, match="which is missing"):
        plan(source)


def test_a_disk_that_is_too_small_is_named_before_anything_is_made(forms, plan, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(OutputFailed, match="GB are free"):
        quantize(plan(forms("bf16")), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_is_nvfp4_already_is_refused(quantized, plan):
    with pytest.raises(RecipeInvalid, match="already NVFP4"):
        plan(quantized("bf16"))


def test_a_pattern_that_matches_nothing_is_named(forms):
    source = open_checkpoint(forms("bf16"))
    recipe = parse_recipe("name: x\nquantize: ['model.layers.*.mlp.*_proj', 'model.layers.*.mixer.*']\n")
    with pytest.raises(RecipeInvalid, match=r"mixer.*matches no linear module"):
        plan_quantize(source, parse_target_config(source.config), recipe, data_free())
