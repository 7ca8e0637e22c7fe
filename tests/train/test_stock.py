"""Training held against a plain loop around ModelOpt: with its own decoder layer, and with kconv's in its place."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from pathlib import Path

import modelopt.torch.speculative as mtsp
import pytest
import torch
from safetensors.torch import load_file
from support.validated import validate
from torch import Tensor
from transformers import get_scheduler

import kconv
from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import Hints
from kconv.checkpoint.source import Folder
from kconv.convert.read import read_head, read_weights
from kconv.drafters import chain
from kconv.drafters.forward import DraftHead
from kconv.targets.forward import run_target
from kconv.targets.model import load_target
from kconv.train.data import cut_windows
from kconv.train.decoder import served_decoders
from kconv.train.loop import EpochOrder
from kconv.train.module import draft_logits, eagle_settings, offline_inputs
from kconv.train.recipe import TEST_GQA, TEST_MLA, EagleRecipe
from kconv.train.run import train, train_head
from kconv.validate.options import ValidateOptions

STEPS = 8
PLAIN = {"optimizer": "adamw", "lr": 0.01, "rest_lr": 0.01, "schedule": "constant_with_warmup", "warmup": 0}
FEW = {"batches": 4, "steps": STEPS, "batch": 2, "seq": 24}
RECIPES = {
    "stock gqa": dataclasses.replace(TEST_GQA, **PLAIN, **FEW, decoder_layer="stock"),
    "served gqa": dataclasses.replace(TEST_GQA, **PLAIN, **FEW),
    "served mla": dataclasses.replace(TEST_MLA, **PLAIN, **FEW),
}


def train_plainly(folder: Path, recipe: EagleRecipe, text: Tensor) -> tuple[list[float], dict[str, Tensor]]:
    """Train ModelOpt's module by torch's own optimizer; return the loss of each step, and the weights."""
    served = recipe.decoder_layer == "served"
    windows = cut_windows(text, recipe.seq, recipe.batches * recipe.batch, recipe.seed).split(recipe.batch)
    model = load_target(folder, torch.float32)
    states = [run_target(model, ids, recipe.captured) for ids in windows]
    with served_decoders() if served else contextlib.nullcontext(), contextlib.redirect_stdout(io.StringIO()):
        settings = eagle_settings(recipe, model)
        settings["eagle_architecture_config"]["_attn_implementation"] = "eager"
        torch.manual_seed(recipe.seed)
        mtsp.convert(model, [("eagle", settings)])
    model.train()
    weights = list(model.eagle_module.parameters())
    optimizer = torch.optim.AdamW(weights, lr=recipe.lr, weight_decay=0.0, betas=(0.9, 0.95))
    schedule = get_scheduler(recipe.schedule, optimizer, recipe.warmup, recipe.steps)
    losses = []
    for epoch in range(recipe.steps // recipe.batches):
        for at in EpochOrder(recipe.batches, recipe.seed, lambda epoch=epoch: epoch):
            mask = torch.ones_like(windows[at], dtype=torch.bool)
            loss = model(input_ids=windows[at], loss_mask=mask, base_model_outputs=offline_inputs(states[at])).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, model.eagle_module.state_dict()


@pytest.fixture(scope="module", params=list(RECIPES))
def pair(request, tiny_target, text, held_out, tmp_path_factory):
    """Return a recipe, a head that kconv trains by it, and the losses and weights of both loops."""
    recipe, told = RECIPES[request.param], []
    out = tmp_path_factory.mktemp("head") / "head"
    train_head(tiny_target, out, recipe, text, held_out, lambda *step: told.append(step[2]))
    return recipe, out, told, *train_plainly(tiny_target, recipe, text)


def test_training_is_modelopts_own_loop(pair):
    _, out, told, losses, weights = pair
    # Equal bit for bit where PyTorch's products do not depend on how memory is aligned: its kernels for AVX-512 differ
    # in the last digit.
    assert told == pytest.approx(losses, rel=1e-6)
    made = load_file(out / "modelopt" / "eagle_module.safetensors")
    assert made.keys() == weights.keys()
    for name, tensor in made.items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-4, atol=1e-4)


def test_only_a_served_layer_drafts_as_its_own_module(pair, target, tiny_target, held_out):
    recipe, out, *_ = pair
    tokens = held_out[:60].view(3, 20)
    head, states = read_head(open_checkpoint(out), hints=Hints()), run_target(target, tokens, recipe.captured)
    weights = read_weights(head) | {"embed_tokens": target.model.embed_tokens.weight.detach()}
    served = chain.draft_logits(DraftHead(head.spec, weights), tokens, states.captured, 3)
    trained = draft_logits(out / "modelopt", tiny_target, tokens, states, 3)
    apart = float((served - trained).abs().max())
    assert apart > 0.01 if recipe.decoder_layer == "stock" else apart < 1e-4
    assert json.loads((out / "modelopt" / "recipe.json").read_text())["decoder_layer"] == recipe.decoder_layer


def test_stock_and_served_part_with_the_second_step(tiny_target, text):
    served, other = RECIPES["served gqa"], RECIPES["stock gqa"]
    (losses, _), (stock, _) = (train_plainly(tiny_target, recipe, text) for recipe in (served, other))
    assert stock[0] == pytest.approx(losses[0], abs=1e-4)
    assert abs(stock[-1] - losses[-1]) > 1e-3


@pytest.mark.parametrize("layer", ["stock", "served"])
def test_validate_says_of_a_stock_head_that_no_engine_computes_it_as_it_was_trained(make_job, tmp_path, layer):
    """The manifest tells, so it is said of a converted head too."""
    recipe = dataclasses.replace(TEST_GQA, **PLAIN, **FEW, decoder_layer=layer)
    folder = train(make_job(recipe), tmp_path / "head")
    kconv.convert(str(folder), str(tmp_path / "served"), to="vllm")
    for head in (folder, tmp_path / "served"):
        found = validate(Folder(head), ValidateOptions(for_=("vllm",))).findings
        assert [one.rule for one in found if one.rule == "K210"] == ["K210"] * (layer == "stock")
