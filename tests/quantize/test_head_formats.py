"""A head's formats against ModelOpt: weights, scales and what a scale is of, as its own exporter writes them."""

import pytest
import torch
from modelopt.torch import quantization as mtq
from modelopt.torch.export.quant_utils import preprocess_linear_fusion
from modelopt.torch.export.unified_export_hf import _export_quantized_weight
from modelopt.torch.quantization.qtensor import NVFP4QTensor

from kconv.quantize.head.formats import FORMATS, FP8, NVFP4

DTYPES = (torch.bfloat16, torch.float32)
MEMBERS = ("q_proj", "k_proj", "v_proj")


class Fused(torch.nn.Module):
    """Three linears that read the same."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        for name, size in zip(MEMBERS, (0.3, 2.0, 0.01), strict=True):
            linear = torch.nn.Linear(64, 48, bias=False, dtype=dtype)
            linear.weight.data = (torch.randn(48, 64, generator=generator) * size).to(dtype)
            setattr(self, name, linear)

    def forward(self, x: torch.Tensor) -> None:
        for name in MEMBERS:
            getattr(self, name)(x)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "config"), [("fp8", mtq.FP8_DEFAULT_CFG), ("nvfp4", mtq.NVFP4_DEFAULT_CFG)])
def test_a_fused_group_is_stored_as_modelopt_exports_it(name, config, dtype):
    format_, plain, exported = FORMATS[name], Fused(dtype), Fused(dtype)
    inputs = (torch.randn(32, 64, generator=torch.Generator().manual_seed(3)) * 5).to(dtype)
    mtq.quantize(exported, config, lambda model: model(inputs))
    preprocess_linear_fusion([getattr(exported, member) for member in MEMBERS])
    largest = max(float(getattr(plain, member).weight.data.abs().max()) for member in MEMBERS)
    for member in MEMBERS:
        theirs = getattr(exported, member)
        _export_quantized_weight(theirs, dtype)
        ours = format_.pack(getattr(plain, member).weight.data, format_.scale(largest))
        ours["input_scale"] = format_.scale(float(inputs.abs().max()))
        assert set(ours) == {"weight", *format_.scales}
        for suffix, tensor in ours.items():
            wanted = getattr(theirs, suffix).data
            assert tensor.dtype == wanted.dtype and tensor.shape == wanted.shape, suffix
            assert bytes_of(tensor) == bytes_of(wanted), suffix


def test_fp8_is_unpacked_to_what_was_packed():
    weight = torch.tensor([[448.0, -1.0, 0.25, 0.0]]) * 0.5
    assert torch.equal(FP8.stored.unpack(FP8.pack(weight, FP8.scale(224.0))), weight)


def test_an_input_beyond_the_calibrated_one_is_cut_off():
    x = torch.tensor([[1.0, -3.0, 0.5, 100.0]])
    assert FP8.round(x, FP8.scale(1.0)).tolist() == [[1.0, -1.0, 0.5, 1.0]]


def test_an_nvfp4_input_is_rounded_as_modelopts_packer_rounds_it():
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(4))
    scale = NVFP4.scale(float(x.abs().max()))
    made, blocks, shared = NVFP4QTensor.quantize(x.view(6, 64), 16, None, scale, try_tensorrt=False)
    wanted = made.dequantize(dtype=torch.float32, scale=blocks, double_scale=shared, block_sizes={-1: 16})
    assert torch.equal(NVFP4.round(x, scale), wanted.view(2, 3, 64))


@pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS)
def test_both_config_files_say_the_same(format_):
    block, side = (
        format_.stored.quantization_config(["lm_head", "*.fc"]),
        format_.stored.hf_quant_config(["lm_head", "*.fc"]),
    )
    assert block["quant_algo"] == side["quantization"]["quant_algo"] == format_.name
    assert block["ignore"] == side["quantization"]["exclude_modules"] == ["lm_head", "*.fc"]
    # vLLM refuses an NVFP4 side file without one of these.
    if format_ is NVFP4:
        assert {"group_size", "kv_cache_quant_algo", "exclude_modules"} <= side["quantization"].keys()


@pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS)
def test_the_config_block_is_what_modelopt_makes_of_the_side_file(format_):
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

    assert format_.stored.quantization_config(["lm_head"]) == convert_hf_quant_config_format(
        format_.stored.hf_quant_config(["lm_head"])
    )
