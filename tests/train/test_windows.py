import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kconv.errors import RecipeInvalid
from kconv.train.data import cut_windows, map_draft_vocab


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 20), st.integers(0, 5))
def test_windows_are_cut_from_the_text_and_do_not_overlap(seq, count, more, seed):
    text = torch.arange(seq * count + more)
    windows = cut_windows(text, seq, count, seed)
    assert windows.shape == (count, seq)
    assert windows.unique().numel() == windows.numel()
    assert torch.equal(windows - windows[:, :1], torch.arange(seq).expand(count, seq))


def test_more_windows_than_the_text_holds_are_refused():
    with pytest.raises(RecipeInvalid, match="11 windows of 9 tokens, but the text has 10"):
        cut_windows(torch.arange(98), 9, 11, seed=0)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=200), st.data())
def test_the_draft_vocabulary_keeps_the_most_frequent_tokens(ids, data):
    size = data.draw(st.integers(1, len(set(ids))))
    d2t = map_draft_vocab(torch.tensor(ids).bincount(minlength=64), size)
    kept = (d2t + torch.arange(size)).tolist()
    assert kept == sorted(set(kept))
    dropped = set(ids) - set(kept)
    assert min(ids.count(token) for token in kept) >= max((ids.count(token) for token in dropped), default=0)


def test_a_draft_vocabulary_larger_than_the_texts_is_refused():
    with pytest.raises(RecipeInvalid, match="4 tokens, but the text has only 3 distinct ones"):
        map_draft_vocab(torch.tensor([5, 5, 6, 9]).bincount(minlength=64), 4)


def test_special_tokens_are_kept_however_rare():
    d2t = map_draft_vocab(torch.tensor([5, 5, 6, 6, 9]).bincount(minlength=64), 3, specials=(1, 2))
    assert (d2t + torch.arange(3)).tolist() == [1, 2, 5]
