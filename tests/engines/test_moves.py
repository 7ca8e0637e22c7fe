"""Moves: what is packed comes back bit for bit, and the stored shape is the one that was promised."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kconv.engines.moves import Same, Stack


def test_same_is_the_tensor():
    tensor = torch.randn(2, 3)
    assert Same().pack([tensor]) is tensor
    assert Same().unpack(tensor, [(2, 3)])[0] is tensor
    assert Same().stored_shape([(2, 3)]) == (2, 3)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.sampled_from([(), (3,), (2, 2)]), st.integers(0, 2**32))
def test_stack_is_vllms_fused_linear_and_comes_apart(rows, rest, seed):
    torch.manual_seed(seed)
    parts = [torch.randn(count, *rest).bfloat16() for count in rows]
    shapes = [tuple(part.shape) for part in parts]
    stored = Stack().pack(parts)
    assert tuple(stored.shape) == Stack().stored_shape(shapes)
    # A fused linear answers with its members' answers side by side.
    if rest == (3,):
        x = torch.randn(3)
        apart = torch.cat([part.float() @ x for part in parts])
        assert torch.equal(stored.float() @ x, apart) or torch.allclose(stored.float() @ x, apart, atol=1e-6)
    for part, back in zip(parts, Stack().unpack(stored, shapes), strict=True):
        assert torch.equal(part.view(torch.int16), back.view(torch.int16))


def test_order_matters():
    gate, up = torch.zeros(2, 3), torch.ones(2, 3)
    assert Stack().pack([gate, up])[0].sum() == 0
    assert Stack().unpack(Stack().pack([gate, up]), [(2, 3), (2, 3)])[1].sum() == 6


@pytest.mark.parametrize("shapes", [[(2, 3)], [(2, 3), (3, 3)]])
def test_parts_that_do_not_add_up_are_not_taken(shapes):
    with pytest.raises(RuntimeError):
        Stack().unpack(torch.zeros(4, 3), shapes)
