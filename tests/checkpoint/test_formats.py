"""The quantized formats, held against what others write and what kconv's own packers store."""

import ast
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.quantized_targets import COLUMNS, ROWS, store_weight

from kconv.checkpoint.formats import FP8, FP8_BLOCKS, NVFP4, ONLY_QUANTIZED, SIDE_FILE, Int4
from kconv.checkpoint.header import read_header
from kconv.errors import QuantizedWeightInvalid
from kconv.quantize.head.formats import FORMATS


def assert_described(format_, found):
    """Hold stored tensors, by suffix, against a format: `found` has all that is needed, in a dtype and shape of it."""
    assert (
        {suffix for suffix, one in format_.tensors.items() if one.is_needed} <= found.keys() <= format_.tensors.keys()
    )
    for suffix, info in found.items():
        one = format_.tensors[suffix]
        assert info.dtype in one.dtypes and info.shape in one.shapes(ROWS, COLUMNS), suffix


STORED = {"int4": Int4(), "fp8": FP8_BLOCKS, "nvfp4": NVFP4}


@pytest.mark.parametrize("form, format_", STORED.items(), ids=STORED)
def test_what_compressed_tensors_and_modelopt_store_is_described(tmp_path, form, format_):
    store_weight(form, tmp_path)
    infos = read_header(tmp_path / "x.safetensors")
    assert_described(format_, {name.removeprefix("x."): info for name, info in infos.items()})


@pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS)
def test_what_a_quantized_head_stores_is_described_by_the_first_of_each(tmp_path: Path, format_):
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file(format_.pack(weight, format_.scale(float(weight.abs().max()))), tmp_path / "x.safetensors")
    for suffix, info in read_header(tmp_path / "x.safetensors").items():
        one = format_.stored.tensors[suffix]
        assert (info.dtype, info.shape) == (one.dtype, one.shapes(ROWS, COLUMNS)[0]), suffix


def test_a_scale_of_one_holds_what_the_type_holds():
    assert (FP8.largest, NVFP4.largest) == (torch.finfo(torch.float8_e4m3fn).max, 6.0 * 448.0)


def without(suffix):
    return lambda held: held.pop(suffix)


def changed(suffix, how):
    return lambda held: held.update({suffix: how(held[suffix])})


INVALID = {
    "no block scales": (without("weight_scale"), "x.weight_scale is missing"),
    "no values": (without("weight"), "x.weight is missing"),
    "signed values": (changed("weight", lambda t: t.view(torch.int8)), "x.weight is I8, not U8"),
    "float32 block scales": (changed("weight_scale", torch.Tensor.float), "x.weight_scale is F32, not F8_E4M3"),
    "scales of groups of 32": (
        changed("weight_scale", lambda t: t.view(torch.uint8)[:, ::2].contiguous().view(t.dtype)),
        r"x.weight_scale is \[300, 6\], but \[300, 192\] in groups of 16 needs \[300, 12\]",
    ),
    "a scale for each row": (changed("weight_scale_2", lambda t: t.repeat(ROWS)), r"x.weight_scale_2 is \[300\]"),
    "a part of a group": (changed("weight", lambda t: t[:, :-1].contiguous()), "190 columns, which cannot be split"),
    "values in three dims": (changed("weight", lambda t: t[None]), "not a matrix"),
}


@pytest.mark.parametrize("edit, phrase", INVALID.values(), ids=INVALID)
def test_a_weight_with_a_wrong_part_is_refused(tmp_path, edit, phrase):
    store_weight("nvfp4", tmp_path)
    held = load_file(tmp_path / "x.safetensors")
    parts = {name.removeprefix("x."): tensor for name, tensor in held.items()}
    edit(parts)
    save_file({f"x.{suffix}": tensor for suffix, tensor in parts.items()}, tmp_path / "x.safetensors")
    with pytest.raises(QuantizedWeightInvalid, match=phrase):
        NVFP4.parts("x", read_header(tmp_path / "x.safetensors"))


def test_a_scale_of_a_module_may_have_a_dim(tmp_path):
    """vLLM takes the one number of it."""
    store_weight("nvfp4", tmp_path)
    held = load_file(tmp_path / "x.safetensors")
    save_file(held | {"x.weight_scale_2": held["x.weight_scale_2"].reshape(1)}, tmp_path / "y.safetensors")
    one, other = (NVFP4.parts("x", read_header(tmp_path / f"{name}.safetensors")) for name in "xy")
    assert one["weight_scale_2"].shape == () and other["weight_scale_2"].shape == (1,)


ROOT = Path(__file__).parent.parent.parent
NO_PRODUCT = ("tests", "scripts", "docs", "examples")
# A name, or a pattern of names, that ends in a suffix or a file that only a quantized checkpoint has.
FACT = re.compile(rf"(\S*[.*])?({'|'.join(map(re.escape, [*ONLY_QUANTIZED, SIDE_FILE, NVFP4.weight_only_name]))})")


def test_the_facts_of_a_format_are_stated_once():
    stated = {}
    folders = (f for f in ROOT.iterdir() if f.is_dir() and not f.name.startswith(".") and f.name not in NO_PRODUCT)
    for file in (file for folder in folders for file in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and FACT.fullmatch(node.value):
                stated.setdefault(node.value, []).append(str(file.relative_to(ROOT)))
    assert stated == {fact: ["checkpoint/formats.py"] for fact in (*ONLY_QUANTIZED, SIDE_FILE, NVFP4.weight_only_name)}
