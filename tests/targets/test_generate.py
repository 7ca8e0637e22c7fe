"""Continuations, against the model's own logits over the whole sequence, without cache or padding."""

import pytest
import torch
from transformers import GenerationConfig

from kconv.errors import PromptsInvalid, RecipeInvalid
from kconv.targets.forward import BATCH, generate_greedy, generate_sampled

PROMPTS = [[40, 41], [50, 60, 70, 80, 90, 100, 110], [300], [42, 43, 44, 45]]


def test_greedy_tokens_are_the_argmax_of_the_whole_sequence(model):
    for prompt, new in zip(PROMPTS, generate_greedy(model, PROMPTS, 12), strict=True):
        assert len(new) == 12
        with torch.no_grad():
            logits = model(torch.tensor([prompt + new])).logits[0]
        at = logits[len(prompt) - 1 : -1]
        # Padding and cache add in another order, so a tie may fall otherwise.
        assert (at.max(-1).values - at[range(12), new] < 1e-4).all()


def test_transformers_generates_the_same(model):
    config = GenerationConfig(do_sample=False, max_new_tokens=10, eos_token_id=2, pad_token_id=0)
    theirs = model.generate(torch.tensor([PROMPTS[1]]), generation_config=config)[0, len(PROMPTS[1]) :].tolist()
    assert generate_greedy(model, [PROMPTS[1]], 10, eos=[2]) == [theirs]


def test_an_end_token_ends_its_own_row_only(model):
    whole = generate_greedy(model, PROMPTS, 12)
    end = whole[0][4]
    for row, cut in zip(whole, generate_greedy(model, PROMPTS, 12, eos=[end]), strict=True):
        first = row.index(end) + 1 if end in row else len(row)
        assert cut == row[:first]


def test_the_order_of_the_prompts_is_kept_over_batches(model):
    prompts = [[3 + i, *range(100, 100 + i % 3)] for i in range(BATCH + 5)]
    together = generate_greedy(model, prompts, 3)
    assert together[-1] == generate_greedy(model, prompts[-1:], 3)[0]
    assert together[::-1] == generate_greedy(model, prompts[::-1], 3)


def test_sampling_follows_the_models_distribution(model):
    draws = 2000
    first = [row[0] for row in generate_sampled(model, [PROMPTS[1]] * draws, 1, temperature=0.8, seed=3)]
    with torch.no_grad():
        expected = (model(torch.tensor([PROMPTS[1]])).logits[0, -1] / 0.8).softmax(-1)
    seen = torch.bincount(torch.tensor(first), minlength=len(expected)) / draws
    likely = expected > 0.01
    deviation = (expected * (1 - expected) / draws).sqrt()
    assert likely.sum() >= 3
    assert ((seen - expected).abs() < 5 * deviation)[likely].all()
    # Nothing is cut off: what lies beyond the 50 likeliest comes as often as it should.
    tail = expected.argsort(descending=True)[50:]
    share = expected[tail].sum().item()
    assert share > 0.02
    assert seen[tail].sum().item() == pytest.approx(share, abs=5 * (share / draws) ** 0.5)


def test_the_seed_decides_and_the_callers_random_state_is_left_alone(model):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    one = generate_sampled(model, PROMPTS, 8, temperature=1.0, seed=5)
    assert one == generate_sampled(model, PROMPTS, 8, temperature=1.0, seed=5)
    assert one != generate_sampled(model, PROMPTS, 8, temperature=1.0, seed=6)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_cannot_be_continued_is_refused(model):
    with pytest.raises(PromptsInvalid, match="prompt 1 has 0"):
        generate_greedy(model, [[5], []], 3)
    with pytest.raises(PromptsInvalid, match="prompt 0 has 3"):
        generate_greedy(model, [[5, 6, 7]], model.config.max_position_embeddings - 2)
    with pytest.raises(RecipeInvalid):
        generate_sampled(model, [[5]], 3, temperature=0.0, seed=0)
