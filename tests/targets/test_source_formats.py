"""Quantized targets read as plain numbers: what their makers' own code makes of them, bit for bit."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.quantized_targets import INT4_CONFIG, make_form, quantize_fp8, quantize_int4

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.formats import FP8_BLOCKS, NVFP4, Int4
from kconv.errors import QuantizedWeightInvalid, SourceFormatUnknown
from kconv.targets.config import parse_target_config
from kconv.targets.model import load_target
from kconv.targets.weights import stored_weights

EXPERT = "model.layers.2.mlp.experts.1.up_proj"
DENSE = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module", params=["bf16", "int4", "fp8"])
def target(request, tiny_target, tmp_path_factory):
    return make_form(tiny_target, tmp_path_factory.mktemp(request.param) / "target", request.param)


@pytest.fixture
def int4(tiny_target, tmp_path):
    return make_form(tiny_target, tmp_path / "target", "int4")


@pytest.fixture
def fp8(tiny_target, tmp_path):
    return make_form(tiny_target, tmp_path / "target", "fp8")


def stored(folder):
    checkpoint = open_checkpoint(folder)
    return stored_weights(checkpoint, parse_target_config(checkpoint.config))


def change(folder, tensors=lambda held: None, config=lambda held: None):
    file = folder / "model.safetensors"
    held = load_file(file)
    tensors(held)
    save_file(held, file)
    said = json.loads((folder / "config.json").read_text())
    config(said)
    (folder / "config.json").write_text(json.dumps(said))


def same_bits(one, other):
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    groups=st.integers(1, 5),
    group=st.sampled_from([16, 32, 128]),
    exponent=st.integers(-120, 120),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 99),
)
def test_int4_is_what_compressed_tensors_makes_of_it(rows, groups, group, exponent, dtype, seed):
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    generator = torch.Generator().manual_seed(seed)
    exponent = max(min(exponent, 14), -14) if dtype is torch.float16 else exponent
    words = torch.randint(-(2**31), 2**31, (rows, groups * group // 8), generator=generator).int()
    scale = (torch.randn(rows, groups, generator=generator) * 2.0**exponent).to(dtype)
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
    state = {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor([rows, groups * group])}
    theirs = PackedQuantizationCompressor.decompress(state, QuantizationScheme(targets=["Linear"], weights=args))
    same_bits(Int4((group,)).unpack(state), theirs["weight"])


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 300), columns=st.integers(1, 300), seed=st.integers(0, 99))
def test_fp8_is_the_product_in_float32_rounded_to_bf16(rows, columns, seed):
    weight, scale = quantize_fp8(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)))
    ours = FP8_BLOCKS.unpack({"weight": weight, "weight_scale_inv": scale})
    # Element by element, as DeepSeek's kernel has it: y = x.to(float32) * s.
    for row, column in {(0, 0), (rows - 1, columns - 1), (rows // 2, columns // 3), (rows - 1, 0)}:
        product = weight[row, column].float() * scale[row // 128, column // 128]
        assert ours[row, column] == product.bfloat16()


def test_fp8_is_what_transformers_makes_of_it():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight, scale = quantize_fp8(torch.randn(384, 256, generator=torch.Generator().manual_seed(0)))
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.bfloat16)
    same_bits(FP8_BLOCKS.unpack({"weight": weight, "weight_scale_inv": scale}), theirs)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 9), groups=st.integers(1, 9), seed=st.integers(0, 99))
def test_nvfp4_is_what_modelopt_makes_of_it(rows, groups, seed):
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, groups * 8), generator=generator).to(torch.uint8)
    scale = torch.rand(rows, groups, generator=generator).mul(448).to(torch.float8_e4m3fn)
    scale_2 = torch.rand((), generator=generator)
    theirs = NVFP4QTensor(torch.Size([rows, groups * 16]), torch.float32, packed).dequantize(
        torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16}
    )
    same_bits(NVFP4.unpack({"weight": packed, "weight_scale": scale, "weight_scale_2": scale_2}), theirs)


def test_every_tensor_of_a_target_is_there_once_under_its_plain_name(target, tiny_target):
    found = stored(target)
    assert found.keys() == load_file(tiny_target / "model.safetensors").keys()
    held = open_checkpoint(target).tensors
    assert sorted(info.name for weight in found.values() for info in weight.infos) == sorted(held)


def test_blocks_and_the_whole_agree_and_have_the_stated_shape(target, monkeypatch):
    for name in (f"{EXPERT}.weight", f"{DENSE}.weight", "model.layers.0.self_attn.q_b_proj.weight"):
        weight = stored(target)[name]
        [whole] = weight.blocks()
        with monkeypatch.context() as patch:
            patch.setattr("kconv.targets.weights.SPAN", 1000)
            blocks = list(weight.blocks())
        assert len(blocks) > 1 or weight.shape[0] <= 128  # FP8 is cut between its own blocks
        same_bits(torch.cat(blocks), whole)
        assert tuple(whole.shape) == weight.shape


def test_a_quantized_target_runs_as_the_numbers_it_stands_for(target, tiny_target):
    plain = load_file(tiny_target / "model.safetensors")
    loaded = load_target(target, torch.float32)
    form = {"plain": 0.01, "int4": 0.2, "fp8": 0.04}
    for name, weight in stored(target).items():
        error = (weight.read().float() - plain[name]).norm() / plain[name].norm().clamp(min=1e-9)
        assert error < form[weight.form], name
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        near = loaded(tokens).logits
        there = load_target(tiny_target, torch.float32)(tokens).logits
    assert (near - there).norm() / there.norm() < 0.5


def test_a_wrapped_int4_target_is_read_through_its_text_config(tiny_target, int4, tmp_path):
    wrapped = make_form(tiny_target, tmp_path / "wrapped", "int4", wrapped=True)
    ours, theirs = load_target(wrapped, torch.float32), load_target(int4, torch.float32)
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in theirs.state_dict().items())


def say(**values):
    return lambda config: config["quantization_config"].update(values)


def weights(**values):
    def edit(config):
        config["quantization_config"]["config_groups"]["group_0"]["weights"].update(values)

    return edit


CONFIGS = {
    "another method": (say(quant_method="gptq"), "quantized .'gptq'"),
    "another format": (say(format="marlin-24"), "in 'marlin-24'"),
    "eight bits": (weights(num_bits=8), "num_bits 8"),
    "asymmetric": (weights(symmetric=False), "symmetric False"),
    "by channel": (weights(strategy="channel"), "strategy 'channel'"),
    "reordered": (weights(actorder="group"), "actorder 'group'"),
    "groups without a size": (weights(group_size=None), "group_size None"),
    "floats": (weights(type="float"), "type 'float'"),
    "do not form groups": (say(config_groups={}), "config_groups are missing"),
    "silent": (lambda config: config.pop("quantization_config"), "a part of a quantized weight"),
    "fp8 without blocks": (say(quant_method="fp8"), "weight_block_size None"),
    "another ModelOpt format": (say(quant_method="modelopt", quant_algo="FP8"), "quant_algo 'FP8'"),
}


@pytest.mark.parametrize("edit, phrase", CONFIGS.values(), ids=CONFIGS)
def test_a_form_that_is_not_read_is_named(int4, edit, phrase):
    change(int4, config=edit)
    with pytest.raises(SourceFormatUnknown, match=phrase):
        stored(int4)


PARTS = {
    "no scales": (
        lambda t: t.pop(f"{EXPERT}.weight_scale"),
        QuantizedWeightInvalid,
        f"{EXPERT}.weight_scale is missing",
    ),
    "no shape": (
        lambda t: t.pop(f"{EXPERT}.weight_shape"),
        QuantizedWeightInvalid,
        f"{EXPERT}.weight_shape is missing",
    ),
    "no values": (lambda t: t.pop(f"{EXPERT}.weight_packed"), SourceFormatUnknown, "a part of a quantized weight"),
    "zero points": (
        lambda t: t.update({f"{EXPERT}.weight_zero_point": torch.zeros(1)}),
        SourceFormatUnknown,
        f"{EXPERT}.weight_zero_point is F32, a part of a quantized weight",
    ),
    "NVFP4's scale beside": (
        lambda t: t.update({f"{EXPERT}.weight_scale_2": torch.tensor(1.0)}),
        SourceFormatUnknown,
        f"{EXPERT}.weight_scale_2 is F32, a part of a quantized weight",
    ),
    "integer scales": (
        lambda t: t.update({f"{EXPERT}.weight_scale": torch.zeros(32, 2, dtype=torch.int8)}),
        QuantizedWeightInvalid,
        "weight_scale is I8, not BF16 or F16 or F32",
    ),
    "fewer rows of scales": (
        lambda t: t.update({f"{EXPERT}.weight_scale": torch.ones(31, 2).bfloat16()}),
        QuantizedWeightInvalid,
        r"is \[31, 2\], but \[32, 64\] in groups of 32 needs \[32, 2\]",
    ),
    "groups that do not fit": (
        lambda t: t.update({f"{EXPERT}.weight_scale": torch.ones(32, 3).bfloat16()}),
        QuantizedWeightInvalid,
        r"is \[32, 3\], but \[32, 64\] in groups of 32 needs \[32, 2\]",
    ),
}


@pytest.mark.parametrize("edit, fault, phrase", PARTS.values(), ids=PARTS)
def test_an_int4_weight_in_part_is_named(int4, edit, fault, phrase):
    change(int4, edit)
    with pytest.raises(fault, match=phrase):
        stored(int4)


def test_int4_in_other_groups_than_the_config_states_is_named(int4):
    """vLLM sizes its parameter for the scales by the config."""
    change(int4, config=weights(group_size=16))
    with pytest.raises(QuantizedWeightInvalid, match=r"is \[64, 1\], but \[64, 32\] in groups of 16 needs \[64, 2\]"):
        stored(int4)


def test_a_weight_shape_that_lies_is_named(int4):
    change(int4, lambda tensors: tensors.update({f"{EXPERT}.weight_shape": torch.tensor([64, 32])}))
    with pytest.raises(QuantizedWeightInvalid, match=r"says \[64, 32\], but the packed values are \[32, 64\]"):
        stored(int4)[f"{EXPERT}.weight"].read()


def test_fp8_scales_that_do_not_fit_are_named(fp8):
    change(fp8, lambda tensors: tensors.update({f"{DENSE}.weight_scale_inv": torch.ones(2, 2)}))
    with pytest.raises(
        QuantizedWeightInvalid, match=r"is \[2, 2\], but \[64, 128\] in blocks of \[128, 128\] needs \[1, 1\]"
    ):
        stored(fp8)


def test_an_fp8_weight_without_scales_is_named(fp8):
    change(fp8, lambda tensors: tensors.pop(f"{DENSE}.weight_scale_inv"))
    with pytest.raises(SourceFormatUnknown, match=f"{DENSE}.weight is F8_E4M3"):
        stored(fp8)


def test_a_config_that_says_int4_of_a_plain_target_is_named(tiny_target, tmp_path):
    plain = make_form(tiny_target, tmp_path / "plain", "bf16")
    change(plain, config=lambda config: config.update(quantization_config=INT4_CONFIG))
    with pytest.raises(SourceFormatUnknown, match="no tensor is stored that way"):
        stored(plain)


def test_int4_was_packed_as_its_maker_packs_it():
    made = quantize_int4(torch.eye(32))
    assert made["weight_packed"].dtype == torch.int32 and made["weight_shape"].tolist() == [32, 32]
