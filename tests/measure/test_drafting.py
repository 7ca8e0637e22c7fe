"""Acceptance and parity of drafters on a real, if tiny, target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kconv.drafters.baselines import count_bigrams
from kconv.measure.drafting import Proposer, measure
from kconv.measure.texts import make_texts
from kconv.targets.forward import run_target
from kconv.targets.model import load_target
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.text import read_corpus

STEPS, CAPTURED = 3, (1, 3, 5)


@pytest.fixture(scope="module")
def model(tiny_target: Path):
    return load_target(tiny_target, torch.float32)


@pytest.fixture(scope="module")
def prompts(tiny_target: Path) -> list[list[int]]:
    documents = [text for text in read_corpus().held_out if len(text) > 300][:6]
    tokenizer = load_tokenizer(tiny_target)
    return [tokenizer.encode(text)[:40] for text in documents]


@pytest.fixture(scope="module")
def texts(model, prompts):
    return {t.kind: t for t in make_texts(model, prompts, prompt_tokens=16, new_tokens=24, steps=STEPS, seed=0)}


def oracle(model) -> Proposer:
    """Return the drafter that knows the target's own logits: what step k of chain t should say."""

    def logits(tokens, states):
        chains = tokens.shape[1] - 1 - STEPS
        return torch.stack([states.logits[:, k : k + chains] for k in range(1, STEPS + 1)])

    return Proposer(logits, torch.arange(model.config.vocab_size))


def noisy(model, scale: float) -> Proposer:
    perfect = oracle(model)

    def logits(tokens, states):
        exact = perfect.logits(tokens, states)
        return exact + scale * torch.randn(exact.shape, generator=torch.Generator().manual_seed(1))

    return Proposer(logits, perfect.target_ids)


@pytest.mark.parametrize("kind", ["held-out", "sampled", "greedy"])
def test_the_target_drafting_for_itself_is_always_accepted(model, texts, kind):
    found = measure(texts[kind], model, CAPTURED, STEPS, {"oracle": oracle(model)})
    assert found.acceptance[0].length == pytest.approx(STEPS + 1, abs=1e-4)
    assert found.parity is None


@pytest.mark.parametrize("kind", ["held-out", "sampled"])
def test_noise_lowers_acceptance_and_parity_says_by_how_much(model, texts, kind):
    drafters = {"exact": oracle(model), "noisy": noisy(model, 1.0)}
    found = measure(texts[kind], model, CAPTURED, STEPS, drafters, compare=("exact", "noisy"))
    exact, worse = found.acceptance
    assert worse.length < exact.length - 0.1
    assert found.parity is not None
    assert found.parity.length_difference == pytest.approx(worse.length - exact.length)
    assert found.parity.kl > 0.01
    assert found.parity.top1 < 1.0


def test_a_drafter_agrees_with_itself(model, texts):
    drafters = {"a": noisy(model, 0.5), "b": noisy(model, 0.5)}
    parity = measure(texts["sampled"], model, CAPTURED, STEPS, drafters, compare=("a", "b")).parity
    assert parity is not None
    assert (parity.relative_error, parity.kl, parity.top1, parity.length_difference) == (0, 0, 1, 0)


def test_figures_are_over_what_lies_behind_the_prompt(model, texts):
    text = texts["sampled"]
    found = measure(text, model, CAPTURED, STEPS, {"oracle": oracle(model)})
    chains = sum(len(b.tokens) * (b.tokens.shape[1] - 1 - STEPS - (b.prompt_length - 1)) for b in text.batches)
    assert found.acceptance[0].drafts == chains
    assert found.text.tokens == sum(b.tokens.numel() for b in text.batches)


def test_baselines_stand_beside_the_head_on_the_same_positions(model, texts):
    bigram = count_bigrams([torch.arange(200) % 7], model.config.vocab_size)
    found = measure(texts["sampled"], model, CAPTURED, STEPS, {"oracle": oracle(model)}, bigram=bigram)
    assert [row.drafter for row in found.acceptance] == ["oracle", "bigram", "prompt lookup"]
    assert len({row.drafts for row in found.acceptance}) == 1
    assert all(1.0 <= row.length < found.acceptance[0].length for row in found.acceptance[1:])


def test_greedy_continuations_are_the_targets_likeliest_tokens(model, texts):
    for batch in texts["greedy"].batches:
        likeliest = run_target(model, batch.tokens, CAPTURED).logits.argmax(-1)
        start = batch.prompt_length
        assert torch.equal(likeliest[:, start - 1 : -1], batch.tokens[:, start:])
