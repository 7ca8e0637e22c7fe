"""MXFP4 is cast to NVFP4 with ModelOpt's bits and the source's numbers, or refused by name."""

import json
import re

import pytest
import torch
from click.testing import CliRunner
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import MXFP4A16
from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from modelopt.torch.quantization.utils.numeric_utils import (
    mxfp4_to_nvfp4_global_amax,
    mxfp4_to_nvfp4_per_block_amax,
)
from safetensors.torch import load_file, save_file
from support.deepseek_v4 import CONFIG, write_source
from support.quantized_targets import make_form, quantize_mxfp4
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.formats import MXFP4, NVFP4
from kconv.checkpoint.header import read_header
from kconv.checkpoint.manifest import verify
from kconv.cli import main
from kconv.errors import RecipeInvalid, SourceFormatUnknown, TargetInvalid, TensorValue
from kconv.measure.figures import NoiseFigures
from kconv.quantize.calibration import data_free
from kconv.quantize.mxfp4_to_nvfp4 import cast, scale_2_of
from kconv.quantize.plan import plan_quantize
from kconv.quantize.recipe import load_recipe
from kconv.quantize.run import quantize
from kconv.targets.config import parse_target_config
from kconv.targets.weights import Quantized, stored_weights
from kconv.validate.quantized import check_quantized

GATE, UP, DOWN = (f"model.layers.2.mlp.experts.1.{part}_proj" for part in ("gate", "up", "down"))


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def stored(tensors, folder):
    """Return a weight of these tensors as it is read from a file."""
    save_file({f"x.{suffix}": tensor for suffix, tensor in tensors.items()}, folder / "x.safetensors")
    return Quantized(MXFP4, MXFP4.parts("x", read_header(folder / "x.safetensors")))


def weight_of(low=-6, high=6, rows=24, columns=128):
    """Return MXFP4 whose groups' scales range over powers of two, with every nibble, and groups of zeros."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    packed[3, :32] = 0
    scales = torch.randint(low, high + 1, (rows, columns // 32), generator=generator) + 127
    scales[0, 0], scales[0, 1] = low + 127, high + 127
    return {"weight_packed": packed, "weight_scale": scales.to(torch.uint8)}


def modelopt(tensors):
    """Return ModelOpt's nibbles, scales and weight_scale_2 of its own cast: its static amaxes through its exporter."""
    packed, exponents = tensors["weight_packed"], tensors["weight_scale"]
    global_amax, _ = mxfp4_to_nvfp4_global_amax(exponents)
    blocks = packed.unflatten(-1, (-1, 16))
    shared = torch.tensor(global_amax) / (6.0 * 448.0)
    amaxes = mxfp4_to_nvfp4_per_block_amax(blocks, exponents)
    scales = NVFP4QTensor._cast_per_block_scale_to_fp8(amaxes / 6.0, torch.tensor(global_amax) / 6.0)
    made = NVFP4QTensor.quantize(MXFP4.unpack(tensors), 16, scales, shared, try_tensorrt=False)[0]
    return made._quantized_data, scales, shared


@pytest.mark.parametrize("low, high", [(-6, 6), (-17, 0), (0, 0), (-100, -90)])
def test_the_cast_has_modelopts_bits_and_the_sources_numbers(low, high, tmp_path):
    tensors = weight_of(low, high)
    weight = stored(tensors, tmp_path)
    shared = scale_2_of([weight])
    [made] = cast(weight, shared)
    packed, scales, theirs = modelopt(tensors)
    assert shared == float(theirs)
    assert torch.equal(made.weight, packed) and torch.equal(bits(made.weight_scale), bits(scales))
    back = NVFP4.unpack(made.stored(torch.tensor(shared)))
    scheme = QuantizationScheme(targets=["Linear"], **MXFP4A16)
    source = MXFP4PackedCompressor.decompress(tensors, scheme)["weight"]
    assert torch.equal(back, weight.read().float()) and torch.equal(back, source.float())


def test_modules_that_share_a_scale_are_cast_with_the_largest(tmp_path):
    (tmp_path / "one").mkdir(), (tmp_path / "other").mkdir()
    small = stored(weight_of(-9, -8), tmp_path / "one")
    shared = scale_2_of([small, stored(weight_of(-1, 0), tmp_path / "other")])
    assert shared == 2.0**-8
    [made] = cast(small, shared)
    assert torch.equal(NVFP4.unpack(made.stored(torch.tensor(shared))), small.read().float())


def nan(tensors):
    tensors["weight_scale"][5, 1] = 255


def far(tensors):
    tensors["weight_scale"][5, 1] = 127 + 6 - 18


def zeros(tensors):
    tensors["weight_packed"].zero_(), tensors["weight_scale"].zero_()


@pytest.mark.parametrize(
    "change, phrase", [(nan, "holds NaN"), (far, r"scales of 2\^-12 where 2\^6"), (zeros, "but zeros")]
)
def test_what_cannot_be_cast_is_named(change, phrase, tmp_path):
    tensors = weight_of()
    change(tensors)
    with pytest.raises(TensorValue, match=phrase):
        scale_2_of([stored(tensors, tmp_path)])


def test_a_group_of_zeros_may_be_as_far_away_as_it_likes(tmp_path):
    tensors = weight_of()
    tensors["weight_packed"][5, 16:32] = 0x80
    tensors["weight_scale"][5, 1] = 1
    weight = stored(tensors, tmp_path)
    [made] = cast(weight, shared := scale_2_of([weight]))
    assert torch.equal(NVFP4.unpack(made.stored(torch.tensor(shared))), weight.read().float())


@pytest.fixture(scope="module")
def source(tiny_target, tmp_path_factory):
    return open_checkpoint(make_form(tiny_target, tmp_path_factory.mktemp("mxfp4") / "target", "mxfp4"))


def plan_of(source, recipe):
    return plan_quantize(source, parse_target_config(source.config), recipe, data_free())


def test_a_target_is_cast_and_its_manifest_says_so(source, tmp_path):
    quantize(plan_of(source, load_recipe("nvfp4-experts")), tmp_path / "out")
    out = open_checkpoint(tmp_path / "out")
    ours, theirs = (stored_weights(one, parse_target_config(one.config)) for one in (out, source))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name].read(), theirs[name].read())] == []
    made = load_file(next(iter((tmp_path / "out").glob("*.safetensors"))))
    assert made[f"{GATE}.weight_scale_2"] == made[f"{UP}.weight_scale_2"]
    manifest = verify(tmp_path / "out", source)
    assert manifest.spec["weight_scales"] == "cast"
    findings, noise = check_quantized(out, source)
    assert findings == [] and noise == NoiseFigures(tensors=72, exact=72)
    [step] = [step for step in manifest.tensors if step.output.name == f"{DOWN}.weight"]
    assert step.reason == "NVFP4 of mxfp4-pack-quantized, cast exactly" and len(step.sources) == 2


def test_a_search_and_a_second_format_are_refused(source):
    with pytest.raises(RecipeInvalid, match="there are no scales to search for"):
        plan_of(source, load_recipe("nvfp4-experts-mse"))
    config = json.loads(json.dumps(source.config))
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = groups["group_0"] | {"format": "float-quantized"}
    with pytest.raises(SourceFormatUnknown, match="float-quantized"):
        stored_weights(source, parse_target_config(config))


def test_the_form_is_compressed_tensors_own():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    tensors = quantize_mxfp4(weight)
    scheme = QuantizationScheme(targets=["Linear"], **MXFP4A16)
    assert torch.equal(MXFP4.unpack(tensors), MXFP4PackedCompressor.decompress(tensors, scheme)["weight"].bfloat16())


def of_gpt_oss():
    """gpt-oss's experts, as transformers reads them."""
    blocks = torch.randint(0, 256, (4, 128, 2, 16), dtype=torch.uint8)
    scales, name = torch.full((4, 128, 2), 120, dtype=torch.uint8), "model.layers.0.mlp.experts.gate_up_proj"
    assert convert_moe_packed_tensors(blocks, scales).dim() == 3
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, {"quant_method": "mxfp4"}


def test_mxfp4_that_is_not_cast_is_refused_by_name(source, tmp_path):
    tensors, quantization = of_gpt_oss()
    config = source.config | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(TargetInvalid, match="gate_up_proj_blocks is a part of gpt-oss's experts"):
        plan_quantize(checkpoint, parse_target_config(config), load_recipe("nvfp4-experts"), data_free())


def kconv(*words):
    done = CliRunner().invoke(main, [str(word) for word in words])
    return done.exit_code, done.output + done.stderr


def test_deepseek_v4s_experts_are_cast_amid_its_fp8(tmp_path):
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
    code, said = kconv("quantize", source, out, "--recipe", "nvfp4-experts", "--input-scale", "data-free")
    assert code == 0, said
    before, after = load_file(source / "model.safetensors"), {}
    for file in out.glob("*.safetensors"):
        after |= load_file(file)
    experts = {name[:-7] for name in before if name.startswith("layers") and re.search(r"\.experts\..*\.weight$", name)}
    assert len(experts) == 18
    for name in experts:
        pair = [name, name[:-1] + {"1": "3", "3": "1"}.get(name[-1], name[-1])]
        packed, scale = before.pop(f"{name}.weight"), before[f"{name}.scale"]
        top = max(int(before[f"{one}.scale"].view(torch.uint8).max()) for one in pair) - 127
        # ModelOpt's own reading of both.
        shape = torch.Size((len(packed), 2 * packed.shape[1]))
        theirs = MXFP4QTensor(shape, torch.bfloat16, packed.view(torch.uint8)).dequantize(
            scale=scale.view(torch.uint8), block_sizes={-1: 32}
        )
        assert after[f"{name}.weight_scale_2"].item() == 2.0 ** (top - 8)
        ours = NVFP4QTensor(theirs.shape, theirs.dtype, after.pop(f"{name}.weight")).dequantize(
            scale=after.pop(f"{name}.weight_scale"), double_scale=after[f"{name}.weight_scale_2"], block_sizes={-1: 16}
        )
        assert torch.equal(ours, theirs), name
    rest = {name for name in before if name.rpartition(".")[0] not in experts}
    assert rest == {name for name in after if name.rpartition(".")[0] not in experts}
    assert all(torch.equal(bits(before[name]), bits(after[name])) for name in rest)
    # As NVIDIA publishes it, and as rules and verify want it.
    config, theirs = json.loads((out / "config.json").read_text()), CONFIG["quantization_config"]
    ours = config["quantization_config"]
    assert {**config, "quantization_config": 0} == {**CONFIG, "quantization_config": 0}
    assert {**ours, "producer": 0} == {**theirs, "producer": 0}
    for words in (("validate", out, "--source", source, "--strict"), ("verify", out)):
        code, said = kconv(*words)
        assert code == 0, said
    assert "18 of 18 tensors in NVFP4 were cast without noise" in " ".join(
        kconv("validate", out, "--source", source)[1].split()
    )


@pytest.mark.parametrize("recipe", ["nvfp4-mlp", "nvfp4-weight-only", "part"])
def test_of_deepseek_v4_only_all_experts_become_nvfp4(recipe, tmp_path):
    source = write_source(tmp_path / "source")
    if recipe == "part":
        recipe = tmp_path / "part.yaml"
        recipe.write_text("{name: part, quantize: [model.layers.1.mlp.experts.*_proj]}")
    scale = () if recipe == "nvfp4-weight-only" else ("--input-scale", "data-free")
    code, said = kconv("quantize", source, tmp_path / "out", "--recipe", recipe, *scale)
    assert code == 1 and "Use the recipe nvfp4-experts." in said, said
    assert not (tmp_path / "out").exists()
