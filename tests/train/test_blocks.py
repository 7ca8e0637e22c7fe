"""DFlash and DSpark drafters that `kconv train` makes, held against ModelOpt's own model around the whole target."""

import contextlib
import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import Any

import modelopt.torch.speculative as mtsp
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from support.families import write_target
from torch import Tensor
from transformers import get_scheduler

import kconv
from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import verify
from kconv.cli import main
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import read_head, read_weights
from kconv.drafters.chain import draft_tokens, greedy_acceptance, pool
from kconv.drafters.spec import Gqa, Rope
from kconv.engines import by_name
from kconv.errors import RecipeInvalid, TrainingFailed
from kconv.targets.config import read_target_config
from kconv.targets.forward import run_target
from kconv.targets.model import load_target
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.recipe import TinyRecipe
from kconv.tiny.text import read_corpus
from kconv.train import dflash, run
from kconv.train.dflash import build_block, run_block
from kconv.train.dflash_recipe import BlockRecipe, DFlashRecipe, DSparkRecipe
from kconv.train.loop import EpochOrder
from kconv.train.module import export_module, offline_inputs
from kconv.train.options import TrainOptions
from kconv.train.recipe import check_keys, complete, parse_recipe
from kconv.train.run import train

MASK, THETA = 258, 50000.0
QWEN3 = TinyRecipe(steps=200, batch=4, seq=64, warmup=10, lr=3e-3)
FEW: dict[str, Any] = {
    "attention": Gqa(4, kv_heads=2, head_dim=16), "intermediate": 64, "captured": (1, 5), "rope": Rope(THETA),
    "mask": MASK, "block": 4, "anchors": 6, "batches": 4, "steps": 12, "batch": 4, "seq": 24, "warmup": 2,
    "optimizer": "adamw", "lr": 0.01, "rest_lr": 0.01,
}  # fmt: skip
DFLASH, DSPARK = DFlashRecipe(**FEW), DSparkRecipe(**FEW, markov_rank=8)
RECIPES: dict[str, BlockRecipe] = {
    "DFlash": DFLASH,
    "DFlash of the text's tokens": dataclasses.replace(DFLASH, distill=False, objective="decay", decay=4.0),
    "causal DFlash": dataclasses.replace(DFLASH, causal=True, dpace_alpha=0.3),
    "DSpark": dataclasses.replace(DSPARK, decay=4.0),
    "gated DSpark": dataclasses.replace(DSPARK, markov_kind="gated", ce_loss=1.0),
    "recurrent DSpark": dataclasses.replace(DSPARK, markov_kind="rnn", confidence_loss=0.0),
}
# What ModelOpt is told of each; the rest is common.
TOLD: dict[str, dict[str, Any]] = {
    "DFlash": {},
    "DFlash of the text's tokens": {
        "dflash_self_logit_distillation": False, "dflash_loss_objective": "decay", "dflash_loss_decay_factor": 4.0},
    "causal DFlash": {"dflash_draft_attention": "causal", "dflash_dpace_alpha": 0.3},
    "DSpark": {"dflash_confidence_head_alpha": 1.0, "dflash_loss_decay_factor": 4.0,
               "architecture": {"use_confidence_head": True}},
    "gated DSpark": {"dflash_confidence_head_alpha": 1.0, "dflash_ce_loss_alpha": 1.0,
                     "architecture": {"use_confidence_head": True, "markov_head_type": "gated"}},
    "recurrent DSpark": {"architecture": {"markov_head_type": "rnn"}},
}  # fmt: skip


def around_the_target(folder: Path, kind: str) -> Any:
    """Return ModelOpt's own model of an untrained drafter, around the whole target, which it runs itself."""
    told = dict(TOLD[kind])
    dims = {
        "num_hidden_layers": 2, "target_layer_ids": [1, 5], "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "intermediate_size": 64, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    } | told.pop("architecture", {})  # fmt: skip
    if "DSpark" in kind:
        dims |= {"projector_type": "dspark", "markov_rank": 8}
    config = {
        "dflash_block_size": 4, "dflash_num_anchors": 6, "dflash_mask_token_id": MASK,
        "dflash_use_torch_compile": False, "dflash_architecture_config": dims,
    } | told  # fmt: skip
    model = load_target(folder, torch.float32)
    with contextlib.redirect_stdout(io.StringIO()):
        torch.manual_seed(0)
        mtsp.convert(model, [("dflash", config)])
    return model.train()


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.dflash_module.named_parameters()}


@pytest.fixture(scope="module", params=list(RECIPES))
def kind(request) -> str:
    return request.param


def test_the_loss_and_the_gradients_of_a_step_are_modelopts(kind, tiny_target, target, held_out):
    """ModelOpt runs the target, and kconv gives it the target's states; both see which tokens count."""
    tokens, mask = held_out[:72].view(3, 24), torch.ones(3, 24, dtype=torch.bool)
    mask[0, :9] = mask[1, 20:] = False
    whole = around_the_target(tiny_target, kind)
    torch.manual_seed(1)
    expected = whole(input_ids=tokens, labels=tokens.masked_fill(~mask, -100))
    expected.loss.backward()
    model = build_block(load_target(tiny_target, torch.float32), RECIPES[kind]).train()
    states = offline_inputs(run_target(target, tokens, (1, 5)))
    del states["base_model_logits"]
    torch.manual_seed(1)
    found = run_block(model, {"input_ids": tokens, "loss_mask": mask, "base_model_outputs": states}, RECIPES[kind])
    found.loss.backward()
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert found.train_acc == expected.train_acc
    wanted = gradients(whole)
    assert gradients(model).keys() == wanted.keys()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["DFlash", "DSpark"])
def test_training_is_modelopts_own_loop(kind, make_job, rows, target, tmp_path, monkeypatch):
    """Over the same batches and places of blocks, bit for bit."""
    recipe = dataclasses.replace(RECIPES[kind], schedule="constant_with_warmup", warmup=0)
    places, told = [], []

    def run_and_note(model, batch, recipe):
        if torch.is_grad_enabled():
            places.append(torch.get_rng_state())
        return run_block(model, batch, recipe)

    monkeypatch.setattr(dflash, "FAMILY", dataclasses.replace(dflash.FAMILY, run=run_and_note))
    out = train(make_job(recipe), tmp_path / "head", progress=lambda *step: told.append(step[2]))
    model = build_block(load_target(make_job(recipe).target, torch.float32), recipe).train()
    weights = list(model.dflash_module.parameters())
    optimizer = torch.optim.AdamW(weights, lr=recipe.lr, weight_decay=0.0, betas=(0.9, 0.95))
    schedule = get_scheduler(recipe.schedule, optimizer, 0, recipe.steps)
    batches, losses = rows[0].ids.split(recipe.batch), []
    for epoch in range(recipe.steps // recipe.batches):
        for at in EpochOrder(recipe.batches, recipe.seed, lambda epoch=epoch: epoch):
            states = offline_inputs(run_target(target, batches[at], recipe.captured))
            torch.set_rng_state(places[len(losses)])
            loss = model(input_ids=batches[at], loss_mask=torch.ones_like(batches[at]), base_model_outputs=states).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert told == losses
    made = load_file(out / "modelopt" / "dflash_module.safetensors")
    assert made.keys() == model.dflash_module.state_dict().keys()
    for name, tensor in model.dflash_module.state_dict().items():
        assert torch.equal(made[name], tensor), name


@pytest.fixture(scope="module")
def made(make_job, once):
    """Return a function that gives a drafter of a kind, of a run that was not stopped."""

    def make(kind: str) -> Path:
        options = TrainOptions(save_every=5, eval_every=6)
        return once(f"block {kind}", lambda out: train(make_job(RECIPES[kind]), out, options))

    return make


def test_what_comes_out_is_modelopts_export_and_is_converted(kind, made, tiny_target, tmp_path):
    out = made(kind)
    head, recipe = read_head(open_checkpoint(out)), RECIPES[kind]
    assert head.layout.name == ("dspark-modelopt" if "DSpark" in kind else "dflash")
    assert head.spec == recipe.spec(read_target_config(tiny_target))
    training = verify(out).training
    assert training is not None
    assert parse_recipe(training["recipe"]) == recipe
    assert training["trained"]["loss"] < training["untrained"]["loss"]
    assert training["trained"][f"rate_{head.spec.places}"] > 0
    raw = load_file(out / "modelopt" / "dflash_module.safetensors")
    assert raw.keys() == load_file(out / "model.safetensors").keys()
    for engine in ("sglang", "vllm") if head.spec.markov.kind == "vanilla" else ("sglang",):
        execute(plan(head, by_name(f"dflash-{engine}")), tmp_path / engine)
        read = read_head(open_checkpoint(tmp_path / engine))
        assert (read.spec, read.layout.name) == (head.spec, f"dflash-{engine}")


@pytest.mark.parametrize("kind", ["DFlash", "DSpark"])
@pytest.mark.parametrize("step", [4, 6, pytest.param(8, marks=pytest.mark.slow)])
def test_a_run_that_stopped_ends_with_the_same_bytes(kind, step, make_job, made, tmp_path):
    class Stopped(Exception):
        pass

    def stop(done: int, *_: object) -> None:
        if done == step:
            raise Stopped

    options, out = TrainOptions(save_every=5, eval_every=6), tmp_path / "head"
    with pytest.raises(Stopped):
        train(make_job(RECIPES[kind]), out, options, stop)
    train(make_job(RECIPES[kind]), out, options)
    for file in ("model.safetensors", "config.json", "modelopt/dflash_module.safetensors"):
        assert (out / file).read_bytes() == (made(kind) / file).read_bytes()


def test_how_often_it_is_measured_leaves_a_drafter_as_it_is(make_job, made, tmp_path):
    out = train(make_job(DFLASH), tmp_path / "head", TrainOptions(save_every=12, eval_every=1))
    assert (out / "model.safetensors").read_bytes() == (made("DFlash") / "model.safetensors").read_bytes()


def test_a_dflash_drafter_is_trained_on(make_job, made, tmp_path):
    start = read_head(open_checkpoint(made("DFlash")))
    out = train(make_job(dataclasses.replace(DFLASH, steps=2), init_from=start), tmp_path / "head")
    began, ended = verify(out).training, verify(made("DFlash")).training
    assert began is not None and ended is not None
    assert began["untrained"]["loss"] == pytest.approx(ended["trained"]["loss"], rel=1e-5)


def test_dspark_starts_from_a_dflash_drafter_with_new_heads(make_job, made, tmp_path):
    start, before = read_head(open_checkpoint(made("DFlash"))), load_file(made("DFlash") / "model.safetensors")
    begun = run._start(make_job(DSPARK, init_from=start)).dflash_module.state_dict()
    assert {name for name in begun if name not in before} == {
        "markov_w1.weight", "markov_w2.weight", "confidence_proj.weight", "confidence_proj.bias"
    }  # fmt: skip
    assert all(torch.equal(begun[name], tensor) for name, tensor in before.items())
    out = train(make_job(dataclasses.replace(DSPARK, steps=2), init_from=start), tmp_path / "head")
    assert read_head(open_checkpoint(out)).spec.is_dspark


def packed(tokens: Tensor, states: dict[str, Tensor], counts: slice) -> dict[str, Any]:
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, counts] = True
    return {"input_ids": tokens, "loss_mask": mask, "base_model_outputs": states}


@pytest.mark.parametrize("kind", ["DFlash", "DSpark"])
@pytest.mark.parametrize("counts", [slice(0, 10), slice(10, 24)])
def test_documents_of_a_row_are_kept_apart(kind, counts, tiny_target, target, held_out):
    """Where one of two documents counts, the other's tokens and states change nothing."""
    recipe = dataclasses.replace(RECIPES[kind], pack=True)
    model = build_block(load_target(tiny_target, torch.float32), recipe).train()
    documents = torch.tensor([0] * 10 + [1] * 14).expand(2, -1)
    tokens = held_out[:48].view(2, 24)
    other = torch.where(documents == (0 if counts.start else 1), held_out[48:96].view(2, 24), tokens)
    losses = []
    for ids, numbers in ((tokens, documents), (other, documents), (tokens, None), (other, None)):
        parts = [offline_inputs(run_target(target, part, recipe.captured)) for part in ids.split([10, 14], 1)]
        states = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
        batch = packed(ids, states, counts) | ({} if numbers is None else {"documents": numbers})
        torch.manual_seed(0)
        losses.append(run_block(model, batch, recipe).loss.item())
    assert losses[0] > 0 and losses[0] == losses[1]
    # By itself ModelOpt lets a block of the second read the first.
    if counts.start:
        assert losses[2] != losses[3]


@pytest.mark.parametrize("kind", ["DFlash", "DSpark"])
def test_no_block_predicts_a_token_of_the_next_document(kind, tiny_target, target, held_out):
    recipe = dataclasses.replace(RECIPES[kind], pack=True, anchors=24)
    model = build_block(load_target(tiny_target, torch.float32), recipe).train()
    tokens, documents = held_out[:24].view(1, 24), torch.tensor([[0] * 10 + [1] * 9 + [-1] * 5])
    found: list[Tensor] = []
    own = model._build_noise_embedding
    model._build_noise_embedding = lambda ids, anchors, *rest: found.append(anchors[0]) or own(ids, anchors, *rest)
    batch = packed(tokens, offline_inputs(run_target(target, tokens, recipe.captured)), slice(0, 19))
    for seed in range(20):
        torch.manual_seed(seed)
        run_block(model, batch | {"documents": documents}, recipe)
    last = recipe.draft_steps
    assert set(torch.cat(found).tolist()) == {*range(10 - last), *range(10, 19 - last)}


def test_products_in_bf16_are_finite_where_rows_have_fewer_blocks(tiny_target, target, held_out):
    recipe = dataclasses.replace(DFLASH, compute="BF16")
    model = build_block(load_target(tiny_target, torch.float32), recipe).train()
    tokens = held_out[:48].view(2, 24)
    batch = packed(tokens, offline_inputs(run_target(target, tokens, recipe.captured)), slice(0, 24))
    batch["loss_mask"][1, 3:] = False
    loss = run_block(model, batch, recipe).loss
    loss.backward()
    assert loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_the_base_of_rope_that_is_trained_with_is_exported(tiny_target, tmp_path):
    """By itself ModelOpt trains a drafter for this target with 10000, and writes the target's."""
    model = build_block(load_target(tiny_target, torch.float32), DFLASH)
    assert model.dflash_config.rope_parameters["rope_theta"] == THETA
    other = build_block(load_target(tiny_target, torch.float32), dataclasses.replace(DFLASH, rope=Rope(10000.0)))
    with pytest.raises(TrainingFailed, match="trained with"):
        export_module(other, tmp_path, dataclasses.replace(DFLASH, rope=Rope(10000.0)), torch.float32)


STATED: dict[str, Any] = {
    "mask": MASK, "captured": [1, 5], "block": 4, "seq": 24, "attention": {"heads": 4, "kv_heads": 2, "head_dim": 16},
    "intermediate": 64, "batches": 4,
}  # fmt: skip
WRONG = {
    "another family's key": ("dflash", {"ttt_steps": 3}, "no recipe of dflash has a key 'ttt_steps', only of eagle3"),
    "DSpark's key": ("dflash", {"markov_rank": 8}, "no recipe of dflash has a key 'markov_rank', only of dspark"),
    "a short form": ("dspark", {"decoder": "gqa"}, "no recipe of dspark has a key 'decoder', only of eagle3"),
    "no such family": ("medusa", {}, "drafter is 'medusa'"),
    "no mask": ("dflash", {"mask": ...}, "no mask"),
    "a mask without a row": ("dflash", {"mask": 512}, "embedding has 512 rows"),
    "a mask that texts have": ("dflash", {"mask": 1}, "begins, ends or pads"),
    "part of a block": ("dflash", {"seq": 26}, "no multiple of block"),
    "a block of the anchor": ("dflash", {"block": 1}, "drafts no token"),
    "a scaled RoPE": ("dflash", {"rope": {"theta": 1e6}}, "ModelOpt trains with the target's base"),
    "a layer too far": ("dflash", {"captured": [1, 7]}, "captures layer 7"),
    "more layers than the target": (
        "dflash",
        {"captured": ..., "layers": 9},
        "a drafter of 9 layers reads",
    ),
    "the default of layers": ("dflash", {"captured": ...}, "among 1 to 4 of its 7, which are too few"),
    "another kind of attention": (
        "dflash",
        {"attention": {"heads": 4, "q_lora_rank": 64}},
        "q_lora_rank is not a known key; the keys are heads",
    ),
    "groups that are not whole": (
        "dflash",
        {"attention": {"heads": 4, "kv_heads": 3, "head_dim": 16}},
        "no whole number of groups",
    ),
    "half a pair": ("dspark", {"attention": {"heads": 4, "kv_heads": 2, "head_dim": 15}}, "RoPE rotates pairs"),
    "two words for it": ("dflash", {"layers": 2}, "captured is stated too"),
    "a decay of D-PACE": ("dflash", {"decay": 4.0}, "needs objective decay"),
    "an alpha of none": ("dflash", {"dpace_alpha": 0.0}, "dpace_alpha is 0"),
    "no loss": ("dspark", {"ce_loss": 0.0, "l1_loss": 0.0}, "nothing would be learned"),
    "no rank": ("dspark", {"markov_rank": 0}, "markov_rank is 0"),
}


@pytest.mark.parametrize(("drafter", "changes", "said"), WRONG.values(), ids=WRONG)
def test_a_recipe_that_cannot_be_is_refused(tiny_target, drafter, changes, said):
    values = {key: value for key, value in (STATED | {"drafter": drafter} | changes).items() if value is not ...}
    with pytest.raises(RecipeInvalid, match=said):
        complete(values, read_target_config(tiny_target), 100)


def test_a_mask_that_the_text_has_is_refused(tiny_target, tmp_path):
    text = load_tokenizer(tiny_target).encode("Return the sum of two numbers. ")
    rows = (json.dumps({"text": f"Return the sum of two numbers. {'It is not more. ' * n}"}) for n in range(60))
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    options = {key: STATED[key] for key in ("captured", "block", "seq", "attention", "intermediate", "batches")}
    with pytest.raises(RecipeInvalid, match=f"mask is {text[0]}, which the text has [0-9]+ times"):
        kconv.train(
            tiny_target, tmp_path / "out", recipe="dflash", data=tmp_path / "data.jsonl",
            set=options | {"mask": text[0], "batch": 2},
        )  # fmt: skip


def test_keys_that_contradict_each_other_are_refused_without_a_target():
    with pytest.raises(RecipeInvalid, match="captured is stated too"):
        check_keys({"drafter": "dflash", "layers": 2, "captured": [1, 5]})


def test_what_a_recipe_leaves_out_is_the_targets(tmp_path, tiny_target):
    qwen3 = write_target(tmp_path / "target", "qwen3", tiny_target, None)
    recipe = complete({"drafter": "dflash", "mask": MASK, "layers": 3}, read_target_config(qwen3), 100)
    assert recipe == DFlashRecipe(
        attention=Gqa(4, 2, 32), intermediate=128, captured=(1, 2, 4), rope=Rope(1e6), eps=1e-6, mask=MASK, batches=25,
        steps=25, warmup=2,
    )  # fmt: skip
    assert build_block(load_target(qwen3, torch.float32), recipe).target_layer_ids == [1, 2, 4]


def test_a_head_of_another_family_or_other_dims_is_not_trained_on(made, unstopped, tiny_target):
    config = read_target_config(tiny_target)
    dflash, dspark, eagle = (read_head(open_checkpoint(f)).spec for f in (made("DFlash"), made("DSpark"), unstopped))
    few = {"seq": 24, "drafter": "dflash"}
    assert complete(few, config, 100, dflash) == dataclasses.replace(
        DFlashRecipe(**{key: value for key, value in FEW.items() if key in ("attention", "intermediate", "captured",
        "rope", "mask", "block")}), seq=24, batches=25, steps=25, warmup=2,
    )  # fmt: skip
    assert complete({"drafter": "dspark", "seq": 24}, config, 100, dspark).markov_rank == 8
    for values, spec, said in (
        (few, dspark, "is a DSpark drafter"),
        (few, eagle, "is an Eagle3 head"),
        ({"seq": 24, "decoder": "gqa"}, dflash, "is a DFlash drafter"),
        (few | {"captured": [1, 4]}, dflash, "captured differs"),
        (few | {"mask": 7}, dflash, "mask differs"),
        (few | {"layers": 3}, dflash, "layers differs"),
        ({"drafter": "dspark", "seq": 24, "confidence_loss": 0.0}, dspark, "confidence_loss differs"),
        ({"drafter": "dspark", "seq": 24, "markov_rank": 4}, dspark, "markov_rank differs"),
    ):
        with pytest.raises(RecipeInvalid, match=said):
            complete(values, config, 100, spec)


def test_a_manifest_that_states_another_block_is_found_out(made, tmp_path):
    head = shutil.copytree(made("DFlash"), tmp_path / "head")
    said = json.loads((head / "kconv.json").read_text())
    said["training"]["recipe"]["block"] = 8
    (head / "kconv.json").write_text(json.dumps(said))
    found = CliRunner().invoke(main, ["verify", str(head)])
    assert found.exit_code == 1 and "trained with block 8" in found.output


# 300 steps over a tiny Qwen3's own text.
LEARNED: dict[str, tuple[str, dict[str, Any]]] = {"DFlash": ("dflash", {}), "DSpark": ("dspark", {"markov_rank": 16})}
LEARNING: dict[str, Any] = {
    "mask": MASK, "captured": [1, 5], "block": 4, "intermediate": 128, "batch": 4, "batches": 300, "steps": 300,
    "seq": 64, "warmup": 15, "anchors": 16, "optimizer": "adamw", "lr": 3e-3, "rest_lr": 3e-3, "compute": None,
    "pack": False,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", LEARNED)
def test_a_trained_drafter_is_accepted_more_often_than_an_untrained_one(kind, tiny_target, once, tmp_path):
    """Over greedy text of a tiny Qwen3, by kconv's own forward of what was written."""
    qwen3 = once("block qwen3", lambda out: write_target(out, "qwen3", tiny_target, QWEN3))
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in read_corpus().train))
    recipe, more = LEARNED[kind]
    lengths = {}
    for name, changes in (("untrained", {"steps": 1, "warmup": 0, "lr": 1e-9, "rest_lr": 1e-9}), ("trained", {})):
        settings = LEARNING | more | changes
        kconv.train(qwen3, tmp_path / name, recipe=recipe, data=data, set=settings)
        lengths[name] = greedy_length(tmp_path / name, qwen3)
    assert lengths["trained"] > lengths["untrained"] + 0.3, lengths


@torch.no_grad()
def greedy_length(folder: Path, target: Path) -> float:
    head, model = read_head(open_checkpoint(folder)), load_target(target, torch.float32)
    weights = read_weights(head) | {"embed_tokens": model.model.embed_tokens.weight, "lm_head": model.lm_head.weight}
    drafter, steps = head.spec.drafter.load(head.spec, weights), head.spec.places
    tokenizer, found = load_tokenizer(target).inner, []
    for text in read_corpus().held_out[:12]:
        tokens = torch.tensor([tokenizer.encode(text)[:24]])
        begun = tokens.shape[1]
        for _ in range(64):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
        states = run_target(model, tokens, head.spec.captured)
        drafted = draft_tokens(drafter, tokens, states.captured, steps)
        found.append(greedy_acceptance(drafted[:, 0], tokens[0], begun))
    return pool(found).length
