"""DFlash and DSpark drafters: published forms read, and written for each engine with every bit kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import save_file
from support import deepspec
from support.block_drafters import DFLASH, DSPARK, FORMS, OWN, Form
from support.heads import random_slots, write_head
from support.published import OTHERS

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import Hints, read_manifest
from kconv.cli import main
from kconv.convert.read import Head, read, read_head, read_weights
from kconv.drafters.dflash import Markov
from kconv.drafters.dflash_captured import guessed
from kconv.drafters.registry import drafters
from kconv.engines import by_name
from kconv.errors import ConfigInvalid

READ = {name: form for name, form in FORMS.items() if form.layout}
ENGINES = ("vllm", "sglang", "trtllm", "portable", "speculators")


def kconv(*words: object, fails: bool = False) -> dict[str, Any]:
    """Return the JSON that a command prints."""
    done = CliRunner().invoke(main, [*map(str, words), "--json"])
    assert done.exit_code == fails, done.output
    return json.loads(done.stdout)


def options(form: Form) -> list[str]:
    """Return what decides what a form's files leave open, as options."""
    found: list[str] = []
    for name, value in form.options.items():
        said = ",".join(map(str, value)) if isinstance(value, list) else "yes" if value is True else str(value)
        found += [f"--{name.replace('_', '-')}", said]
    return found


def hints(form: Form) -> Hints:
    return Hints.model_validate({k: tuple(v) if isinstance(v, list) else v for k, v in form.options.items()})


def slots(head: Head) -> dict[str, torch.Tensor]:
    """Return a head's slots; a Markov head of zeros counts as none."""
    weights = read_weights(head)
    return {slot: t for slot, t in weights.items() if not (slot.startswith("markov") and not t.any())}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """The config of a target of the forms' width and vocabulary, with what its drafters share."""
    folder = tmp_path_factory.mktemp("target") / "target"
    folder.mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 48, "vocab_size": 64,
              "num_hidden_layers": 36, "num_attention_heads": 4, "max_position_embeddings": 1024}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {f"model.{n}" if n[0] == "e" else n: torch.zeros(s) for n, s in OWN.items()}, folder / "model.safetensors"
    )
    return folder


def test_the_forms_are_many_and_each_says_where_it_is_published():
    assert len(FORMS) >= 24 and all(form.source.startswith("https://") for form in FORMS.values())


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_form_is_named_and_shows_what_its_files_leave_open(form, tmp_path):
    found = kconv("inspect", form.write(tmp_path / "form"))
    assert found["layout"] == form.layout
    assert {one["fact"] for one in found["undecided"]} == set(form.leaves_open)
    if form.layout is None:
        assert found["kind"] == form.kind
        return
    assert found["kind"] == "DFlash drafter"
    assert found["convertible"] is (not form.leaves_open and "" not in form.refused)
    if found["convertible"]:
        spec = found["spec"]
        assert (spec["captured"], spec["mask"], spec["layers"]) == ([1, 9, 17, 25, 33], 60, 2)
        assert spec["shift"] is (form.kind == "DSpark")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", READ.values(), ids=READ)
def test_a_form_is_written_for_an_engine_with_every_bit_or_refused_by_name(form, engine, tmp_path, target):
    folder, out = form.write(tmp_path / "form"), tmp_path / "out"
    told = [*options(form), *(["--target", str(target)] if engine == "speculators" else [])]
    why = form.refused.get(engine) or form.refused.get("")
    done = CliRunner().invoke(main, [f"to-{engine}", str(folder), str(out), *told])
    if why is not None:
        assert done.exit_code == 1 and why in done.output and not out.exists()
        return
    assert done.exit_code == 0, done.output
    manifest = read_manifest(out)
    assert manifest.exact and manifest.as_it_ships and manifest.layout == f"dflash-{engine}"
    before, after = read_head(open_checkpoint(folder), hints=hints(form)), read_head(open_checkpoint(out))
    assert after.layout.name == f"dflash-{engine}"
    meant = before.spec
    if meant.shift and not meant.markov.rank and engine != "speculators":
        meant = replace(meant, markov=Markov(1))
        zeros = [step.output.name for step in manifest.tensors if step.action == "zeros"]
        assert zeros == ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]
    assert after.spec == meant
    own, made = slots(before), slots(after)
    assert own.keys() == made.keys() and all(torch.equal(own[slot], made[slot]) for slot in own)
    kconv("verify", out, folder)
    served = "vllm" if engine in ("portable", "speculators") else engine
    # vLLM reads the speculators library's drafters, but not every one of them rightly.
    not_served = engine == "speculators" and ("vllm" in form.refused or after.spec.shift > after.spec.markov.rank)
    report = kconv("validate", out, "--source", folder, "--for", served, fails=not_served)
    assert report["figures"]["identical"] is True
    errors = {one["rule"] for one in report["findings"] if one["severity"] == "error"}
    assert errors == ({"K520"} if not after.spec.markov.rank else {"K521"}) if not_served else not errors
    assert {one["rule"] for one in report["findings"]} - errors <= {"K203", "K204", "K214", "K316", "K533", "K538"}


@pytest.mark.parametrize(("depth", "told"), [(36, ()), (None, ("--target-layers", "36"))], ids=["config", "option"])
def test_sglang_never_captures_the_last_layer(depth, told, tmp_path):
    one = FORMS["z-lab, Qwen3"]
    config = one.config | {"dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 9, 17, 25, 35]},
                           "num_target_layers": depth}  # fmt: skip
    folder = str(replace(one, config=config).write(tmp_path / "form"))
    for engine in ("sglang", "portable"):
        done = CliRunner().invoke(main, [f"to-{engine}", folder, str(tmp_path / engine), *told])
        assert done.exit_code == 1 and "the output of the last layer" in done.output
    kconv("to-vllm", folder, tmp_path / "vllm", *told)


@pytest.mark.parametrize("other", ENGINES[1:])
@pytest.mark.parametrize("form", ["ModelOpt, DFlash", "ModelOpt, DSpark", "DeepSpec, DSpark"])
def test_there_and_back_is_the_same_file(form, other, tmp_path, target):
    told = ("--target", target)
    kconv("to-vllm", FORMS[form].write(tmp_path / "form"), tmp_path / "one")
    kconv(f"to-{other}", tmp_path / "one", tmp_path / "two", *(told if other == "speculators" else ()))
    kconv("to-vllm", tmp_path / "two", tmp_path / "three")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "three" / name).read_bytes()


def test_no_relative_or_eagle3_head_is_taken_for_one(tmp_path):
    from support.published import EAGLE3

    for number, form in enumerate((EAGLE3 | OTHERS).values()):
        checkpoint = open_checkpoint(form.write(tmp_path / str(number)))
        for config in (checkpoint.config, {**checkpoint.config, "dflash_config": None}):
            assert not drafters()[0].marks(config, checkpoint.tensors)


# What a form's config has besides, None for a key that it lacks, and an engine that serves it rightly.
SERVED = {
    "speculators' DFlash without a word on windows, by vLLM": (
        "speculators, DFlash", {"sliding_window_non_causal": None}, "vllm"),
    "ModelOpt's flat names under DSpark's class, by TensorRT-LLM": (
        "ModelOpt, DSpark", {"architectures": ["Qwen3DSparkModel"]}, "trtllm"),
    "vLLM's second word for the anchor": (
        "DeepSpec, DSpark", {"sample_from_anchor": True, "dspark_bonus_anchor": False}, "vllm"),
}  # fmt: skip


@pytest.mark.parametrize(("form", "keys", "engine"), SERVED.values(), ids=SERVED)
def test_an_engine_serves_a_form_as_it_is(form, keys, engine, tmp_path):
    one = FORMS[form]
    config = {key: value for key, value in (one.config | keys).items() if value is not None or key not in keys}
    kconv("validate", replace(one, config=config).write(tmp_path / "form"), "--for", engine)


ZLAB = FORMS["z-lab, Qwen3"].config["dflash_config"]
# The config of a good form, with something that kconv must refuse by name.
REFUSED = {
    "the target's partial_rotary_factor": ("z-lab, Qwen3", {"partial_rotary_factor": 0.5}, "copied from the target"),
    "Gemma's norms": ("z-lab, Qwen3", {"use_gemma_norm": True}, "use_gemma_norm is True"),
    "no captured states": (
        "z-lab, Qwen3", {"dflash_config": ZLAB | {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
    "SpecForge's latent attention": (
        "z-lab, Qwen3", {"dflash_config": ZLAB | {"attention_mode": "mla"}}, "attention_mode is 'mla'"),
    "a projector of DSpark under DFlash's class": ("z-lab, Qwen3", {"projector_type": "dspark"}, "sample_from_anchor"),
    "vLLM's word against the anchor's": ("DeepSpec, DSpark", {"dspark_bonus_anchor": True}, "dspark_bonus_anchor"),
    "Gemma's class": ("DeepSpec, DSpark", {"architectures": ["Gemma4DSparkModel"]}, "the class Gemma4DSparkModel"),
    "Laguna's class": ("z-lab, Qwen3", {"architectures": ["DFlashLagunaForCausalLM"]}, "DFlashLagunaForCausalLM"),
    "layers in another order": (
        "z-lab, Qwen3", {"dflash_config": ZLAB | {"target_layer_ids": [33, 25, 17, 9, 1]}}, "the columns of fc follow"),
    "a block that drafts nothing": ("z-lab, Qwen3", {"block_size": 1}, "a block drafts no token"),
}  # fmt: skip


@pytest.mark.parametrize(("form", "keys", "why"), REFUSED.values(), ids=REFUSED)
def test_a_config_is_refused_by_name(form, keys, why, tmp_path):
    one = FORMS[form]
    folder = replace(one, config=one.config | keys).write(tmp_path / "form")
    done = CliRunner().invoke(main, ["to-vllm", str(folder), str(tmp_path / "out"), *options(one)])
    assert done.exit_code == 1 and why in done.output and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("depth", "layers", "ids"), [(36, 5, (1, 9, 17, 25, 33)), (6, 3, (1, 2, 3)), (28, 1, (14,))])
def test_the_guess_is_that_of_z_labs_code(depth, layers, ids):
    assert guessed(depth, layers) == ids


# The header that ModelOpt 0.47 exports: hidden 128, three captured layers, rank 32, a vocabulary of 512.
GOLDEN = {
    "fc.weight": (128, 384), "hidden_norm.weight": (128,), "norm.weight": (128,), "markov_w1.weight": (512, 32),
    "markov_w2.weight": (512, 32), "gate_proj.weight": (32, 160), "gate_proj.bias": (32,),
    "joint_proj.weight": (96, 192), "joint_proj.bias": (96,), "confidence_proj.weight": (1, 160),
    "confidence_proj.bias": (1,),
    **{f"layers.{i}.{name}.weight": shape for i in range(3) for name, shape in {
        "input_layernorm": (128,), "post_attention_layernorm": (128,), "self_attn.q_proj": (128, 128),
        "self_attn.k_proj": (64, 128), "self_attn.v_proj": (64, 128), "self_attn.o_proj": (128, 128),
        "self_attn.q_norm": (32,), "self_attn.k_norm": (32,), "mlp.gate_proj": (384, 128),
        "mlp.up_proj": (384, 128), "mlp.down_proj": (128, 384)}.items()},
}  # fmt: skip
MODES = {
    "dflash": {},
    "vanilla": {"markov_head_type": "vanilla", "use_confidence_head": True},
    "gated": {"markov_head_type": "gated", "use_confidence_head": True},
    "rnn": {"markov_head_type": "rnn", "use_confidence_head": True},
}


@pytest.fixture(scope="module", params=MODES)
def trained(request, tmp_path_factory) -> tuple[str, Any, Path]:
    """A mode, ModelOpt's model with random weights in its module, and what its exporter makes of it."""
    import modelopt.torch.speculative as mtsp
    from transformers import Qwen3Config, Qwen3ForCausalLM

    dims = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
            "intermediate_size": 384}  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(**dims | {"num_hidden_layers": 6}, vocab_size=512, hidden_size=128, max_position_embeddings=256)
    ).float()
    head = {"projector_type": "dspark", "markov_rank": 32} | MODES[request.param] if MODES[request.param] else {}
    config = {
        "dflash_block_size": 4, "dflash_num_anchors": 4, "dflash_mask_token_id": 511,
        "dflash_use_torch_compile": False,
        "dflash_architecture_config": dims | {"target_layer_ids": [1, 2, 3]} | head,
    }  # fmt: skip
    mtsp.convert(model, [("dflash", config)])
    for name, weight in model.dflash_module.named_parameters():
        drawn = torch.randn(weight.shape) * (0.2 if "norm" in name else 0.1)
        weight.data = drawn + 1 if "norm" in name else drawn
    folder = tmp_path_factory.mktemp(request.param) / "head"
    model.get_exporter().export(folder, torch.float32)
    return request.param, model.eval(), folder


def test_what_modelopt_exports_is_read_and_every_tensor_has_its_slot(trained):
    mode, _, folder = trained
    reading = read(open_checkpoint(folder))
    assert not reading.problems and reading.layout is not None
    found = {name: info.shape for name, info in reading.checkpoint.tensors.items()}
    assert len(found) == {"dflash": 36, "vanilla": 40}.get(mode, 42)
    assert all(GOLDEN[name] == shape for name, shape in found.items())
    spec, head = reading.spec, mode != "dflash"
    assert (spec.shift, spec.causal, spec.block, spec.mask, spec.captured) == (head, False, 4, 511, (1, 2, 3))
    assert (spec.markov.rank, spec.confidence.present) == ((32, True) if head else (0, False))
    assert reading.head is not None and len(reading.head.places) == len(found)


@torch.no_grad()
def test_its_drafts_are_those_of_modelopts_own_module(trained):
    mode, model, folder = trained
    head = read_head(open_checkpoint(folder))
    shared = {"embed_tokens": model.model.embed_tokens.weight, "lm_head": model.lm_head.weight}
    drafter, places = head.drafter.load(head.spec, read_weights(head) | shared), head.spec.places
    assert places == (3 if mode == "dflash" else 4)
    text, distinct = torch.randint(0, 500, (1, 90)), set()
    for length in (1, 2, 17, 40, 70, 90):
        base, theirs = model.pseudo_speculative_generate(text[:, :length], places)
        whole = torch.cat([text[:, :length], base, theirs], dim=1)
        states = model.model(whole, output_hidden_states=True).hidden_states
        ours = drafter.draft(whole, torch.cat([states[i + 1] for i in head.spec.captured], dim=-1), places)
        assert ours.shape == (places, 1, length, 512)
        assert ours[:, 0, -1].argmax(-1).tolist() == theirs[0].tolist()
        distinct.update(theirs[0].tolist())
    assert len(distinct) > 4
    block = torch.tensor([[base.item(), 511, 511, 511]])
    states = model.model(text, output_hidden_states=True).hidden_states
    captured = torch.cat([states[i + 1] for i in head.spec.captured], dim=-1)
    hidden = model.dflash_module(
        noise_embedding=model.model.embed_tokens(block), target_hidden=captured, position_ids=torch.arange(94)[None],
        attention_mask=None,
    )  # fmt: skip
    logits = model.lm_head(hidden)[0]
    if mode == "dflash":
        logits = logits[1:]
    else:
        previous = torch.cat([base, theirs], dim=1)[:, None, :places]
        logits = logits + model.dflash_module.compute_markov_bias(previous, hidden[:, None])[0, 0]
    torch.testing.assert_close(ours[:, 0, -1], logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", deepspec.KINDS)
def test_its_logits_are_those_that_deepspecs_own_class_computed(kind, tmp_path):
    """With the config and tensor names of that class; see support/deepspec.py."""
    with safe_open(deepspec.RECORD, "pt") as recorded:
        about = json.loads(recorded.metadata()[kind])
        found = {name: recorded.get_tensor(name) for name in recorded.keys()}  # noqa: SIM118
    (tmp_path / "config.json").write_text(json.dumps(about["config"]))
    save_file(deepspec.weights(about["tensors"]), tmp_path / "model.safetensors")
    head = read_head(open_checkpoint(tmp_path))
    assert (head.layout.name, head.spec.markov.rank) == ("dspark-deepspec", about["config"]["markov_rank"])
    drafter = head.drafter.load(head.spec, read_weights(head))
    for length in deepspec.LENGTHS:
        drafted = found[f"{kind}.{length}.tokens"]
        # The first tokens are known by their states alone.
        text = torch.cat([torch.zeros(length, dtype=torch.long), torch.tensor([length]), drafted])[None]
        logits = drafter.draft(text, deepspec.states(text.shape[1])[None], deepspec.BLOCK)[:, 0, -1]
        assert torch.equal(logits.argmax(-1), drafted)
        torch.testing.assert_close(logits, found[f"{kind}.{length}.logits"], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_block_is_drafted_in_the_same_way_whatever_is_drafted_beside_it(trained):
    mode, _, folder = trained
    head = read_head(open_checkpoint(folder))
    weights = read_weights(head) | {"embed_tokens": torch.randn(512, 128), "lm_head": torch.randn(512, 128)}
    spec = replace(head.spec, causal=mode == "dflash")
    drafter = head.drafter.load(spec, weights)
    tokens, captured = torch.randint(0, 500, (2, 80)), torch.randn(2, 80, 3 * 128)
    every = drafter.draft(tokens, captured, 2)
    alone = drafter.draft(tokens[1:, :10], captured[1:, :10], 2)
    torch.testing.assert_close(every[:, 1:, :7], alone, rtol=1e-4, atol=1e-3)
    with pytest.raises(ConfigInvalid, match=f"drafts {spec.places} tokens, not 5"):
        drafter.draft(tokens, captured, 5)


@pytest.mark.parametrize("spec", [DFLASH, DSPARK], ids=["DFlash", "DSpark"])
@torch.no_grad()
def test_a_block_that_drafts_fewer_tokens_has_fewer_slots(spec):
    """As in SGLang and vLLM; see tests/engine/test_block_drafters.py."""
    spec = replace(spec, dtype="F32")
    slots, tokens, captured = random_slots(spec), torch.randint(0, 60, (1, 20)), torch.randn(1, 20, 3 * 48)
    fewer = spec.drafter.load(spec, slots).draft(tokens, captured, 2)
    short = replace(spec, block=2 if spec.shift else 3)
    assert torch.equal(fewer, short.drafter.load(short, slots).draft(tokens, captured, 2))
    whole = spec.drafter.load(spec, slots).draft(tokens, captured, 3)
    assert not torch.allclose(fewer[0, :, :16], whole[0, :, :16])


@torch.no_grad()
def test_a_markov_head_of_zeros_drafts_the_same():
    slots = random_slots(replace(DFLASH, shift=True, dtype="F32"))
    zeros = slots | {"markov_w1": torch.zeros(64, 1), "markov_w2": torch.zeros(64, 1)}
    tokens, captured = torch.randint(0, 60, (1, 20)), torch.randn(1, 20, 3 * 48)
    one, other = (
        spec.drafter.load(spec, weights).draft(tokens, captured, 4)
        for spec, weights in (
            (replace(DFLASH, shift=True, dtype="F32"), slots),
            (replace(DFLASH, shift=True, dtype="F32", markov=Markov(1)), zeros),
        )
    )
    assert torch.equal(one, other)


def test_it_is_measured_with_its_target(tmp_path, tiny_target):
    """Nothing is trained here: what counts is that every part of the measurement runs."""
    spec = replace(DSPARK, hidden=64, target_hidden=64, vocab=512, draft_vocab=512, mask=511, dtype="F32")
    slots = random_slots(spec, without=("embed_tokens", "lm_head"))
    folder = write_head(tmp_path / "head", by_name("dflash-vllm"), spec, slots)
    prompts = tmp_path / "held-out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Tell me about the number {n}."}) + "\n" for n in range(4)))
    asked = ("validate", folder, "--for", "vllm", "--target", tiny_target, "--prompts", prompts, "--new-tokens", 12)
    found = kconv(*asked, fails=True)
    # It is not trained, so it drafts worse than a table of pairs.
    assert {one["rule"] for one in found["findings"] if one["severity"] == "error"} <= {"K204", "K363"}
    assert {"output", "bigram"} <= {row["drafter"] for row in found["figures"]["acceptance"]}
    assert {row["steps"] for row in found["figures"]["acceptance"]} == {4}, "all that its block drafts"
    readings = {tuple(row["facts"]["captured"]) for row in found["figures"]["readings"]}
    assert readings == {(1, 3, 5), (0, 2, 4), (2, 4, 6)}
    refused = CliRunner().invoke(main, [*map(str, asked), "--draft-tokens", "5"])
    assert refused.exit_code == 1 and "a block of 4 slots drafts 4 tokens, not 5" in refused.output
    bench = ("bench", "--head", folder, "--target", tiny_target, "--suite", prompts, "--max-tokens", 12)
    rows = kconv(*bench, "--out", tmp_path / "a.json")["rows"]
    assert rows and all(row["draft_tokens"] == 4 for row in rows)
