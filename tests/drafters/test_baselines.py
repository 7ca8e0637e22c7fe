"""Drafters without a network against counts made by hand and literal simulations."""

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kconv.drafters.baselines import (
    bigram_drafts,
    bigram_overlap,
    certain_overlap,
    count_bigrams,
    distinct_ngrams,
    lookup_drafts,
)
from kconv.drafters.chain import along_chains, greedy_acceptance, overlap

VOCAB = 6
texts = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30), min_size=1, max_size=4)


@given(texts)
@settings(deadline=None)
def test_bigram_probabilities_are_smoothed_counts(texts):
    bigram = count_bigrams([torch.tensor(text) for text in texts], VOCAB)
    pairs = Counter(pair for text in texts for pair in itertools.pairwise(text))
    single = Counter(token for text in texts for token in text)
    total = sum(single.values()) + VOCAB
    for token in range(VOCAB):
        seen = sum(count for (first, _), count in pairs.items() if first == token)
        want = [(pairs[token, n] + (single[n] + 1) / total) / (seen + 1) for n in range(VOCAB)]
        got = bigram.probabilities(token)
        assert got.tolist() == pytest.approx(want, rel=1e-5)
        assert float(got.sum()) == pytest.approx(1.0, rel=1e-5)
        assert float(got[bigram.likeliest[token]]) == pytest.approx(float(got.max()), rel=1e-6)


def test_bigrams_do_not_reach_over_the_end_of_a_text():
    bigram = count_bigrams([torch.tensor([0, 1]), torch.tensor([2, 3])], 4)
    assert bigram.follows.tolist() == [1, 3]


@given(texts, st.integers(1, 4), st.integers(0, 99))
@settings(deadline=None)
def test_bigram_chains_are_those_of_a_head_with_its_logits(texts, steps, seed):
    bigram = count_bigrams([torch.tensor(text) for text in texts], VOCAB)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (2, steps + 5), generator=generator)
    target = torch.randn(2, steps + 5, VOCAB, generator=generator)
    table = torch.stack([bigram.probabilities(token) for token in range(VOCAB)])

    as_head = overlap(along_chains(table[tokens].log(), steps), target, torch.arange(VOCAB))
    torch.testing.assert_close(bigram_overlap(bigram, tokens, target, steps), as_head, rtol=1e-4, atol=1e-6)

    drafted = bigram_drafts(bigram, tokens, steps)
    for k in range(1, steps + 1):
        for chain in range(4):
            assert drafted[k - 1, 1, chain] == bigram.likeliest[tokens[1, chain + k]]


def look_up(text, steps, matched):
    """Prompt lookup as it runs: one draft, from the text that is there, fed by itself."""
    for size in matched:
        for end in range(len(text) - 2, size - 2, -1):
            if text[end - size + 1 : end + 1] == text[len(text) - size :]:
                grown = list(text)
                for step in range(steps):
                    grown.append(grown[end + 1 + step])
                return grown[len(text) :]
    return [-1] * steps


@given(
    noise=st.integers(0, 99),
    steps=st.integers(1, 4),
    prompt_length=st.integers(1, 6),
    extra=st.integers(0, 30),
    matched=st.sampled_from([(2, 1), (3, 2), (1,)]),
    vocab=st.integers(2, 6),
)
@settings(deadline=None, max_examples=200)
def test_prompt_lookup_is_what_speculative_decoding_counts(noise, steps, prompt_length, extra, matched, vocab):
    generator = torch.Generator().manual_seed(noise)
    length = prompt_length + steps + 1 + extra
    cycle = torch.randint(vocab, (7,), generator=generator)
    other = torch.randint(vocab, (length,), generator=generator)
    keep = torch.rand(length, generator=generator) < 0.8
    tokens = torch.where(keep, cycle[torch.arange(length) % 7], other)
    got = greedy_acceptance(lookup_drafts(tokens[None], steps, matched)[:, 0], tokens, prompt_length)

    whole, known = tokens.tolist(), prompt_length + 1
    accepted, drafts = [0] * steps, 0
    while known + steps <= length:
        drafts += 1
        draft = look_up(whole[:known], steps, matched)
        start = known
        for place, token in enumerate(draft):
            if token != whole[start + place]:
                break
            accepted[place] += 1
            known += 1
        known += 1
    assert (got.drafts, got.accepted) == (drafts, tuple(accepted))


def test_prompt_lookup_prefers_the_longer_and_the_later_match():
    #                       0  1  2  3  4  5  6  7  8
    tokens = torch.tensor([[5, 1, 7, 4, 1, 8, 5, 1, 0, 0]])
    # Chain 6 knows up to x[7]: "5 1" stood at 0-1, "1" alone later at 4.
    assert lookup_drafts(tokens, 2)[:, 0, 6].tolist() == [7, 4]
    assert lookup_drafts(tokens, 2, matched=(1,))[:, 0, 6].tolist() == [8, 5]
    # Chain 0 knows "5 1" and nothing stood before.
    assert lookup_drafts(tokens, 2)[:, 0, 0].tolist() == [-1, -1]


@given(steps=st.integers(1, 4), seed=st.integers(0, 99))
@settings(deadline=None)
def test_certain_overlap_is_overlap_with_a_point_mass(steps, seed):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(2, steps + 5, VOCAB, generator=generator)
    drafted = torch.randint(-1, VOCAB, (steps, 2, 4), generator=generator)
    logits = torch.full((steps, 2, 4, VOCAB), float("-inf"))
    logits.scatter_(-1, drafted.clamp(min=0)[..., None], 0.0)
    want = overlap(logits, target, torch.arange(VOCAB))
    want[drafted < 0] = 0.0
    torch.testing.assert_close(certain_overlap(drafted, target), want)


def test_distinct_ngrams_tells_loops_from_text():
    assert distinct_ngrams(torch.zeros(20, dtype=torch.long)) == 1 / 17
    assert distinct_ngrams(torch.arange(20)) == 1.0
    # One row loops with period 2 (two distinct 4-grams of 17), the other repeats nothing.
    rows = torch.stack([torch.arange(20) % 2, torch.arange(20)])
    assert distinct_ngrams(rows) == 19 / 34
    assert distinct_ngrams(torch.arange(20) % 2, n=1) == 2 / 20
