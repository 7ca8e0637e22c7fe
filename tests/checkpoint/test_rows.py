"""Rows of a stored matrix: the ones that the safetensors library reads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kconv.checkpoint.header import read_header
from kconv.checkpoint.tensors import read_rows, row_blocks
from kconv.errors import CorruptHeader

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.float8_e4m3fn)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    tensors = {str(dtype): torch.randn(11, 5, generator=generator).to(dtype) for dtype in DTYPES}
    save_file(tensors | {"odd": torch.zeros(3, dtype=torch.uint8)}, path)
    return path


@settings(deadline=None)
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 10), max_size=20))
def test_any_rows_in_any_order(file, dtype, ids):
    ids = torch.tensor(ids, dtype=torch.int64)
    rows = read_rows(read_header(file)[str(dtype)], ids)
    expected = load_file(file)[str(dtype)][ids]
    assert (rows.dtype, rows.shape) == (dtype, (len(ids), 5))
    assert torch.equal(rows.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("count", [1, 4, 11, 100])
def test_blocks_make_up_the_whole(file, count):
    blocks = list(row_blocks(read_header(file)["torch.float32"], count))
    assert torch.equal(torch.cat(blocks), load_file(file)["torch.float32"])
    assert {len(block) for block in blocks[:-1]} <= {count}


def test_a_file_that_became_shorter_is_named(tmp_path, file):
    short = tmp_path / "model.safetensors"
    short.write_bytes(file.read_bytes())
    info = read_header(short)["odd"]
    matrix = read_header(short)["torch.float32"]
    short.write_bytes(short.read_bytes()[: min(info.begin, matrix.begin)])
    with pytest.raises(CorruptHeader, match=r"model\.safetensors ended"):
        read_rows(matrix, torch.tensor([3, 4, 9]))


@pytest.mark.parametrize("ids", [[11], [-1], [3, 12]])
def test_a_row_that_the_matrix_does_not_have_is_not_anothers(file, ids):
    with pytest.raises(IndexError, match=r"rows 0 to 10"):
        read_rows(read_header(file)["torch.float32"], torch.tensor(ids))
