"""ModelOpt's module drafting, held against ModelOpt's other ways of running it, and against kconv's own forward."""

import contextlib
import io

import modelopt.torch.speculative as mtsp
import pytest
import torch

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import Hints
from kconv.convert.read import read_head, read_weights
from kconv.drafters import chain
from kconv.drafters.forward import DraftHead
from kconv.errors import PromptsInvalid
from kconv.targets.forward import run_target
from kconv.targets.model import load_target
from kconv.train.decoder import served_decoders
from kconv.train.module import draft_logits, eagle_settings, load_module, offline_inputs, run_module

STEPS = 3


@pytest.fixture(scope="module")
def online(trained, tiny_target):
    """The same head in ModelOpt's online mode: the whole target, under ModelOpt's own forward hooks."""
    model = load_target(tiny_target, torch.float32)
    settings = eagle_settings(trained.recipe, model) | {"eagle_offline": False}
    with served_decoders(), contextlib.redirect_stdout(io.StringIO()):
        mtsp.convert(model, [("eagle", settings)])
    kept = load_module(trained.folder / "modelopt", tiny_target)
    model.eagle_module.load_state_dict(kept.eagle_module.state_dict())
    return model.eval()


@pytest.fixture
def tokens(held_out):
    return held_out[:60].view(3, 20)


def test_step_1_is_modelopts_own_forward(trained, online, target, tiny_target, tokens):
    heard = []
    lm_head = getattr(online.eagle_module, "lm_head", online.lm_head)
    hook = lm_head.register_forward_hook(lambda _module, _args, output: heard.append(output))
    with torch.no_grad():
        online(input_ids=tokens)
    hook.remove()
    states = run_target(target, tokens, trained.recipe.captured)
    logits = draft_logits(trained.folder / "modelopt", tiny_target, tokens, states, STEPS)
    chains = tokens.shape[1] - 1 - STEPS
    assert logits.shape[:3] == (STEPS, 3, chains)
    torch.testing.assert_close(logits[0], heard[-1][:, :chains])


def test_the_states_are_those_of_modelopts_hooks(trained, online, target, tiny_target, tokens):
    """The training loss of ModelOpt's online mode, where its hooks capture, is that of the offline mode."""
    states = run_target(target, tokens, trained.recipe.captured)
    offline = load_module(trained.folder / "modelopt", tiny_target)
    with torch.no_grad():
        online_loss = online.train()(input_ids=tokens).loss
        offline_loss = offline.train()(input_ids=tokens, base_model_outputs=offline_inputs(states)).loss
    online.eval()
    online._cached_attn_blk_masks.clear()
    torch.testing.assert_close(offline_loss, online_loss)


def test_the_chain_is_what_modelopt_drafts(trained, online, target, tiny_target, tokens):
    """ModelOpt's inference path, which drafts token by token without TTT masks: `pseudo_speculative_generate`.

    Fed its own drafts as the text, the last chain has to compute the same.
    """
    heard = []
    lm_head = getattr(online.eagle_module, "lm_head", online.lm_head)
    hook = lm_head.register_forward_hook(lambda _module, _args, output: heard.append(output[0, -1]))
    for prompt in tokens[:, :12]:
        accepted, drafted = online.pseudo_speculative_generate(prompt[None], steps=STEPS)
        text = torch.cat([prompt[None], accepted, drafted], dim=1)
        states = run_target(target, text, trained.recipe.captured)
        logits = draft_logits(trained.folder / "modelopt", tiny_target, text, states, STEPS)
        torch.testing.assert_close(logits[:, 0, len(prompt) - 1], torch.stack(heard[-STEPS:]))
    hook.remove()


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_kconvs_forward_of_the_export_is_modelopts(trained, target, tiny_target, tokens, steps):
    head = read_head(open_checkpoint(trained.folder), hints=Hints())
    weights = read_weights(head) | {"embed_tokens": target.model.embed_tokens.weight.detach()}
    states = run_target(target, tokens, trained.recipe.captured)
    original = draft_logits(trained.folder / "modelopt", tiny_target, tokens, states, steps)
    ours = chain.draft_logits(DraftHead(head.spec, weights), tokens, states.captured, steps)
    torch.testing.assert_close(ours, original, rtol=1e-4, atol=1e-4)


def test_one_module_serves_texts_of_any_length(train_few, target, tiny_target, tokens):
    """ModelOpt caches attention masks by draft step, whatever the text's length."""
    trained = train_few("gqa")
    module = load_module(trained.folder / "modelopt", tiny_target)
    for length in (20, 11, 16):
        text = tokens[:, :length]
        states = run_target(target, text, trained.recipe.captured)
        fresh = draft_logits(trained.folder / "modelopt", tiny_target, text, states, STEPS)
        torch.testing.assert_close(run_module(module, text, states, STEPS), fresh)


def test_later_tokens_do_not_change_a_chain(trained, target, tiny_target, tokens):
    """Step k of chain t may know the text up to x[t+k] and no further."""
    changed = tokens.clone()
    changed[:, 12:] = changed[:, 12:].flip(1)
    assert not torch.equal(changed, tokens)
    one, two = (
        draft_logits(
            trained.folder / "modelopt", tiny_target, text, run_target(target, text, trained.recipe.captured), STEPS
        )
        for text in (tokens, changed)
    )
    for k in range(1, STEPS + 1):
        torch.testing.assert_close(one[k - 1, :, : 12 - k], two[k - 1, :, : 12 - k])
        assert not torch.allclose(one[k - 1, :, 12 - k], two[k - 1, :, 12 - k])


def test_a_text_without_a_chain_is_refused(train_few, target, tiny_target, tokens):
    trained = train_few("gqa")
    text = tokens[:, : STEPS + 1]
    states = run_target(target, text, trained.recipe.captured)
    with pytest.raises(PromptsInvalid, match="4 tokens is too short for 3"):
        draft_logits(trained.folder / "modelopt", tiny_target, text, states, STEPS)
