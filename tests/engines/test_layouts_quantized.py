"""Quantized heads: weight and scales go together, byte for byte, or not at all."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.heads import ATTENTION, GQA, MLA, random_slots, read_bytes, write_head

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.formats import HEAD_SCALES
from kconv.checkpoint.manifest import MANIFEST, verify
from kconv.convert.execute import execute
from kconv.convert.plan import WriteOptions, plan
from kconv.convert.read import read_head, read_weights
from kconv.engines import BY_NAME
from kconv.errors import ConfigInvalid, ConfigUnsupported, LayoutCannot, TensorMissing, TensorShape, TensorUnknown

# Both dims are multiples of NVFP4's group of 16.
GQA = replace(GQA, captured=(1, 3, 5), hidden=64, target_hidden=64, intermediate=96)
MLA = replace(MLA, captured=(1, 3, 5), hidden=64, target_hidden=64, intermediate=96)
MLP = [f"layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")]
CONFIG = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}}
generator = torch.Generator().manual_seed(3)


def scalar():
    return torch.rand((), generator=generator)


def nvfp4(rows, columns):
    return {
        "weight": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator),
        "weight_scale": torch.rand(rows, columns // 16, generator=generator).to(torch.float8_e4m3fn),
        "weight_scale_2": scalar(),
        "input_scale": scalar(),
    }


def fp8(rows, columns):
    weight = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    return {"weight": weight, "weight_scale": scalar(), "input_scale": scalar()}


def fp8_rows(rows, columns):
    weight = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    return {"weight": weight, "weight_scale": torch.rand(rows, 1, generator=generator)}


def fp8_blocks(rows, columns):
    weight = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    return {"weight": weight, "weight_scale_inv": torch.rand(-(-rows // 128), -(-columns // 128), generator=generator)}


def quantize(folder, spec, make, layout="modelopt", linears=MLP, config=CONFIG, edit=lambda tensors: None):
    """Write a head with some linears in a quantized format."""
    base = BY_NAME["vllm"].write_config(spec)
    write_head(folder, BY_NAME[layout], spec, random_slots(spec), base | config)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for linear in linears:
        made = make(*tensors[f"{linear}.weight"].shape)
        tensors |= {f"{linear}.{suffix}": tensor for suffix, tensor in made.items()}
    edit(tensors)
    save_file(tensors, file)
    return open_checkpoint(folder)


def fp8_bf16_blocks(rows, columns):
    """Engines copy the scales into a float32 parameter."""
    made = fp8_blocks(rows, columns)
    return made | {"weight_scale_inv": made["weight_scale_inv"].bfloat16()}


FORMATS = {
    "NVFP4": nvfp4,
    "FP8": fp8,
    "FP8, a scale per row": fp8_rows,
    "FP8 in blocks": fp8_blocks,
    "FP8 in blocks, scales in bf16": fp8_bf16_blocks,
}


def test_scales_that_outweigh_the_norms_are_not_the_heads_dtype(tmp_path):
    """As in a quantized head that shares the target's lm_head; TensorRT-LLM runs MLA in bfloat16 alone."""
    linears = [*MLP, "fc", *(f"layers.0.self_attn.{part}" for part in ATTENTION)]

    def share(tensors):
        del tensors["lm_head.weight"], tensors["embed_tokens.weight"]

    source = quantize(tmp_path / "head", MLA, fp8_rows, linears=linears, edit=share)
    scales, norms = (
        sum(info.size for info in source.tensors.values() if info.dtype == dtype) for dtype in ("F32", "BF16")
    )
    assert scales > norms
    head = read_head(source)
    assert head.spec.dtype == "BF16" and plan(head, BY_NAME["trtllm"]).steps


@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("name", ["vllm", "trtllm", "sglang", "portable"])
def test_weight_and_scales_are_carried(tmp_path, make, name):
    source = quantize(tmp_path / "head", GQA, make)
    head = read_head(source)
    assert head.is_quantized and head.spec == GQA
    manifest = execute(plan(head, BY_NAME[name]), tmp_path / "out")
    verify(tmp_path / "out", source)
    assert manifest.exact and {step.action for step in manifest.tensors} == {"copied"}
    assert read_bytes(tmp_path / "out") == read_bytes(tmp_path / "head")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["quantization_config"] == CONFIG["quantization_config"]
    # Packed or not, a linear has as many parameters.
    assert manifest.parameters == count(GQA)
    (tmp_path / "out" / MANIFEST).unlink()
    assert read_head(open_checkpoint(tmp_path / "out")).spec == GQA


def count(spec):
    return sum(slot.numel() for name, slot in random_slots(spec).items() if name not in ("d2t", "t2d"))


def test_every_suffix_is_met_above():
    assert {suffix for make in FORMATS.values() for suffix in make(16, 16)} == {"weight", *HEAD_SCALES}


def test_modelopts_side_file_goes_along(tmp_path):
    side = b'{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}\r\n'
    quantize(tmp_path / "head", GQA, nvfp4, config={})
    (tmp_path / "head" / "hf_quant_config.json").write_bytes(side)
    manifest = execute(plan(read_head(open_checkpoint(tmp_path / "head")), BY_NAME["trtllm"]), tmp_path / "out")
    assert (tmp_path / "out" / "hf_quant_config.json").read_bytes() == side
    assert "hf_quant_config.json" in {file.name for file in manifest.files}
    verify(tmp_path / "out", open_checkpoint(tmp_path / "head"))


@pytest.mark.parametrize(
    ("side", "what"),
    [
        (b"no JSON", "is no JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"exclude_modules": ["mid\\u006cayer.self_attn"]}', "names midlayer"),
    ],
)
def test_a_side_file_that_cannot_be_read_or_renamed_is_refused(tmp_path, side, what):
    linears = [name.replace("layers.0", "midlayer") for name in MLP]
    eagle = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_mtp_layernorm": False}
    source = quantize(tmp_path / "head", GQA, fp8, "torchspec", linears, CONFIG | {"eagle_config": eagle})
    (tmp_path / "head" / "hf_quant_config.json").write_bytes(side)
    with pytest.raises((ConfigInvalid, LayoutCannot), match=what):
        plan(read_head(source), BY_NAME["vllm"])


def test_scales_are_renamed_with_their_weight(tmp_path):
    linears = [name.replace("layers.0", "midlayer") for name in MLP]
    eagle = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_mtp_layernorm": False}
    source = quantize(tmp_path / "head", GQA, fp8, "torchspec", linears, CONFIG | {"eagle_config": eagle})
    execute(plan(read_head(source), BY_NAME["vllm"]), tmp_path / "out")
    before, after = read_bytes(tmp_path / "head"), read_bytes(tmp_path / "out")
    assert after == {name.replace("midlayer", "layers.0"): value for name, value in before.items()}


def test_modules_that_the_config_names_are_not_renamed(tmp_path):
    linears = [name.replace("layers.0", "midlayer") for name in MLP]
    config = {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["midlayer.self_attn"]}}
    source = quantize(tmp_path / "head", GQA, fp8, "torchspec", linears, config)
    with pytest.raises(LayoutCannot, match="midlayer"):
        plan(read_head(source), BY_NAME["vllm"])


def fuse(tensors):
    parts = [{s: tensors.pop(f"{linear}.{s}") for s in ("weight", "weight_scale", "input_scale")} for linear in MLP[:2]]
    fused = torch.cat([part["weight"].view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    tensors |= {f"layers.0.mlp.gate_up_proj.{s}": parts[0][s] for s in ("weight_scale", "input_scale")}
    tensors["layers.0.mlp.gate_up_proj.weight"] = fused


def forget(suffix):
    return lambda tensors: tensors.pop(f"{MLP[0]}.{suffix}")


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


GROUPS_OF_32 = torch.zeros(96, 2).to(torch.float8_e4m3fn)
PACKED_ROWS = torch.zeros(48, 64, dtype=torch.uint8)
IN_BF16 = torch.zeros((), dtype=torch.bfloat16)


REFUSED = {
    "fused before quantizing": (fp8, CONFIG, fuse, LayoutCannot),
    "no word of how": (nvfp4, {}, lambda tensors: None, ConfigInvalid),
    "a second scale that is missing": (nvfp4, CONFIG, forget("weight_scale_2"), TensorMissing),
    "a block scale that is missing": (nvfp4, CONFIG, forget("weight_scale"), TensorMissing),
    "a weight that is missing": (nvfp4, CONFIG, forget("weight"), TensorMissing),
    "groups of another size": (nvfp4, CONFIG, put(f"{MLP[0]}.weight_scale", GROUPS_OF_32), TensorShape),
    "a scale in bf16": (nvfp4, CONFIG, put(f"{MLP[0]}.weight_scale_2", IN_BF16), TensorShape),
    "packed along the other dim": (nvfp4, CONFIG, put(f"{MLP[0]}.weight", PACKED_ROWS), TensorShape),
    "a scale of no weight": (nvfp4, CONFIG, put("layers.0.mlp.gate.weight_scale", torch.zeros(1)), TensorUnknown),
    "a scale beside a plain weight": (nvfp4, CONFIG, put("fc.weight_scale", torch.zeros(())), LayoutCannot),
    "a scale of a norm": (nvfp4, CONFIG, put("norm.weight_scale", torch.zeros(())), TensorUnknown),
}  # fmt: skip


@pytest.mark.parametrize("make, config, edit, fault", REFUSED.values(), ids=REFUSED)
def test_refused(tmp_path, make, config, edit, fault):
    with pytest.raises(fault) as caught:
        read_head(quantize(tmp_path / "head", GQA, make, "vllm", config=config, edit=edit))
    assert type(caught.value) is fault and caught.value.where and caught.value.fix


def test_a_quantization_config_of_plain_weights_is_refused(tmp_path):
    with pytest.raises(ConfigUnsupported, match="quantization_config"):
        read_head(quantize(tmp_path / "head", GQA, nvfp4, linears=[]))


def test_nothing_is_computed_on_a_quantized_head(tmp_path):
    with pytest.raises(ConfigUnsupported, match="quantized"):
        read_weights(read_head(quantize(tmp_path / "head", GQA, nvfp4)))


KV_B = ["layers.0.self_attn.kv_b_proj"]


@pytest.mark.parametrize("make, linears, phrase", [(fp8, KV_B, "kv_b_proj"), (nvfp4, MLP, "NVFP4")])
def test_sglangs_limits_of_quantized_mla_heads(tmp_path, make, linears, phrase):
    head = read_head(quantize(tmp_path / "head", MLA, make, linears=linears))
    for name in ("sglang", "portable"):
        with pytest.raises(LayoutCannot, match=phrase):
            plan(head, BY_NAME[name])
    assert plan(head, BY_NAME["vllm"]).steps and plan(head, BY_NAME["trtllm"]).steps


def test_sglang_takes_an_mla_head_of_fp8_elsewhere(tmp_path):
    assert plan(read_head(quantize(tmp_path / "head", MLA, fp8)), BY_NAME["sglang"]).steps


def test_rounding_leaves_scales_and_packed_weights_alone(tmp_path):
    source = quantize(tmp_path / "head", replace(GQA, dtype="F32"), nvfp4)
    manifest = execute(plan(read_head(source), BY_NAME["vllm"], WriteOptions(dtype="BF16")), tmp_path / "out")
    assert not manifest.exact
    for step in manifest.tensors:
        is_quantized = any(step.output.name.startswith(linear) for linear in MLP)
        assert step.action == ("copied" if is_quantized else "cast"), step.output.name
