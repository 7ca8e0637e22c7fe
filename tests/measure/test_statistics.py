"""Standard errors over sequences, held against repeated draws and against positions taken for independent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kconv.drafters.chain import Acceptance, pool
from kconv.measure.statistics import influences, standard_errors


def draw(generator: torch.Generator, sequences: int, noise: float = 0.0) -> list[Acceptance]:
    """Draw sequences of unequal length, each with an acceptance rate of its own that all its positions share."""
    parts = []
    for _ in range(sequences):
        drafts = int(torch.randint(10, 60, (1,), generator=generator))
        rate = float(torch.rand(1, generator=generator).clamp(0.05, 0.95)) + noise
        first = float((torch.rand(drafts, generator=generator) < rate).sum())
        parts.append(Acceptance(2, drafts, (first, first * rate), "sampled"))
    return parts


def test_the_error_is_the_spread_of_repeated_measurements():
    generator = torch.Generator().manual_seed(0)
    runs = [draw(generator, 40) for _ in range(600)]
    lengths = torch.tensor([pool(parts).length for parts in runs], dtype=torch.float64)
    errors = torch.tensor([standard_errors(influences(parts))[-1] for parts in runs], dtype=torch.float64)
    assert float(errors.mean()) == pytest.approx(float(lengths.std()), rel=0.08)
    # Positions of one sequence share its rate: taken for independent they would claim far too much.
    parts = runs[0]
    n, p = sum(a.drafts for a in parts), pool(parts).rates[0]
    rate_error = standard_errors(influences(parts))[0]
    assert rate_error is not None
    assert rate_error > 2 * (p * (1 - p) / n) ** 0.5


def test_pairing_takes_out_what_two_drafters_share():
    source = draw(torch.Generator().manual_seed(1), 50)
    better = [Acceptance(2, p.drafts, (p.accepted[0] + 0.1 * p.drafts, p.accepted[1]), p.note) for p in source]
    alone = standard_errors(influences(better))[-1]
    paired = standard_errors(influences(better) - influences(source))[-1]
    assert alone is not None
    # One is always the other and a tenth more: the difference has no error at all.
    assert paired == pytest.approx(0.0, abs=1e-12)
    assert alone > 0.05


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=12))
def test_influences_cancel_out_and_do_not_hang_on_the_order(rows):
    parts = [Acceptance(2, n, (n * a, n * a * b), "sampled") for n, a, b in rows]
    moved = influences(parts)
    assert torch.allclose(moved.sum(0), torch.zeros(3, dtype=torch.float64), atol=1e-12)
    backwards = standard_errors(influences(parts[::-1]))
    assert backwards == pytest.approx(standard_errors(moved))


def test_sequences_of_one_length_give_the_textbooks_error_of_a_mean():
    parts = [Acceptance(1, 10, (float(a),), "sampled") for a in (2, 4, 6, 9)]
    rates = torch.tensor([0.2, 0.4, 0.6, 0.9], dtype=torch.float64)
    assert standard_errors(influences(parts))[0] == pytest.approx(float(rates.std()) / 2)


def test_one_sequence_has_no_error():
    assert standard_errors(influences([Acceptance(1, 10, (3.0,), "sampled")])) == [None, None]
