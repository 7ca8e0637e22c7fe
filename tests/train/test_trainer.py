import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from kconv.errors import OutputExists, RecipeInvalid, TrainingFailed
from kconv.train.recipe import TEST_GQA
from kconv.train.run import head_key, share_states, train_head

SHORT = dataclasses.replace(TEST_GQA, batches=2, steps=4, batch=2, seq=16, warmup=1)


def test_training_lowers_the_held_out_loss(trained):
    before, after = trained.report["untrained"], trained.report["trained"]
    assert after["loss"] < before["loss"] - 0.5
    assert all(f"top1_{step}" in after for step in range(1, trained.recipe.ttt_steps + 1))


def test_the_untrained_loss_is_that_of_a_guess(train_few):
    """ln(vocabulary) per draft step, decayed, is what a head knows that knows nothing; ours starts near it."""
    guess = torch.log(torch.tensor(512.0)) * (1 + 0.9 + 0.9**2)
    assert train_few("gqa").report["untrained"]["loss"] == pytest.approx(float(guess), rel=0.15)


@pytest.fixture(scope="module")
def short(tiny_target, text, held_out, tmp_path_factory):
    """Return a head of a few steps, and what was told of them."""
    told = []
    out = tmp_path_factory.mktemp("short") / "head"
    return train_head(tiny_target, out, SHORT, text, held_out, lambda *step: told.append(step)), told


def test_progress_is_told_after_each_step(short):
    _, told = short
    assert [step[:2] for step in told] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert all(loss > 0 for _, _, loss in told)


def test_a_head_that_was_made_before_is_found_again(short, tiny_target, text, held_out):
    out, told = short[0], []
    assert train_head(tiny_target, out, SHORT, text, held_out, lambda *step: told.append(step)) == out
    assert not told


def test_another_recipe_or_text_does_not_take_the_place_of_a_head(short, tiny_target, text, held_out):
    with pytest.raises(OutputExists):
        train_head(tiny_target, short[0], dataclasses.replace(SHORT, seed=1), text, held_out)
    with pytest.raises(OutputExists):
        train_head(tiny_target, short[0], SHORT, text.flip(0), held_out)


def test_the_same_recipe_makes_the_same_head(short, tiny_target, text, held_out, tmp_path):
    weights = load_file(train_head(tiny_target, tmp_path / "two", SHORT, text, held_out) / "model.safetensors")
    for name, tensor in load_file(short[0] / "model.safetensors").items():
        torch.testing.assert_close(tensor, weights[name])


def test_states_that_heads_share_make_the_same_head_bit_for_bit(short, tiny_target, text, held_out, tmp_path):
    share_states(tiny_target, tmp_path / "states", SHORT, text, held_out)
    made = train_head(tiny_target, tmp_path / "two", SHORT, text, held_out, states=tmp_path / "states")
    for name, tensor in load_file(short[0] / "model.safetensors").items():
        assert torch.equal(tensor, load_file(made / "model.safetensors")[name])


def test_the_key_names_recipe_target_and_texts(tiny_target, text, held_out, tmp_path):
    for file in tiny_target.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    key = head_key(tiny_target, SHORT, text, held_out)
    assert head_key(tmp_path, SHORT, text, held_out) == key
    other = tmp_path / "model.safetensors"
    data = bytearray(other.read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    changed = [
        head_key(tmp_path, SHORT, text, held_out),
        head_key(tiny_target, dataclasses.replace(SHORT, lr=1e-3), text, held_out),
        head_key(tiny_target, SHORT, text[1:], held_out),
        head_key(tiny_target, SHORT, text, held_out[1:]),
    ]
    assert len({key, *changed}) == 5


def test_a_loss_that_is_no_number_stops_the_work_and_leaves_no_head(tiny_target, text, held_out, tmp_path):
    recipe = dataclasses.replace(SHORT, lr=1e30)
    with pytest.raises(TrainingFailed, match=r"loss is \w+ at step|hold NaN or Inf"):
        train_head(tiny_target, tmp_path / "head", recipe, text, held_out)
    assert not (tmp_path / "head").exists()


def test_a_text_that_is_too_short_is_refused_before_anything_is_made(tiny_target, text, held_out, tmp_path):
    with pytest.raises(RecipeInvalid, match="windows"):
        train_head(tiny_target, tmp_path / "head", SHORT, text[:40], held_out)
    with pytest.raises(RecipeInvalid, match="windows"):
        train_head(tiny_target, tmp_path / "head", SHORT, text, held_out[:40])
    assert not list(tmp_path.iterdir())


def test_a_reduced_head_keeps_the_texts_frequent_tokens(tiny_target, held_out, tmp_path):
    """Of a text of few tokens, a head with as many rows keeps exactly these."""
    frequent = torch.tensor([7, 300, 511]).repeat(400)
    text = torch.cat([frequent, torch.arange(20, 60)])
    out = train_head(tiny_target, tmp_path / "head", dataclasses.replace(SHORT, draft_vocab=3), text, held_out)
    d2t = load_file(out / "model.safetensors")["d2t"]
    assert (d2t + torch.arange(3)).tolist() == [7, 300, 511]
