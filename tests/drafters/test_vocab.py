"""Draft vocabularies: maps mean what vLLM takes them for, each wrong map is told, and the right tokens are kept."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kconv.drafters.vocab import (
    ABSOLUTE,
    EITHER,
    IDENTITY,
    NEITHER,
    OFFSETS,
    keep_most_frequent,
    kind_of,
    mask,
    measure_coverage,
    offsets,
    read_ids,
    target_ids,
)
from kconv.errors import ConfigInvalid


def vllm_logits(logits, d2t, vocab):
    """Spread draft logits over the target's vocabulary as vLLM does; written from its semantics, not from kconv."""
    spread = np.full((len(logits), vocab), float("-inf"))
    for i, offset in enumerate(d2t.tolist()):
        spread[:, i + offset] = logits[:, i]
    return spread


@st.composite
def maps(draw, least=1):
    """Draw a vocabulary's size and the ids a reduced head keeps of it, in any order."""
    vocab = draw(st.integers(least + 1, 48))
    size = draw(st.integers(least, vocab - 1))
    return vocab, np.array(draw(st.permutations(range(vocab)))[:size])


def kind(d2t, vocab, t2d=None, rows=None):
    return kind_of(read_ids(target_ids(d2t), vocab, t2d), read_ids(d2t, vocab, t2d), rows)


@settings(deadline=None)
@given(maps())
def test_offsets_lead_a_draft_id_to_where_vllm_puts_its_logit(case):
    vocab, ids = case
    logits = np.arange(1.0, len(ids) + 1)[None]
    spread = vllm_logits(logits, offsets(ids), vocab)
    assert np.array_equal(spread[0, ids], logits[0])
    assert np.array_equal(target_ids(offsets(ids)), ids)
    assert np.array_equal(spread[0] > float("-inf"), mask(ids, vocab))
    assert int(spread.argmax()) == int(target_ids(offsets(ids))[logits.argmax()])


@settings(deadline=None)
@given(maps())
def test_a_sound_map_has_no_faults_in_its_own_reading(case):
    vocab, ids = case
    reading = read_ids(ids.astype(np.int32), vocab, mask(ids, vocab))
    assert (reading.possible, reading.duplicates, reading.outside, reading.marked_otherwise) == (True, 0, 0, 0)
    assert reading.order == ("ascending" if sorted(ids.tolist()) == ids.tolist() else "unsorted")


@settings(deadline=None)
@given(st.lists(st.integers(-20, 40), min_size=1, max_size=30), st.integers(1, 30))
def test_duplicates_and_ids_out_of_range_are_counted(ids, vocab):
    reading = read_ids(np.array(ids), vocab)
    assert reading.outside == sum(i not in range(vocab) for i in ids)
    assert reading.duplicates == sum(count - 1 for count in Counter(ids).values())
    assert reading.possible == (len(set(ids)) == len(ids) and set(ids) <= set(range(vocab)))


@settings(deadline=None)
@given(maps(), st.data())
def test_a_t2d_of_other_tokens_is_told(case, data):
    vocab, ids = case
    flipped = data.draw(st.sets(st.integers(0, vocab - 1), min_size=1))
    t2d = mask(ids, vocab) ^ mask(np.array(sorted(flipped)), vocab)
    assert read_ids(ids, vocab, t2d).marked_otherwise == len(flipped)


@settings(deadline=None)
@given(maps(least=2))
def test_with_t2d_either_reading_is_known_for_what_it_is(case):
    vocab, ids = case
    t2d = mask(ids, vocab)
    assert kind(offsets(ids), vocab, t2d) == (IDENTITY if np.array_equal(ids, np.arange(len(ids))) else OFFSETS)
    assert kind(ids, vocab, t2d) == ABSOLUTE


@settings(deadline=None)
@given(maps(least=2))
def test_without_t2d_a_reading_is_never_taken_for_the_wrong_one(case):
    vocab, ids = case
    assert kind(offsets(ids), vocab) in (OFFSETS, IDENTITY, EITHER)
    assert kind(ids, vocab) in (ABSOLUTE, EITHER)


@settings(deadline=None)
@given(st.sets(st.integers(0, 23), min_size=2, max_size=24))
def test_copied_rows_decide_where_nothing_else_does(distinct):
    # Distinct offsets: no two neighbours are both kept, so the file could as well hold ids.
    d2t, vocab = np.array(sorted(distinct)), 48
    assert kind(d2t, vocab) == EITHER
    assert kind(d2t, vocab, rows=(0, 0)) == EITHER
    assert kind(d2t, vocab, rows=(len(d2t), 0)) == OFFSETS
    assert kind(d2t, vocab, rows=(0, len(d2t))) == ABSOLUTE
    assert kind(d2t, vocab, mask(target_ids(d2t), vocab), rows=(0, len(d2t))) == OFFSETS


def test_the_maps_of_real_exports():
    by_frequency = np.array([11, 3, 40, 0, 25])
    assert kind(offsets(by_frequency), 48) == OFFSETS  # a negative offset is no id
    assert read_ids(by_frequency, 48).order == "unsorted"
    assert kind(np.zeros(5, np.int64), 48) == IDENTITY
    assert kind(np.array([3, 7, 10, 20, 31, 40, 45, 46]), 48) == ABSOLUTE  # 7 + 46 is out of range
    assert kind(np.array([60, 60, 1]), 48) == NEITHER


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=2, max_size=40).flatmap(
        lambda counts: st.tuples(
            st.just(counts),
            st.integers(1, len(counts) - 1),
            st.sets(st.integers(0, len(counts) - 1), max_size=len(counts) - 1),
        )
    )
)
def test_the_most_frequent_tokens_and_the_special_ones_are_kept(case):
    counts, size, always = case
    assume(len(always) <= size)
    kept = keep_most_frequent(np.array(counts), size, always).tolist()
    others = sorted((i for i in range(len(counts)) if i not in always), key=lambda i: (-counts[i], i))
    assert kept == sorted([*always, *others[: size - len(always)]])


@pytest.mark.parametrize(
    "size, always, why",
    [(0, (), ""), (8, (), "not less than"), (9, (), "not less than"), (2, (0, 1, 7), "3 special tokens")],
)
def test_a_size_that_cannot_be_is_refused(size, always, why):
    with pytest.raises(ConfigInvalid, match=f"{size} tokens cannot be chosen from 8: .*{why}"):
        keep_most_frequent(np.ones(8, np.int64), size, always)


@settings(deadline=None)
@given(st.lists(st.integers(0, 15), max_size=60), st.sets(st.integers(0, 15), min_size=1))
def test_coverage_counts_the_text_s_own_tokens(text, kept):
    coverage = measure_coverage(np.bincount(np.array(text, np.int64), minlength=16), np.array(sorted(kept)))
    covered = [i for i in text if i in kept]
    assert (coverage.tokens, coverage.covered) == (len(text), len(covered))
    assert (coverage.distinct, coverage.distinct_covered) == (len(set(text)), len(set(covered)))
    assert coverage.share == (len(covered) / len(text) if text else 0.0)
