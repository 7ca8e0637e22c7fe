"""The states that feed a head, against what transformers itself reports."""

import pytest
import torch

from kconv.errors import TargetInvalid
from kconv.targets.forward import run_target


@pytest.fixture(scope="module")
def tokens(model):
    return torch.randint(3, model.config.vocab_size, (3, 21), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def theirs(model, tokens):
    with torch.no_grad():
        return model(input_ids=tokens, output_hidden_states=True, use_cache=False)


@pytest.mark.parametrize("captured", [(1, 2, 3), (0,), (5, 0, 2), range(6)])
def test_captured_layers_are_transformers_hidden_states_one_later(model, tokens, theirs, captured):
    states = run_target(model, tokens, captured)
    # hidden_states[0] is the embedding, so the output of layer i is entry i + 1.
    expected = torch.cat([theirs.hidden_states[i + 1] for i in sorted(captured)], dim=-1)
    assert torch.equal(states.captured, expected)
    assert torch.equal(states.hidden, theirs.hidden_states[-1])
    assert torch.equal(states.logits, theirs.logits)


def test_the_last_layers_output_is_taken_before_the_final_norm(model, tokens):
    states = run_target(model, tokens, [6])
    assert not torch.allclose(states.captured, states.hidden)
    assert torch.equal(model.model.norm(states.captured), states.hidden)


def test_no_gradient_and_no_hook_is_left(model, tokens):
    before = [list(layer._forward_hooks) for layer in model.model.layers]
    states = run_target(model, tokens, (1, 2, 3))
    assert not states.captured.requires_grad
    # An inference tensor could not be saved for a head's backward pass.
    assert not states.captured.is_inference()
    assert [list(layer._forward_hooks) for layer in model.model.layers] == before


@pytest.mark.parametrize("captured", [(), (1, 1), (-1, 2), (1, 7)])
def test_layers_that_cannot_be_captured_are_refused(model, tokens, captured):
    with pytest.raises(TargetInvalid, match="cannot be captured"):
        run_target(model, tokens, captured)
