"""Whether a matrix looks as an initializer leaves it: torch's own initializers, and matrices that were trained."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kconv.checkpoint.header import read_header
from kconv.convert.shared import find_displaced
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


VOCAB, WIDTH, KEPT = 1024, 128, 600
FAULTS = {
    "moved by one from a row on": lambda rows: torch.cat([rows[:201], rows[201:].roll(1, 0)]),
    "moved the other way": lambda rows: torch.cat([rows[:201], rows[201:].roll(-1, 0)]),
    "a block reversed": lambda rows: torch.cat([rows[:201], rows[201:401].flip(0), rows[401:]]),
    "all moved": lambda rows: rows.roll(1, 0),
    "halves swapped": lambda rows: rows.roll(len(rows) // 2, 0),
}
SOUND = {
    "in order": lambda rows: rows,
    "trained on": lambda rows: rows + 0.6 * torch.randn_like(rows),
    "scaled": lambda rows: 3.0 * rows,
    "drawn anew": torch.randn_like,
    "some drawn anew": lambda rows: torch.cat([rows[:500], torch.randn_like(rows[500:])]),
    "turned into another space": lambda rows: rows @ torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0],
}


@pytest.fixture
def compared(tmp_path):
    """Return a function that compares a head's rows, made from the target's, with the target's."""

    def compared(change):
        from safetensors.torch import save_file

        # Rows of a trained matrix have much in common, and lengths of their own.
        theirs = (torch.randn(1, WIDTH) + torch.randn(VOCAB, WIDTH)) * torch.randn(VOCAB, 1).mul(0.5).exp()
        ids = torch.randperm(VOCAB)[:KEPT].sort().values
        save_file({"theirs": theirs, "own": change(theirs[ids]).contiguous()}, tmp_path / "rows.safetensors")
        infos = read_header(tmp_path / "rows.safetensors")
        return find_displaced(infos["own"], infos["theirs"], ids), ids

    return compared


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("change", FAULTS.values(), ids=FAULTS)
def test_rows_of_other_tokens_are_found(compared, change, seed):
    torch.manual_seed(seed)
    found, ids = compared(lambda rows: change(rows + 0.3 * torch.randn_like(rows)))
    moved = change(torch.arange(KEPT)[:, None]).flatten()
    assert found is not None
    assert found.first == int((moved != torch.arange(KEPT)).nonzero()[0])
    assert (found.token, found.nearest) == (int(ids[found.row]), int(ids[moved[found.row]]))
    share = float((moved != torch.arange(KEPT)).float().mean())
    assert found.found / found.sampled == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("change", SOUND.values(), ids=SOUND)
def test_rows_in_order_are_not_called_displaced(compared, change, seed):
    torch.manual_seed(seed)
    assert compared(change)[0] is None
