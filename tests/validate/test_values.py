"""Whether a matrix looks as an initializer leaves it: torch's own initializers, and matrices that were trained."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kconv.validate.rules import values


def measure_spread(matrix: torch.Tensor, block: int = 50) -> values.Spread | None:
    return values.measure_spread(part.double().numpy() for part in matrix.split(block))


INITIALIZERS = {
    "normal": lambda w: torch.nn.init.normal_(w, std=0.02),
    "truncated normal": lambda w: torch.nn.init.trunc_normal_(w, std=0.02),
    "torch.nn.Linear": lambda w: torch.nn.init.kaiming_uniform_(w, a=5**0.5),
    "xavier": torch.nn.init.xavier_uniform_,
}


@pytest.mark.parametrize("init", INITIALIZERS.values(), ids=INITIALIZERS)
@given(rows=st.integers(64, 400), columns=st.integers(48, 300), seed=st.integers(0, 10))
@settings(max_examples=20, deadline=None)
def test_what_an_initializer_drew_is_seen(init, rows, columns, seed):
    torch.manual_seed(seed)
    for dtype in (torch.float32, torch.bfloat16):
        spread = measure_spread(init(torch.empty(rows, columns)).to(dtype))
        assert spread is not None and spread.is_initial


@given(rows=st.integers(64, 400), columns=st.integers(48, 300), seed=st.integers(0, 10))
@settings(max_examples=30, deadline=None)
def test_rows_of_many_lengths_are_trained(rows, columns, seed):
    torch.manual_seed(seed)
    lengths = torch.randn(rows, 1).mul(0.5).exp()
    spread = measure_spread(torch.randn(rows, columns) * lengths)
    assert spread is not None and not spread.is_initial


def test_the_tiny_targets_own_lm_head_is_trained(tiny_target):
    """A real one, of 600 steps; and the same weights as they were drawn."""
    from safetensors.torch import load_file

    weights = {name: w for file in tiny_target.glob("*.safetensors") for name, w in load_file(file).items()}
    trained = measure_spread(weights["lm_head.weight"])
    drawn = measure_spread(torch.randn(weights["lm_head.weight"].shape))
    assert trained is not None and drawn is not None
    assert not trained.is_initial and drawn.is_initial


@pytest.mark.parametrize("matrix", [torch.zeros(64, 64), torch.ones(3, 64), torch.full((64, 64), float("nan"))])
def test_what_cannot_be_judged_is_not(matrix):
    assert measure_spread(matrix) is None
