"""Counts made into figures: means, rates, intervals, and what answers look like."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconv.bench.stats import Counts, add_up, distinct_ngrams, interval, macro, micro, rates, sanity
from kconv.engines.counters import check_possible
from kconv.errors import AcceptanceInvalid, CountersMissing, DefinitionsMixed

K = 3


@st.composite
def prompt_counts(draw) -> Counts:
    """Draw the counts of one prompt from its verify steps."""
    steps = draw(st.lists(st.integers(0, K), min_size=1, max_size=30))
    return Counts(len(steps), sum(steps), tuple(float(sum(s > place for s in steps)) for place in range(K)))


@given(st.lists(prompt_counts(), min_size=1, max_size=8))
def test_means_and_rates_are_those_of_the_steps(groups):
    for group in groups:
        check_possible(group, K, "a prompt")
    total = add_up(groups)
    assert micro(groups) == pytest.approx(1 + total.accepted / total.drafts)
    assert macro(groups) == pytest.approx(np.mean([1 + g.accepted / g.drafts for g in groups]))
    shares = rates(groups)
    assert shares is not None and 1 + sum(shares) == pytest.approx(micro(groups))
    assert list(shares) == sorted(shares, reverse=True)
    assert 1 <= micro(groups) <= K + 1


@given(st.lists(prompt_counts(), min_size=2, max_size=8), st.sampled_from(["micro_steps", "macro_request"]))
def test_an_interval_lies_within_the_prompts_own_figures(groups, averaging):
    found = interval(groups, averaging)
    assert found is not None
    own = [1 + g.accepted / g.drafts for g in groups]
    assert min(own) - 1e-9 <= found.low <= found.high <= max(own) + 1e-9
    assert found.units == len(groups)


def test_an_interval_holds_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(0)
    hits, rounds, rate = 0, 200, 0.6
    truth = 1 + rate + rate**2 + rate**3
    for seed in range(rounds):
        steps = np.minimum(generator.geometric(1 - rate, size=(40, 25)) - 1, K)
        found = interval([Counts(25, float(row.sum()), None) for row in steps], "micro_steps", seed=seed)
        assert found is not None
        hits += found.low <= truth <= found.high
    assert 0.88 <= hits / rounds <= 0.99


def test_one_group_has_no_interval():
    assert interval([Counts(10, 5, None)], "micro_steps") is None


def test_groups_of_several_prompts_have_no_mean_over_requests():
    groups = [Counts(10, 5, None, prompts=4), Counts(10, 6, None, prompts=1)]
    assert macro(groups) is None
    found = interval(groups, "micro_steps")
    assert found is not None and found.over == "groups of up to 4 prompts"


@pytest.mark.parametrize(
    ("counts", "fault"),
    [
        (Counts(0, 0, None), CountersMissing),
        (Counts(10, 31, None), AcceptanceInvalid),
        (Counts(10, 20, (10, 5, 4)), DefinitionsMixed),
        (Counts(10, 8, (4, 2, 1, 1)), DefinitionsMixed),
        (Counts(10, 6, (4, 2)), DefinitionsMixed),
    ],
    ids=["nothing drafted", "above K+1", "positions do not add up", "more places than K", "fewer places than K"],
)
def test_counts_that_cannot_be_are_refused(counts, fault):
    with pytest.raises(fault):
        check_possible(counts, K, "a prompt")


@pytest.mark.parametrize("counts", [Counts(10, 31, None), Counts(10, 6, (4, 2))], ids=["above K+1", "another K"])
def test_whoever_measures_is_told_how_k_is_said(counts):
    with pytest.raises((AcceptanceInvalid, DefinitionsMixed)) as fault:
        check_possible(counts, K, "a prompt")
    assert "(--draft-tokens)" in fault.value.fix


def test_groups_that_count_otherwise_are_not_added_up():
    with pytest.raises(DefinitionsMixed):
        add_up([Counts(1, 1, (1, 0, 0)), Counts(1, 1, None)])


@pytest.mark.parametrize(
    ("text", "tokens", "low", "high"),
    [
        ("one two three four five six seven", 8, 1.0, 1.0),
        ("again and again " * 40, 120, 0.0, 0.05),
        ("a" * 200, 100, 0.0, 0.05),
        ("天地玄黄宇宙洪荒日月盈昃辰宿列张", 16, 1.0, 1.0),
        ("好的" * 50, 50, 0.0, 0.05),
        ("", 0, 1.0, 1.0),
    ],
    ids=["words", "a loop of words", "a loop within a word", "Chinese", "a loop in Chinese", "nothing"],
)
def test_loops_are_seen_in_any_script(text, tokens, low, high):
    assert low <= distinct_ngrams(text, tokens) <= high


def test_answers_are_described():
    found = sanity([("one two three four five", 5, False), ("x " * 20, 20, True)])
    assert (found.mean_tokens, found.cut) == (12.5, 0.5) and 0.5 < found.distinct_4grams < 0.6
