"""Acceptance against literal simulations: of speculative decoding, and of the rejection rule."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kconv.drafters.attention import CausalContext
from kconv.drafters.chain import (
    Acceptance,
    along_chains,
    draft_tokens,
    greedy_acceptance,
    overlap,
    overlap_acceptance,
    pool,
)
from kconv.drafters.spec import Gqa, Mla
from kconv.errors import PromptsInvalid


class TableTarget:
    """A target that is a table: the last two tokens decide the next one and the captured states."""

    def __init__(self, vocab, width, seed):
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randint(vocab, (vocab, vocab), generator=generator)
        self.states = torch.randn(vocab, vocab, width, generator=generator)

    def next(self, text):
        return int(self.table[text[-2], text[-1]])

    def captured(self, text):
        pairs = zip([0, *text[:-1]], text, strict=True)
        return torch.stack([self.states[a, b] for a, b in pairs])


def decode_speculatively(head, target, prompt, length, steps):
    """Decode with the head's own drafts, fed back to it; count until a draft could reach past `length`."""
    text = [*prompt, target.next(prompt)]
    accepted, drafts = [0] * steps, 0
    while len(text) + steps <= length:
        # States of the newest token are not known yet; its predecessor's are.
        fused = head.fuse(target.captured(text[:-1])[None])
        context = CausalContext()
        inputs = torch.tensor([text[1:]])
        hidden, logits = head.step(inputs, fused, torch.arange(len(text) - 1), context)
        draft = []
        for k in range(1, steps + 1):
            draft.append(int(head.target_ids[logits[0, -1].argmax()]))
            if k < steps:
                position = torch.tensor([len(text) - 2 + k])
                hidden, logits = head.step(torch.tensor([draft[-1:]]), hidden[:, -1:], position, context)
        drafts += 1
        for place, token in enumerate(draft):
            if token != target.next(text):
                break
            text.append(token)
            accepted[place] += 1
        text.append(target.next(text))
    return drafts, tuple(accepted)


@given(
    attention=st.sampled_from([Gqa(4, 2, 8), Mla(3, 12, 16, 8, 4, 6)]),
    layers=st.integers(1, 2),
    vocab=st.sampled_from([2, 3, 5]),
    dropped=st.integers(0, 1),
    steps=st.integers(1, 4),
    prompt_length=st.integers(2, 5),
    extra=st.integers(0, 20),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=60)
def test_greedy_acceptance_is_what_speculative_decoding_counts(
    make_spec, make_head, attention, layers, vocab, dropped, steps, prompt_length, extra, seed
):
    spec = make_spec(attention=attention, layers=layers, vocab=vocab, draft_vocab=vocab - dropped)
    head = make_head(spec, seed)
    target = TableTarget(vocab, 60, seed)
    prompt = torch.randint(vocab, (prompt_length,), generator=torch.Generator().manual_seed(seed)).tolist()
    length = prompt_length + steps + 1 + extra
    text = list(prompt)
    while len(text) < length:
        text.append(target.next(text))

    tokens, captured = torch.tensor([text]), target.captured(text)[None]
    got = greedy_acceptance(draft_tokens(head, tokens, captured, steps)[:, 0], tokens[0], prompt_length)
    drafts, accepted = decode_speculatively(head, target, prompt, length, steps)
    assert (got.drafts, got.accepted) == (drafts, accepted)
    assert got.length == pytest.approx(1 + sum(accepted) / drafts)
    assert got.rates == tuple(n / drafts for n in accepted)


def test_greedy_acceptance_counted_by_hand():
    tokens = torch.tensor([9, 8, 1, 2, 3, 4, 5, 6, 7])
    # K = 2, so chains 0 .. 5; chain t predicts x[t+2] and x[t+3]. Prompt of 2: the first draft is chain 1.
    drafted = torch.tensor(
        [
            [0, 2, 0, 0, 0, 6],  # chain 1 right, chain 3 wrong, chain 4 wrong, chain 5 right
            [0, 0, 0, 5, 0, 7],  # chain 1 wrong, chain 3 right after a wrong one, chain 5 right
        ]
    )
    got = greedy_acceptance(drafted, tokens, prompt_length=2)
    # Chain 1 accepts one and goes on at 3, which accepts none, 4 none, 5 two.
    assert (got.steps, got.drafts, got.accepted) == (2, 4, (2, 1))
    assert got.rates == (0.5, 0.25)
    assert got.length == 1.75
    assert "greedy" in got.note


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_perfect_drafter_reaches_k_plus_one_and_a_silent_one_one(steps):
    tokens = torch.randint(50, (1, 30), generator=torch.Generator().manual_seed(0))
    perfect = along_chains(tokens.roll(-1, 1), steps)[:, 0]
    assert greedy_acceptance(perfect, tokens[0], 4).length == steps + 1
    silent = greedy_acceptance(torch.full_like(perfect, -1), tokens[0], 4)
    assert silent.length == 1.0
    assert silent.drafts == 30 - steps - 1 - 3


@pytest.mark.parametrize("prompt_length", [0, 7])
def test_a_prompt_that_leaves_no_draft_is_refused(prompt_length):
    with pytest.raises(PromptsInvalid):
        greedy_acceptance(torch.zeros(3, 6, dtype=torch.long), torch.arange(10), prompt_length)


def random_logits(steps, chains, vocab, seed, batch=1):
    generator = torch.Generator().manual_seed(seed)
    draft = torch.randn(steps, batch, chains, vocab, generator=generator) * 2
    target = torch.randn(batch, chains + steps + 1, vocab, generator=generator) * 2
    return draft, target


@given(steps=st.integers(1, 4), chains=st.integers(1, 6), vocab=st.integers(1, 9), seed=st.integers(0, 99))
@settings(deadline=None)
def test_identical_p_and_q_accept_everything(steps, chains, vocab, seed):
    _, target = random_logits(steps, chains, vocab, seed, batch=2)
    overlaps = overlap(along_chains(target, steps), target, torch.arange(vocab))
    got = overlap_acceptance(overlaps)
    assert got.length == pytest.approx(steps + 1, abs=1e-5)
    assert got.drafts == 2 * chains
    assert got.rates == pytest.approx([1.0] * steps, abs=1e-5)


@given(
    steps=st.integers(1, 4),
    chains=st.integers(1, 5),
    vocab=st.integers(2, 9),
    data=st.data(),
    seed=st.integers(0, 99),
)
@settings(deadline=None)
def test_overlap_is_the_sum_of_minima_over_the_targets_vocabulary(steps, chains, vocab, data, seed):
    draft_vocab = data.draw(st.integers(1, vocab))
    target_ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:draft_vocab]
    draft, target = random_logits(steps, chains, vocab, seed, batch=2)
    got = overlap(draft[..., :draft_vocab], target, target_ids)
    for k in range(steps):
        for chain in range(chains):
            p = target[1, chain + k + 1].double().softmax(-1)
            q = torch.zeros(vocab, dtype=torch.double)
            q[target_ids] = draft[k, 1, chain, :draft_vocab].double().softmax(-1)
            assert float(got[k, 1, chain]) == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-5)


@pytest.mark.parametrize("draft_vocab", [5, 3])
def test_acceptance_of_sampled_drafts_is_what_the_rejection_rule_gives(draft_vocab):
    """Draw drafts and coins; p and q differ by place but not by what was drawn, where the figure is exact."""
    steps, vocab, trials = 3, 5, 200_000
    draft, target = random_logits(steps, 1, vocab, seed=draft_vocab)
    target_ids = torch.tensor([3, 0, 4, 2, 1])[:draft_vocab]
    got = overlap_acceptance(overlap(draft[..., :draft_vocab], target, target_ids))

    generator = torch.Generator().manual_seed(0)
    alive, accepted = torch.ones(trials, dtype=torch.bool), []
    for k in range(steps):
        p = target[0, k + 1].softmax(-1)
        q = torch.zeros(vocab).index_put((target_ids,), draft[k, 0, 0, :draft_vocab].softmax(-1))
        drawn = q.multinomial(trials, replacement=True, generator=generator)
        alive = alive & (torch.rand(trials, generator=generator) < p[drawn] / q[drawn])
        accepted.append(alive)
    per_trial = 1.0 + torch.stack(accepted).float().sum(0)
    error = float(per_trial.std()) / math.sqrt(trials)
    assert abs(got.length - float(per_trial.mean())) < 4 * error
    for rate, survived in zip(got.rates, accepted, strict=True):
        assert abs(rate - float(survived.float().mean())) < 4 * math.sqrt(0.25 / trials)


@given(steps=st.integers(1, 4), chains=st.integers(1, 6), seed=st.integers(0, 99))
@settings(deadline=None)
def test_lengths_by_position_average_to_the_acceptance_length(steps, chains, seed):
    overlaps = torch.rand(steps, 2, chains, generator=torch.Generator().manual_seed(seed))
    got = overlap_acceptance(overlaps)
    by_position = [
        1 + sum(math.prod(chain[: k + 1]) for k in range(steps)) for chain in overlaps.flatten(1).T.double().tolist()
    ]
    assert got.length == pytest.approx(sum(by_position) / len(by_position), rel=1e-5)
    assert sorted(got.rates, reverse=True) == list(got.rates)


def test_pooling_adds_counts():
    short = Acceptance(2, 4, (2, 1), "greedy")
    long = Acceptance(2, 16, (16, 9), "greedy")
    both = pool([short, long])
    assert (both.drafts, both.accepted) == (20, (18, 10))
    assert both.length == pytest.approx((4 * short.length + 16 * long.length) / 20)


@pytest.mark.parametrize(
    "parts", [[], [Acceptance(2, 1, (1, 1), "a"), Acceptance(2, 1, (1, 1), "b")]], ids=["none", "mixed"]
)
def test_pooling_nothing_or_unlike_things_is_refused(parts):
    with pytest.raises(PromptsInvalid):
        pool(parts)
