"""A target's layers for multi-token prediction (MTP) come through a quantization as they were, wherever they stand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support.mtp_targets import write_with_mtp
from support.quantized_targets import make_form

from kconv.checkpoint.folder import open_checkpoint
from kconv.cli import main
from kconv.errors import RecipeInvalid, TargetInvalid
from kconv.quantize.calibration import data_free
from kconv.quantize.modelopt_backend import plan_in_memory
from kconv.quantize.plan import exclude_modules, plan_quantize
from kconv.quantize.recipe import load_recipe
from kconv.quantize.run import quantize
from kconv.targets.config import parse_target_config
from kconv.targets.mtp import mtp_faults, mtp_root
from kconv.targets.weights import stored_weights

LAYER = "model.layers.7"


@pytest.fixture(scope="module")
def plain(tiny_target, tmp_path_factory) -> Path:
    return write_with_mtp(tiny_target, tmp_path_factory.mktemp("mtp") / "target")


@pytest.fixture(scope="module")
def source(plain, tmp_path_factory):
    made: dict[tuple[str, bool], Path] = {}

    def find(form: str, wrapped: bool = False) -> Path:
        if (form, wrapped) not in made:
            folder = tmp_path_factory.mktemp(form) / "target"
            made[form, wrapped] = make_form(plain, folder, form, wrapped=wrapped)
        return made[form, wrapped]

    return find


def plan_of(folder: Path, recipe: str = "nvfp4"):
    checkpoint = open_checkpoint(folder)
    return plan_quantize(checkpoint, parse_target_config(checkpoint.config), load_recipe(recipe), data_free())


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def renamed(source: Path, folder: Path, root: str, **keys: object) -> Path:
    """Write a target whose MTP layer has another name."""
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    named = {name.replace(f"{LAYER}.", f"{root}."): tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


@pytest.mark.parametrize("form, wrapped", [("bf16", False), ("bf16", True), ("fp8", False), ("int4", False)])
def test_an_mtp_layer_is_stored_unquantized_with_every_tensor_and_excluded_as_a_whole(form, wrapped, source, tmp_path):
    folder, prefix = source(form, wrapped), "language_model." if wrapped else ""
    quantize(plan_of(folder), tmp_path / "out")
    before = stored_weights(one := open_checkpoint(folder), parse_target_config(one.config))
    after = tensors_of(tmp_path / "out")
    names = {name for name in before if name.startswith(f"{prefix}{LAYER}.")}
    assert len(names) > 20 and {n for n in after if n.startswith(f"{prefix}{LAYER}.")} == names
    for name in names:
        assert torch.equal(after[name], before[name].read()), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    side = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    for entries in (config["quantization_config"]["ignore"], side["quantization"]["exclude_modules"]):
        # As ModelOpt writes it for a layer that its model lacks; no other entry is about it.
        assert [entry for entry in entries if "layers.7" in entry] == [f"{prefix}{LAYER}*"]
    assert config.get("text_config", config)["num_nextn_predict_layers"] == 1
    manifest = json.loads((tmp_path / "out" / "kconv.json").read_text())
    assert manifest["spec"]["mtp"] == {f"{prefix}{LAYER}": "unquantized"}


def vllm_excludes(module: str, entries: list[str]) -> bool:
    """As vLLM 0.32 decides for Qwen3-Next's MTP: its mapper of the target drops what starts with `mtp.`."""
    spread = [e for entry in entries for e in ((entry[:-1], f"{entry[:-1]}.*") if entry.endswith("*") else (entry,))]
    return any(entry in module for entry in spread if not entry.startswith("mtp."))


def test_mtp_beside_the_decoder_is_kept_and_excluded_where_vllm_still_sees_it(source, tmp_path):
    """Qwen3-Next's and MiMo's names."""
    next_ = renamed(source("bf16"), tmp_path / "next", "mtp.layers.0", model_type="qwen3_moe")
    plan = plan_of(next_, "nvfp4-mlp")
    assert plan.mtp == ("mtp",) and not any("mtp" in module.name for module in plan.modules)
    entries = exclude_modules(plan.linear, {module.name for module in plan.modules}, plan.mtp)
    assert [entry for entry in entries if "mtp" in entry] == ["mtp*"]
    assert vllm_excludes("mtp.layers.0.self_attn.qkv_proj", entries) and vllm_excludes("mtp.layers.0.mlp", entries)
    mimo = plan_of(renamed(source("bf16"), tmp_path / "mimo", "model.mtp_layers.0", model_type="mimo"))
    assert mimo.mtp == ("model.mtp_layers",) and not any("mtp" in module.name for module in mimo.modules)


def recipe_file(folder: Path, *patterns: str) -> str:
    (folder / "own.yaml").write_text(f"name: own\nquantize: {json.dumps(patterns)}\nkeep: ['*.kv_b_proj']\n")
    return str(folder / "own.yaml")


def test_an_mtp_layer_becomes_nvfp4_only_by_its_own_name(source, tmp_path):
    every = "model.layers.*.mlp.experts.*_proj"
    assert not any(LAYER in m.name for m in plan_of(source("bf16"), recipe_file(tmp_path, every)).modules)
    plan = plan_of(source("bf16"), recipe_file(tmp_path, every, f"{LAYER}.*"))
    mine = {module.name.removeprefix(f"{LAYER}.") for module in plan.modules if module.name.startswith(f"{LAYER}.")}
    assert "mlp.experts.0.up_proj" in mine and "self_attn.o_proj" in mine
    assert mine.isdisjoint({"eh_proj", "shared_head.head", "mlp.gate", "self_attn.kv_b_proj"})
    entries = exclude_modules(plan.linear, {module.name for module in plan.modules}, plan.mtp)
    assert {f"{LAYER}.head", f"{LAYER}.eh_proj"} <= set(entries) and f"{LAYER}*" not in entries


def test_mtp_modules_that_vllm_cannot_tell_apart_are_refused_by_name(source, tmp_path):
    folder = renamed(source("bf16"), tmp_path / "next", "mtp.layers.0", model_type="qwen3_moe")
    with pytest.raises(RecipeInvalid, match="vLLM drops each exclude of a module below mtp"):
        plan_of(folder, recipe_file(tmp_path, "mtp.layers.0.mlp.experts.*_proj"))


def test_a_source_that_lost_what_its_config_promises_is_refused(source, tmp_path):
    folder = renamed(source("bf16"), tmp_path / "lost", "mtp.layers.0")
    with pytest.raises(TargetInvalid, match=r"promises 1 MTP layer, but model.layers.7 is not stored"):
        plan_of(folder)


def test_modelopts_backend_which_would_lose_it_refuses(source):
    checkpoint = open_checkpoint(source("bf16"))
    with pytest.raises(TargetInvalid, match=r"its export would lose model\.layers\.7"):
        plan_in_memory(checkpoint, parse_target_config(checkpoint.config), load_recipe("nvfp4"), None)


@pytest.mark.parametrize(
    "name, root",
    [
        ("model.layers.61.eh_proj.weight", "model.layers.61"),
        ("language_model.model.layers.61.enorm.weight", "language_model.model.layers.61"),
        ("model.layers.60.mlp.gate.weight", ""),
        ("vision_tower.encoder.layers.80.mlp.weight", ""),
        ("mtp.layers.0.mlp.experts.7.up_proj", "mtp"),
        ("mtp.fc.weight", "mtp"),
        ("model.mtp_layers.0.input_proj.weight", "model.mtp_layers"),
        ("model.mtp.layers.0.eh_proj.weight", "model.mtp"),
        ("model.mtp_block.0.mlp.up_proj.weight", "model.mtp_block"),
        ("lm_head.weight", ""),
    ],
)
def test_whose_tensor_it_is(name, root):
    """Names from the loaders of vLLM 0.32: deepseek_mtp, qwen3_next_mtp, mimo_mtp, mimo_v2_mtp, ernie_mtp."""
    assert mtp_root(name, 61) == root


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"])
def test_each_familys_promise_is_read(key):
    assert [*mtp_faults({"num_hidden_layers": 2, key: 1}, ["model.layers.1.x"])] == [
        (f"config.json: {key}", "promises 1 MTP layer, but the files hold none")
    ]
    assert not [*mtp_faults({"num_hidden_layers": 2, key: 0}, ["model.layers.1.x"])]


def run(*words: object) -> str:
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def test_it_is_calibrated_quantized_measured_and_on_the_card(source, tmp_path):
    """The decoder runs as without an MTP layer, so that such a target can be published."""
    folder, out = source("bf16"), tmp_path / "out"
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "Return the sum of two numbers, no more."}) + "\n")
    run("calibrate", folder, tmp_path / "amax.json", "--prompts", tmp_path / "prompts.jsonl")
    run("quantize", folder, out, "--recipe", "nvfp4-mlp", "--input-scale", tmp_path / "amax.json")
    (tmp_path / "held-out.jsonl").write_text(json.dumps({"prompt": "Return the product of two numbers."}) + "\n")
    run("validate", out, "--source", folder, "--prompts", tmp_path / "held-out.jsonl", "--out", tmp_path / "report")
    assert "MTP" in run("inspect", out) and f"{LAYER} (" in run("inspect", out)
    # It lacks a license and a base model, and says so.
    CliRunner().invoke(main, ["card", str(out), "--report", str(tmp_path / "report"), "--out", str(tmp_path / "card")])
    assert f"| MTP (multi-token prediction) | `{LAYER}`: unquantized |" in (tmp_path / "card" / "README.md").read_text()


def test_a_preview_counts_it_apart(source, tmp_path):
    shown = run("quantize", source("bf16"), tmp_path / "out", "--recipe", "nvfp4", "--input-scale", "data-free",
                "--dry-run")  # fmt: skip
    assert any(row.split()[:1] == ["MTP"] for row in shown.splitlines())
