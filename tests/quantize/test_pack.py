"""The packer against ModelOpt's NVFP4QTensor: equal bits, compiled and in torch, on every kind of block."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from support.nvfp4_blocks import BLOCKS, PACKERS, compiled, random

from kconv.quantize import pack as packing
from kconv.quantize.pack import NativePacker, amax, fastest, pack, pack_plain, scale_2, unpack

DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def modelopt(weight, shared):
    made, scale, _ = NVFP4QTensor.quantize(weight.clone(), 16, None, shared, try_tensorrt=False)
    return made, scale


def assert_equal_bits(packer, weight, shared):
    ours, (made, scale) = packer(weight, float(shared)), modelopt(weight, shared)
    assert ours.weight.dtype == torch.uint8 and ours.weight_scale.dtype == torch.float8_e4m3fn
    assert torch.equal(ours.weight_scale.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(ours.weight, made._quantized_data)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("packer", PACKERS.values(), ids=PACKERS)
@pytest.mark.parametrize("weight", BLOCKS.values(), ids=BLOCKS)
def test_the_bits_are_modelopts(weight, packer, dtype):
    weight = weight.to(dtype)
    assert weight.isfinite().all()
    assert_equal_bits(packer, weight, scale_2(amax(weight)))


@settings(max_examples=120, deadline=None)
@given(
    rows=st.integers(1, 9),
    groups=st.integers(1, 9),
    spread=st.sampled_from([0.0, 0.5, 5.0, 20.0]),
    power=st.integers(-100, 60),
    foreign=st.sampled_from([0.01, 1.0, 3.0, 1e4]),
    dtype=st.sampled_from(DTYPES[:2]),
    packer=st.sampled_from(sorted(PACKERS)),
    seed=st.integers(0, 9999),
)
def test_the_bits_are_modelopts_for_any_dims_and_a_scale_of_another_weight(
    rows, groups, spread, power, foreign, dtype, packer, seed
):
    weight = (random(rows, groups * 16, seed=seed, spread=spread) * 2.0**power).clamp(-1e37, 1e37).to(dtype)
    largest = float(weight.abs().max())
    if largest > 0:
        assert_equal_bits(PACKERS[packer], weight, scale_2(largest * foreign))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_sixteen_bit_number_is_packed_as_modelopt_does(dtype):
    every = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)
    finite = every[every.isfinite()]
    # Each beside a block's largest, so that its nibble counts.
    weight = finite[: len(finite) // 15 * 15].view(-1, 15).float()
    weight = torch.cat([weight.abs().amax(1, keepdim=True) * 0.9, weight], dim=1).to(dtype)
    for power in (-20, 0, 20):
        assert_equal_bits(compiled, weight, torch.tensor(2.0**power))
        assert_equal_bits(pack_plain, weight, torch.tensor(2.0**power))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_2_and_the_way_back_are_modelopts(dtype):
    weight = random(32, 128, spread=0.5).to(dtype)
    shared = scale_2(amax(weight))
    assert torch.equal(shared, NVFP4QTensor.get_weights_scaling_factor_2(weight))
    made, scale = modelopt(weight, shared)
    theirs = made.dequantize(torch.float32, scale=scale, double_scale=shared, block_sizes={-1: 16})
    assert torch.equal(unpack(pack(weight, float(shared)), float(shared), torch.float32), theirs)


def test_a_weight_that_is_a_view_is_packed_by_its_values():
    weight = random(64, 48)
    assert torch.equal(pack(weight.T, 0.01).weight, pack(weight.T.contiguous(), 0.01).weight)
    assert torch.equal(pack(weight[3:5], 0.01).weight, pack(weight, 0.01).weight[3:5])


def test_amax_keeps_a_nan():
    weight = random(4, 16)
    weight[2, 3] = float("nan")
    assert amax(weight) != amax(weight)


def test_without_a_compiler_torch_does_it(monkeypatch):
    monkeypatch.setenv("KCONV_NATIVE", "0")
    assert fastest.__wrapped__() is pack_plain


def test_with_a_compiler_the_compiled_loops_do_it():
    if packing.load_native("pack.c") is None:
        assert fastest.__wrapped__() is pack_plain
    else:
        assert isinstance(fastest.__wrapped__(), NativePacker)


ERRORS = {"a nibble": lambda made: made.weight, "a scale": lambda made: made.weight_scale.view(torch.uint8)}


@pytest.mark.parametrize("part", ERRORS.values(), ids=ERRORS)
def test_compiled_loops_that_err_are_not_trusted(part, monkeypatch):
    class Wrong(NativePacker):
        def __init__(self, library):
            pass

        def __call__(self, weight, weight_scale_2, scales):
            made = pack_plain(weight, weight_scale_2, scales)
            part(made)[-1, -1] ^= 1
            return made

    monkeypatch.setattr(packing, "NativePacker", Wrong)
    monkeypatch.setattr(packing, "load_native", lambda _: object())
    assert fastest.__wrapped__() is pack_plain
