"""DFlash and DSpark drafters: published forms read, and written for each engine with every bit kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from support.block_drafters import FORMS, OWN, Form
from support.published import OTHERS

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import Hints, read_manifest
from kconv.convert.read import Head, read, read_head, read_weights
from kconv.drafters.dflash import Markov, guessed
from kconv.drafters.registry import drafters

READ = {name: form for name, form in FORMS.items() if form.layout}
ENGINES = ("vllm", "sglang", "trtllm", "portable", "speculators")


def kconv(*words: object, fails: bool = False) -> dict[str, Any]:
    """Return the JSON that a command prints."""
    from kconv.cli import main

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
    from kconv.cli import main

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
        assert not drafters()[0].marks(checkpoint.config, checkpoint.tensors)


@pytest.mark.parametrize(("depth", "layers", "ids"), [(36, 5, (1, 9, 17, 25, 33)), (6, 3, (1, 2, 3)), (28, 1, (14,))])
def test_the_guess_is_that_of_z_labs_code(depth, layers, ids):
    assert guessed(depth, layers) == ids


def test_it_is_not_measured_yet(tmp_path):
    from kconv.errors import LayoutCannot

    head = read_head(open_checkpoint(FORMS["z-lab, Qwen3"].write(tmp_path / "form")))
    with pytest.raises(LayoutCannot, match="does not draft with a DFlash drafter yet"):
        head.drafter.load(head.spec, read_weights(head))


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


@pytest.mark.parametrize("mode", MODES)
def test_what_modelopt_exports_is_read_and_every_tensor_has_its_slot(mode, tmp_path):
    import modelopt.torch.speculative as mtsp
    from transformers import Qwen3Config, Qwen3ForCausalLM

    dims = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
            "intermediate_size": 384}  # fmt: skip
    model = Qwen3ForCausalLM(Qwen3Config(**dims | {"num_hidden_layers": 6}, vocab_size=512, hidden_size=128,
                                         max_position_embeddings=256, torch_dtype="float32"))  # fmt: skip
    head = {"projector_type": "dspark", "markov_rank": 32} | MODES[mode] if MODES[mode] else {}
    mtsp.convert(model, [("dflash", {
        "dflash_block_size": 4, "dflash_num_anchors": 4, "dflash_mask_token_id": 511,
        "dflash_use_torch_compile": False,
        "dflash_architecture_config": dims | {"target_layer_ids": [1, 2, 3]} | head,
    })])  # fmt: skip
    model.get_exporter().export(tmp_path / "head", torch.float32)
    reading = read(open_checkpoint(tmp_path / "head"))
    assert not reading.problems and reading.layout is not None
    found = {name: info.shape for name, info in reading.checkpoint.tensors.items()}
    assert len(found) == {"dflash": 36, "vanilla": 40}.get(mode, 42)
    assert all(GOLDEN[name] == shape for name, shape in found.items())
    spec = reading.spec
    assert (spec.shift, spec.causal, spec.block, spec.mask, spec.captured) == (bool(head), False, 4, 511, (1, 2, 3))
    assert (spec.markov.rank, spec.confidence.present) == ((32, True) if head else (0, False))
    assert reading.head is not None and len(reading.head.places) == len(found)
