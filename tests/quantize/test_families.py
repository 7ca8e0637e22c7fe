"""Whatever can be quantized with measured scales can be measured, and so published: other families than Kimi-K2's."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from support.families import MODELS, write_target
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from kconv.checkpoint.folder import open_checkpoint
from kconv.cli import main
from kconv.errors import TargetInvalid
from kconv.quantize.calibration import data_free, read_calibration
from kconv.quantize.plan import plan_quantize
from kconv.quantize.recipe import load_recipe
from kconv.targets.config import parse_target_config
from kconv.targets.tokenizer import load_tokenizer
from kconv.validate.report import read_report

# The others are refused by name, see tests/targets/test_families.py.
KINDS = tuple(kind for kind in MODELS if kind not in ("gpt_oss", "qwen3_vl"))
TEXT = "Return the sum of two numbers, and no more. Raise ValueError if one of them is not a number."
HELD_OUT = "Return a list of the names in a folder. Raise OSError if there is no such folder."


@pytest.fixture(scope="module")
def folders(tiny_target, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    for name, text in (("prompts", TEXT), ("held-out", HELD_OUT)):
        (root / f"{name}.jsonl").write_text(json.dumps({"prompt": text}) + "\n")
    return {kind: write_target(root / kind, kind, tiny_target, None) for kind in (*KINDS, "gpt_oss")}


def run(*words: object) -> None:
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_calibrated_quantized_and_measured_as_transformers_runs_it(kind, folders, tmp_path):
    folder, prompts = folders[kind], folders[kind].parent / "prompts.jsonl"
    run("calibrate", folder, tmp_path / "amax.json", "--prompts", prompts)
    run("quantize", folder, tmp_path / "out", "--recipe", "nvfp4", "--input-scale", tmp_path / "amax.json")
    held_out = prompts.with_stem("held-out")
    run("validate", tmp_path / "out", "--source", folder, "--prompts", held_out, "--out", tmp_path / "report")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    seen: dict[str, float] = {}

    def see(name: str):
        return lambda _, inputs: seen.update({name: float(inputs[0].abs().max())})

    for name, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith("_proj"):
            module.register_forward_pre_hook(see(f"model.{name}"))
        elif name.endswith(".experts"):
            module.register_forward_pre_hook(see(f"model.{name}.0.up_proj"))
    tokenizer = load_tokenizer(folder)
    ids = torch.tensor([tokenizer.encode(HELD_OUT)])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1]
        seen.clear()
        model(torch.tensor([tokenizer.encode(TEXT)]))
    found = read_calibration(tmp_path / "amax.json").input_amax
    assert seen and {name: found[name] for name in seen} == pytest.approx(seen, rel=1e-4)
    text = read_report(tmp_path / "report").figures.perplexity
    assert text is not None
    assert text.source == pytest.approx(math.exp(cross_entropy(logits, ids[0, 1:])), rel=1e-4)
    assert text.output != text.source


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "moe" in kind or kind == "qwen3_next"])
def test_its_experts_are_read_one_by_one_where_a_layer_does_not_fit(kind, folders, little_memory, tmp_path):
    folder, prompts = folders[kind], folders[kind].parent / "prompts.jsonl"
    run("calibrate", folder, tmp_path / "whole.json", "--prompts", prompts)
    little_memory(folder)
    run("calibrate", folder, tmp_path / "parted.json", "--prompts", prompts)
    whole, parted = (read_calibration(tmp_path / f"{name}.json").input_amax for name in ("whole", "parted"))
    assert parted == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_modelopts_backend_packs_the_same_weights(kind, folders, tmp_path):
    folder, prompts = folders[kind], folders[kind].parent / "prompts.jsonl"
    run("quantize", folder, tmp_path / "theirs", "--recipe", "nvfp4", "--backend", "modelopt", "--prompts", prompts)
    run("quantize", folder, tmp_path / "ours", "--recipe", "nvfp4", "--input-scale", "data-free")
    ours, theirs = (tensors_of(tmp_path / name) for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        if not name.endswith(".input_scale"):
            assert torch.equal(tensor.view(-1).view(torch.uint8), theirs[name].view(-1).view(torch.uint8)), name


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_experts_in_one_tensor_are_refused_by_name(folders):
    checkpoint = open_checkpoint(folders["gpt_oss"])
    with pytest.raises(TargetInvalid, match=r"mlp\.experts\.\w+ is \[4, .*vLLM skips their scales") as fault:
        plan_quantize(checkpoint, parse_target_config(checkpoint.config), load_recipe("nvfp4"), data_free())
    assert "own MXFP4" in fault.value.fix
