"""A weight is read in spans of rows, and each span has its own rows' scales."""

import pytest
import torch
from support.quantized_targets import COLUMNS, ROWS, STORES, store_weight

# Rows of a span: fewer than a block of FP8, which is not cut, and two blocks; the last span is a shorter one.
CUTS = [(7, [7] * 42 + [6], [128, 128, 44]), (256, [256, 44], [256, 44])]


@pytest.mark.parametrize("form", STORES)
@pytest.mark.parametrize("rows, cut, cut_of_fp8", CUTS, ids=["of few rows", "of two blocks of FP8"])
def test_the_spans_make_up_the_weight(form, rows, cut, cut_of_fp8, tmp_path, monkeypatch):
    weight, whole = store_weight(form, tmp_path)
    monkeypatch.setattr("kconv.targets.weights.SPAN", rows * COLUMNS)
    blocks = list(weight.blocks())
    assert [len(block) for block in blocks] == (cut_of_fp8 if form == "fp8" else cut)
    assert weight.shape == (ROWS, COLUMNS) and weight.dtype == "BF16" and whole.dtype == torch.bfloat16
    for made in (torch.cat(blocks), weight.read()):
        assert torch.equal(made.view(torch.int16), whole.view(torch.int16))
