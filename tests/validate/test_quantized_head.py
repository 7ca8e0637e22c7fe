"""A quantized head against its source by its noise, in each form that is read: what is near, and what is another's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.good_heads import QUANTIZABLE, trained_slots
from support.heads import write_head
from torch import Tensor

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.formats import OF_HEADS
from kconv.convert.read import Head, read_head
from kconv.drafters.spec import HeadSpec
from kconv.engines import by_name
from kconv.quantize.head.formats import FORMATS
from kconv.validate.structure import check_source, is_identical

# So wide that a block of 128 is not the whole of a linear.
SPEC = replace(QUANTIZABLE, intermediate=192, mlp_bias=True)
GATE, UP, DOWN = ("0.gate_proj", "0.up_proj", "0.down_proj")
# Where these stand on the disk, as messages name them.
STORED = "layers.0.mlp"
LARGEST = 448.0
Tensors = dict[str, Tensor]


def modelopt(name: str) -> Callable[[Tensor], Tensors]:
    return lambda weight: FORMATS[name].pack(weight, FORMATS[name].scale(float(weight.abs().max())))


def by_rows(weight: Tensor) -> Tensors:
    scale = weight.float().abs().amax(1, keepdim=True) / LARGEST
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def in_blocks(weight: Tensor) -> Tensors:
    blocks = [[part.float().abs().max() / LARGEST for part in row.split(128, 1)] for row in weight.split(128)]
    scale = torch.tensor(blocks)
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    return {"weight": (weight / spread).to(torch.float8_e4m3fn), "weight_scale_inv": scale}


PACKED = {"NVFP4": modelopt("nvfp4"), "FP8": modelopt("fp8"), "FP8 by rows": by_rows, "FP8 in blocks": in_blocks}
each = pytest.mark.parametrize("form", PACKED)


def write_source(folder: Path, spec: HeadSpec = SPEC) -> Head:
    return read_head(open_checkpoint(write_head(folder, by_name("vllm"), spec, trained_slots(spec))))


def write_quantized(
    folder: Path, source: Head, form: str, damage: Callable[[Tensors], object] = lambda _: None
) -> Head:
    """Write a head with its MLP in a form; `damage` gets the tensors by name, without what stands before `mlp.`."""
    tensors: Tensors = {}
    for name, weight in open_tensors(source).items():
        base = name.removesuffix(".weight")
        packed = PACKED[form](weight) if name.endswith("_proj.weight") and ".mlp." in name else None
        tensors |= {name: weight} if packed is None else {f"{base}.{suffix}": one for suffix, one in packed.items()}
    short = {name.removeprefix("layers.0.mlp."): tensor for name, tensor in tensors.items()}
    damage(short)
    folder.mkdir()
    written = {name: short[name.removeprefix("layers.0.mlp.")].clone().contiguous() for name in tensors}
    save_file(written, folder / "model.safetensors")
    config = dict(source.checkpoint.config) | {"quantization_config": {"quant_method": "modelopt"}}
    (folder / "config.json").write_text(json.dumps(config))
    return read_head(open_checkpoint(folder))


def open_tensors(head: Head) -> Tensors:
    from safetensors.torch import load_file

    return load_file(head.checkpoint.folder / "model.safetensors")


@pytest.fixture
def source(tmp_path: Path) -> Head:
    return write_source(tmp_path / "source")


@each
def test_what_was_rounded_is_told_with_its_noise(source, tmp_path, form):
    output = write_quantized(tmp_path / "output", source, form)
    absent, noise = check_source(output, source)
    assert (absent.rule, noise.rule, noise.severity) == ("K302", "K306", "note")
    name = form.removesuffix(" by rows")
    assert noise.message.startswith(f"3 linear layers are rounded to {name}: signal over noise ")
    # What uniformly spread values keep of four bits in groups of sixteen, and of eight.
    low, high = (18, 25) if name == "NVFP4" else (29, 34)
    assert low < float(noise.message.partition("noise ")[2].split()[0]) < high
    assert not is_identical(output, [absent, noise])


def multiply(name: str, by: float) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: (tensors[name].float() * by).to(tensors[name].dtype)})


def exchange(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("gate_proj.weight")]:
        other = name.replace("gate", "up")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def swap_nibbles(tensors: Tensors) -> None:
    packed = tensors["down_proj.weight"]
    tensors["down_proj.weight"] = packed << 4 | packed >> 4


DAMAGE = {
    "NVFP4, a scale doubled": ("NVFP4", multiply("up_proj.weight_scale_2", 2.0), {UP}),
    "NVFP4, block scales halved": ("NVFP4", multiply("up_proj.weight_scale", 0.5), {UP}),
    "NVFP4, nibbles swapped": ("NVFP4", swap_nibbles, {DOWN}),
    "NVFP4, a scale of NaN": ("NVFP4", multiply("down_proj.weight_scale_2", float("nan")), {DOWN}),
    "FP8, a scale doubled": ("FP8", multiply("gate_proj.weight_scale", 2.0), {GATE}),
    "FP8, a scale a quarter larger": ("FP8", multiply("gate_proj.weight_scale", 1.25), {GATE}),
    "FP8, signs flipped": ("FP8", multiply("gate_proj.weight", -1.0), {GATE}),
    "FP8, two linears exchanged": ("FP8", exchange, {GATE, UP}),
    "FP8 by rows, scales doubled": ("FP8 by rows", multiply("down_proj.weight_scale", 2.0), {DOWN}),
    "FP8 in blocks, scales doubled": ("FP8 in blocks", multiply("down_proj.weight_scale_inv", 2.0), {DOWN}),
}


@pytest.mark.parametrize(("form", "damage", "where"), DAMAGE.values(), ids=DAMAGE)
def test_what_is_no_rounding_is_found_where_it_is(source, tmp_path, form, damage, where):
    output = write_quantized(tmp_path / "output", source, form, damage)
    found = [finding for finding in check_source(output, source) if finding.rule != "K302"]
    assert {(finding.rule, finding.severity, finding.where) for finding in found} == {
        ("K305", "error", slot) for slot in where
    }
    assert not is_identical(output, found)


@each
def test_what_is_not_quantized_is_compared_bit_by_bit(source, tmp_path, form):
    output = write_quantized(tmp_path / "output", source, form, multiply("gate_proj.bias", 1.5))
    found = {(finding.rule, finding.where) for finding in check_source(output, source)}
    assert ("K304", f"{STORED}.gate_proj.bias") in found and len(found) == 3


@each
def test_two_quantized_heads_are_compared_bit_by_bit(source, tmp_path, form):
    one = write_quantized(tmp_path / "one", source, form)
    same = write_quantized(tmp_path / "same", source, form)
    findings = check_source(same, one)
    assert [finding.rule for finding in findings] == ["K302"] and is_identical(same, findings)
    (scale,) = [format_.mark for format_ in OF_HEADS if f"{UP}.{format_.mark}" in one.places][:1]
    other = write_quantized(tmp_path / "other", source, form, multiply(f"up_proj.{scale}", 2.0))
    assert [(f.rule, f.where) for f in check_source(other, one)][1:] == [("K304", f"{STORED}.up_proj.{scale}")]


def test_a_linear_of_another_shape_is_another(tmp_path, source):
    narrow = write_source(tmp_path / "narrow", replace(SPEC, intermediate=128))
    output = write_quantized(tmp_path / "output", narrow, "NVFP4")
    found = {(finding.rule, finding.where) for finding in check_source(output, source)}
    assert {("K303", "config.json"), ("K304", f"{STORED}.up_proj.weight")} <= found and "K305" not in {
        rule for rule, _ in found
    }
