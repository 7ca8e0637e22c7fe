"""Both roads to one format: ModelOpt's exporter, and kconv's streaming with its own calibration, bit for bit."""

import pytest
import torch
from safetensors.torch import load_file

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.source import Folder
from kconv.errors import RecipeInvalid, TensorMissing
from kconv.quantize.calibrate import calibrate
from kconv.quantize.calibration import Prompts, write_calibration
from kconv.quantize.inputs import from_calibration
from kconv.quantize.modelopt_road import quantize_in_memory
from kconv.quantize.plan import plan_quantize
from kconv.quantize.recipe import load_recipe, parse_recipe
from kconv.quantize.run import quantize
from kconv.target.config import parse_target_config
from kconv.validate.run import validate


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 200, (1, 40), generator=generator) for _ in range(4)]


def tensors_of(folder):
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def bits(tensor):
    return tensor.reshape(-1).contiguous().view(torch.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("form, recipe", [("bf16", "nvfp4"), ("int4", "nvfp4-mlp"), ("fp8", "nvfp4-experts")])
def test_both_roads_make_the_same_bits(form, recipe, forms, tmp_path):
    source, chosen = open_checkpoint(forms(form)), load_recipe(recipe)
    config = parse_target_config(source.config)
    quantize_in_memory(forms(form), tmp_path / "modelopt", chosen, batches())
    prompts = Prompts(sha256="0" * 64, count=4, tokens=160)
    found = calibrate(source, config, [ids[0] for ids in batches()], prompts, dtype=torch.bfloat16)
    write_calibration(tmp_path / "calibration.json", found)
    inputs = from_calibration(tmp_path / "calibration.json", source, config)
    quantize(plan_quantize(source, config, chosen, inputs), tmp_path / "streamed")
    theirs, ours = tensors_of(tmp_path / "modelopt"), tensors_of(tmp_path / "streamed")
    assert theirs.keys() == ours.keys()
    unequal = [name for name in theirs if not torch.equal(bits(theirs[name]), bits(ours[name]))]
    packed = [name for name in ours if name.endswith(("weight_scale", "weight_scale_2", "input_scale"))]
    assert len(packed) > 200
    assert unequal == []
    configs = [(tmp_path / road / "config.json").read_text() for road in ("modelopt", "streamed")]
    assert configs[0] == configs[1]
    assert [f.rule for f in validate(Folder(tmp_path / "modelopt"), say=lambda _: None).findings] == []


CUTS = {
    "one expert of each layer": (["model.layers.*.mlp.experts.1.*_proj"], RecipeInvalid, "experts of a layer as one"),
    "one expert, beside attention": (
        ["model.layers.*.mlp.experts.1.*_proj", "model.layers.*.self_attn.o_proj"],
        TensorMissing,
        "differ in",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("patterns, fault, phrase", CUTS.values(), ids=CUTS)
def test_a_recipe_that_cuts_through_the_fused_experts_is_named(patterns, fault, phrase, forms, tmp_path):
    recipe = parse_recipe(f"name: cut\nquantize: {patterns}\n")
    with pytest.raises(fault, match=phrase):
        quantize_in_memory(forms("bf16"), tmp_path / "out", recipe, batches())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_without_batches_the_missing_input_scales_are_named(forms, tmp_path):
    with pytest.raises(TensorMissing, match="input_scale"):
        quantize_in_memory(forms("bf16"), tmp_path / "out", load_recipe("nvfp4-experts"), [])


def test_a_wrapped_target_is_refused(forms, tmp_path):
    with pytest.raises(RecipeInvalid, match="wrapped"):
        quantize_in_memory(forms("bf16", wrapped=True), tmp_path / "out", load_recipe("nvfp4-experts"), batches())
