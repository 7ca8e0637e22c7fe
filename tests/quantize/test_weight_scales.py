"""Block scales by search, against ModelOpt's presets from its own calibration to its own export, and a brute force."""

import copy

import modelopt.torch.quantization as mtq
import pytest
import torch
from modelopt.torch.quantization import tensor_quant
from modelopt.torch.quantization.nn.modules import tensor_quantizer
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor, e2m1_values
from safetensors.torch import load_file
from support.nvfp4_blocks import BLOCKS, PACKERS, random
from support.quantized_targets import store_weight

from kconv.checkpoint.manifest import verify
from kconv.quantize import stream
from kconv.quantize.pack import _pack_with_modelopt, amax, pack, scale_2, unpack
from kconv.targets.weights import stored_weights

PRESETS = {"mse": mtq.NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG, "four-over-six": mtq.NVFP4_FOUR_OVER_SIX_CFG}
# Two scales whose squared errors differ by less are equal in float32: which one wins depends on the order of a sum, in
# which ModelOpt's own CPU, CUDA and Triton ways differ too.
TIE = 1e-6
TIES = 1e-3  # the share of blocks with such a tie, in bf16


def losses(weight, scale, shared):
    """Return the squared error of each block with its scale, exactly enough to compare."""
    divisors = (scale.float() * shared).double().unsqueeze(-1)
    sizes = weight.double().abs().unflatten(-1, (-1, 16))
    steps = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    return (sizes.unsqueeze(-1) - steps * divisors.unsqueeze(-1)).abs().amin(-1).square().sum(-1)


def bits(scale):
    return scale.view(torch.uint8)


def fake_quantize(x, amaxes, global_amax, _scales, normalized, dtype, _backward):
    """ModelOpt's compute_fp4_scales and nvfp4_scalar_quant, which are Triton's and CUDA's alone.

    https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/kernels/quantization/gemm/fp4_kernel.py#L191-L231
    """
    whole = global_amax.float() * (448.0 / normalized) / 6.0
    scale = tensor_quant.scaled_e4m3_impl(amaxes.float() / 6.0, whole).view(-1, 1)
    safe = torch.where((scale == 0) | ~scale.isfinite(), 1.0, scale)
    flat = x.reshape(len(scale), -1).float()
    sizes = e2m1_values[NVFP4QTensor._cast_fp4(flat.abs() / safe).long()] * safe
    made = torch.where(flat >= 0, sizes, -sizes)
    return torch.where(scale == 0, 0.0, made).to(dtype).view(x.shape)


def weight_of(dtype=torch.bfloat16):
    weight = random(256, 512, spread=0.7) * 0.02
    weight[3, 16:48] = 0.0
    weight[5] *= 1e-4  # whose block scales are among the smallest of e4m3
    return weight.to(dtype)


@pytest.mark.parametrize("scales", PRESETS)
def test_the_bits_are_those_of_modelopts_preset(scales, monkeypatch):
    monkeypatch.setattr(tensor_quantizer, "static_blockwise_fp4_fake_quant", fake_quantize)
    model = torch.nn.Sequential(torch.nn.Linear(512, 256, bias=False, dtype=torch.bfloat16))
    weight = weight_of()
    model[0].weight.data = weight.clone()
    mtq.quantize(model, copy.deepcopy(PRESETS[scales]), lambda model: model(torch.ones(2, 512, dtype=torch.bfloat16)))
    theirs, shared = NVFP4QTensor.get_weights_scaling_factor_from_quantizer(model[0].weight_quantizer, weight)
    assert torch.equal(scale_2(amax(weight), scales), shared.reshape(()))
    ours = pack(weight, float(shared), scales)
    other = bits(ours.weight_scale) != bits(theirs)
    assert other.float().mean() < TIES
    mine, modelopts = losses(weight, ours.weight_scale, shared)[other], losses(weight, theirs, shared)[other]
    assert ((mine - modelopts).abs() <= TIE * modelopts).all()
    # Where the scales are ModelOpt's, so are the nibbles.
    packed = NVFP4QTensor.quantize(weight.clone(), 16, theirs, shared, try_tensorrt=False)[0]._quantized_data
    same = ~other.repeat_interleave(8, dim=-1)
    assert torch.equal(ours.weight[same], packed[same])


# In the others squares are beyond float32, in ModelOpt too.
ORDINARY = [name for name in BLOCKS if name not in ("denormal", "huge", "from tiny to huge")]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("blocks", ORDINARY)
def test_no_e4m3_number_has_a_smaller_error_than_the_one_that_is_found(blocks, dtype):
    weight = BLOCKS[blocks].to(dtype)
    shared = scale_2(amax(weight), "mse")
    made = pack(weight, float(shared), "mse")
    every = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    least = torch.stack([losses(weight, scale.expand(made.weight_scale.shape), shared) for scale in every]).amin(0)
    assert (losses(weight, made.weight_scale, shared) <= least * (1 + TIE)).all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("scales", PRESETS)
def test_compiled_and_torchs_searches_find_the_same(scales, blocks, dtype):
    weight = BLOCKS[blocks].to(dtype)
    for foreign in (1.0, 0.01):
        shared = float(scale_2(amax(weight) * foreign, scales))
        made, plain = PACKERS["compiled"](weight, shared, scales), PACKERS["torch"](weight, shared, scales)
        assert torch.equal(bits(made.weight_scale), bits(plain.weight_scale))
        assert torch.equal(made.weight, plain.weight)


@pytest.mark.parametrize("scales", PRESETS)
def test_a_gpus_way_finds_the_same(scales):
    weight = weight_of()
    shared = float(scale_2(amax(weight), scales))
    made, theirs = pack(weight, shared, scales), _pack_with_modelopt(weight.clone(), shared, scales)
    assert torch.equal(bits(made.weight_scale), bits(theirs.weight_scale)) and torch.equal(made.weight, theirs.weight)


def test_a_search_lessens_the_error_and_the_whole_one_the_most():
    weight = weight_of(torch.float32)
    noise = {}
    for scales in ("max", "four-over-six", "mse"):
        shared = float(scale_2(amax(weight), scales))
        noise[scales] = float((unpack(pack(weight, shared, scales), shared, torch.float32) - weight).square().sum())
    assert noise["mse"] < 0.95 * noise["four-over-six"] < 0.9 * noise["max"]


def tensors_of(folder):
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("form", ("bf16", "int4"))
@pytest.mark.parametrize("scales", PRESETS)
def test_a_recipe_searches_in_every_form_and_manifest_and_record_say_so(scales, form, forms, quantized, plan):
    recipe = f"nvfp4-experts-{scales}"
    out, source = quantized(form, recipe), plan(forms(form), recipe).source
    made, stored = tensors_of(out), stored_weights(source, plan(forms(form)).config)
    gate, up = (f"model.layers.2.mlp.experts.1.{part}_proj" for part in ("gate", "up"))
    weights = [stored[f"{name}.weight"].read() for name in (gate, up)]
    shared = float(scale_2(max(map(amax, weights)), scales))
    for name, weight in zip((gate, up), weights, strict=True):
        assert float(made[f"{name}.weight_scale_2"]) == shared
        packed = PACKERS["torch"](weight, shared, scales)
        assert torch.equal(made[f"{name}.weight"], packed.weight)
        assert torch.equal(bits(made[f"{name}.weight_scale"]), bits(packed.weight_scale))
    manifest = verify(out, source)
    assert manifest.spec["weight_scales"] == manifest.spec["recipe"]["weight_scales"] == scales
    step = next(step for step in manifest.tensors if step.output.name == f"{gate}.weight")
    assert step.reason.endswith(f", block scales by {scales}")


@pytest.mark.parametrize("compiled", (True, False))
@pytest.mark.parametrize("scales", PRESETS)
def test_int4_is_searched_as_what_it_dequantizes_to(scales, compiled, tmp_path, monkeypatch):
    if not compiled:
        monkeypatch.setattr(stream, "fastest", lambda: PACKERS["torch"])
    weight, whole = store_weight("int4", tmp_path)
    shared = float(scale_2(amax(whole), scales))
    parts, made = list(stream.pack_stored(weight, shared, scales)), PACKERS["torch"](whole, shared, scales)
    assert torch.equal(torch.cat([part.weight for part in parts]), made.weight)
    assert torch.equal(torch.cat([bits(part.weight_scale) for part in parts]), bits(made.weight_scale))
