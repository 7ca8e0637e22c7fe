"""The table of quantized formats, held against what others write and what kconv's own packers store."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.stored_weights import COLUMNS, ROWS, store_weight

from kconv.checkpoint.formats import FP8, NVFP4, fp8_blocks, int4
from kconv.checkpoint.header import read_header
from kconv.quantize.formats import TENSORS
from kconv.quantize.head.formats import FORMATS


def assert_described(format_, found):
    """Hold stored tensors, by suffix, against a format: `found` has all that is needed, in a dtype and shape of it."""
    assert (
        {suffix for suffix, one in format_.tensors.items() if one.is_needed} <= found.keys() <= format_.tensors.keys()
    )
    for suffix, info in found.items():
        one = format_.tensors[suffix]
        assert info.dtype in one.dtypes and info.shape in one.shapes(ROWS, COLUMNS), suffix


STORED = {"int4": int4(32), "fp8": fp8_blocks(), "nvfp4": NVFP4}


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


def test_a_quantized_target_stores_the_same():
    written = {suffix: (dtype, extent(ROWS, COLUMNS)) for suffix, (dtype, extent) in TENSORS.items()}
    assert written == {suffix: (one.dtype, one.shapes(ROWS, COLUMNS)[0]) for suffix, one in NVFP4.tensors.items()}


def test_a_scale_of_one_holds_what_the_type_holds():
    assert (FP8.largest, NVFP4.largest) == (torch.finfo(torch.float8_e4m3fn).max, 6.0 * 448.0)
