"""The filler row: inside the hull of the trained rows as it is stored, so no state makes it the sole winner."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kconv.drafters.filler import make_filler, measure_margin, random_states

DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


def make_rows(m, hidden, seed, dtype, common=0.0):
    generator = torch.Generator().manual_seed(seed)
    shared = common * torch.randn(hidden, generator=generator)
    return (torch.randn(m, hidden, generator=generator) + shared).to(dtype)


def blocks_of(rows, size=7):
    return lambda: rows.split(size)


@settings(deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 24),
    st.integers(0, 2**32),
    DTYPES,
    st.sampled_from([0.0, 1.0, 100.0]),
    st.integers(-1, 59),
)
def test_no_state_lifts_the_stored_row_above_all_trained_ones(m, hidden, seed, dtype, common, unlikely):
    rows = make_rows(m, hidden, seed, dtype, common)
    filler = make_filler(blocks_of(rows), unlikely if 0 <= unlikely < m else None)
    assert filler.row.dtype == dtype
    rows, row = rows.double(), filler.row.double()
    error = row - rows.mean(0)
    # Random states, and those that the rounding error helps most: along it, and along its part outside the rows' span.
    centred = rows - rows.mean(0)
    outside = error - torch.linalg.pinv(centred) @ (centred @ error)
    random = torch.randn(64, hidden, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    states = torch.cat([random, error[None], outside[None], -error[None]])
    above = states @ row - (states @ rows.T).amax(dim=1)
    scale = states.norm(dim=1) * rows.norm(dim=1).max()
    assert (above <= filler.excess * states.norm(dim=1) + 1e-13 * scale).all()


@settings(deadline=None)
@given(st.integers(12, 40), st.integers(0, 2**32), DTYPES)
def test_in_the_plane_the_stored_row_is_in_the_polygon_of_the_trained_ones(m, seed, dtype):
    rows = make_rows(m, 2, seed, dtype)
    filler = make_filler(blocks_of(rows))
    rows, row = rows.double(), filler.row.double()
    # A point is in a polygon iff no line through two of the corners has it alone on one side.
    for a, b in itertools.combinations(rows, 2):
        normal = torch.stack([a[1] - b[1], b[0] - a[0]])
        for side in (normal, -normal):
            assert side @ row <= (rows @ side).max()
    assert filler.excess < 1e-12


def test_leaning_towards_an_unlikely_token_s_row_stays_inside_and_leaves_less_to_sampling():
    generator = torch.Generator().manual_seed(4)
    direction = torch.randn(48, generator=generator)
    rows = torch.randn(400, 48, generator=generator)
    rows[123] = -direction  # training has pushed it down in the states that come up
    states = random_states(torch.ones(48), 200) + direction
    rows = rows.bfloat16()
    plain, leaning = make_filler(blocks_of(rows)), make_filler(blocks_of(rows), 123)
    assert torch.equal(leaning.row, (0.5 * rows.double().mean(0) + 0.5 * rows[123].double()).bfloat16())
    assert leaning.excess < 1e-12
    before, after = (measure_margin(blocks_of(rows), filler.row, 1000, states) for filler in (plain, leaning))
    assert after.leak < 0.1 * before.leak
    assert after.worst > before.worst


def test_where_there_are_more_rows_than_dims_nothing_is_left_of_the_rounding_error():
    rows = make_rows(300, 48, 0, torch.bfloat16, common=3.0)
    filler = make_filler(blocks_of(rows))
    error = float((filler.row.double() - rows.double().mean(0)).norm())
    assert error > 1e-3  # bf16 rounds a mean of this size by that much
    assert filler.excess < 1e-12
    assert filler.bound(torch.full((48,), -2.0)) == pytest.approx(filler.excess * 48**0.5 * 2)


@pytest.mark.parametrize("common", [3.0, 10.0, 30.0])
def test_a_rounding_error_that_takes_uneven_weights_is_still_inside(common):
    # The rounding error is up to a tenth of the rows' own spread, in 48 dims at once.
    rows = make_rows(2000, 48, 0, torch.bfloat16, common)
    assert make_filler(blocks_of(rows, 500)).excess < 1e-11


def test_where_the_rows_do_not_span_the_space_just_the_part_outside_is_left():
    rows = make_rows(20, 48, 0, torch.bfloat16, common=3.0)
    filler = make_filler(blocks_of(rows))
    mean = rows.double().mean(0)
    centred = rows.double() - mean
    error = filler.row.double() - mean
    inside = centred.T @ torch.linalg.lstsq(centred.T, error[:, None]).solution
    assert filler.excess == pytest.approx(float((error - inside[:, 0]).norm()), rel=1e-3)


def test_a_row_that_rounding_puts_on_the_edge_is_bounded_all_the_same():
    rows = torch.tensor([[1.0], [1.0078125]], dtype=torch.bfloat16)  # neighbours: their mean rounds to one of them
    filler = make_filler(blocks_of(rows))
    assert float(filler.row) in rows.flatten().tolist()
    assert 0 < filler.excess < 0.0078125


def test_equal_rows_give_their_own_row():
    rows = torch.full((5, 3), 0.7, dtype=torch.bfloat16)
    filler = make_filler(blocks_of(rows, 2))
    assert torch.equal(filler.row, rows[0])
    assert filler.excess < 1e-15


def test_a_row_of_zeros_wins_where_the_filler_does_not():
    rows = make_rows(40, 16, 1, torch.float32)
    state = -torch.linalg.lstsq(rows[:12], torch.ones(12, 1)).solution[:, 0]
    trained = rows[:12] @ state
    assert trained.max() < 0  # a zero row's logit is above them all
    assert make_filler(blocks_of(rows[:12])).row @ state <= trained.max() + 1e-5


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 50), st.integers(0, 2**32))
def test_margin_and_leak_are_those_of_the_whole_softmax(m, fillers, seed):
    rows = make_rows(m, 8, seed, torch.float32)
    row, states = rows.mean(0), random_states(torch.rand(8) + 0.5, 32, seed)
    measured = measure_margin(blocks_of(rows), row, fillers, states)
    logits = states.double() @ torch.cat([rows, row.expand(fillers, -1)]).double().T
    margins = logits[:, :m].amax(1) - logits[:, m]
    assert measured.worst == pytest.approx(float(margins.min()), abs=1e-4)
    assert measured.median == pytest.approx(float(margins.median()), abs=1e-4)
    assert measured.leak == pytest.approx(float(logits.softmax(1)[:, m:].sum(1).mean()), rel=1e-4)
    assert measured.states == 32


def test_random_states_are_what_an_rms_norm_gives():
    gain = torch.linspace(-2.0, 3.0, 64)
    states = random_states(gain, 100)
    again = torch.nn.functional.rms_norm(states / gain, (64,)) * gain
    torch.testing.assert_close(states, again, rtol=1e-5, atol=1e-5)
    assert states.norm(dim=1).max() <= 64**0.5 * 3.0
