"""Moves: what torch concatenates has the promised shape, and its parts lie where `find_parts` says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.heads import GQA, random_slots

from kconv.checkpoint.header import read_header
from kconv.checkpoint.tensors import read_tensor
from kconv.convert.read import find_parts
from kconv.drafters.contract import Expected
from kconv.engines.layout import Stored
from kconv.engines.moves import Same, Stack

FUSED = ("0.q_proj", "0.k_proj", "0.v_proj")


def test_same_keeps_the_shape():
    assert Same().stored_shape([(2, 3)]) == (2, 3)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.sampled_from([(), (3,), (2, 2)]))
def test_a_stack_has_the_shape_that_torch_gives_it(rows, rest):
    parts = [torch.zeros(count, *rest) for count in rows]
    assert Stack().stored_shape([tuple(part.shape) for part in parts]) == tuple(torch.cat(parts).shape)


@pytest.mark.parametrize("rows, found", [(0, FUSED), (-1, None)], ids=["whole", "a row short"])
def test_a_stack_comes_apart_where_it_was_joined(tmp_path, rows, found):
    slots = random_slots(GQA)
    fused = torch.cat([slots[slot] for slot in FUSED])
    save_file({"qkv": fused[: len(fused) + rows].contiguous()}, tmp_path / "m.safetensors")
    (info,) = read_header(tmp_path / "m.safetensors").values()
    parts = find_parts(GQA, Stored(Expected("qkv", info.shape, ("BF16",), may_be_absent=False), FUSED, Stack()), info)
    assert (tuple(parts) if parts else None) == found
    for slot in found or ():
        assert torch.equal(read_tensor(parts[slot]), slots[slot])
