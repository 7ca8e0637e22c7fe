"""Both roads to one format: ModelOpt's exporter, and kconv's streaming with its own calibration, bit for bit."""

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from support.validated import validate

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import verify
from kconv.checkpoint.source import Folder
from kconv.cli import main
from kconv.errors import RecipeInvalid, TensorMissing
from kconv.quantize.calibration import CalibrationPrompts
from kconv.quantize.modelopt_backend import plan_in_memory, quantize_in_memory
from kconv.quantize.recipe import load_recipe, parse_recipe
from kconv.targets.config import parse_target_config

TEXTS = ("Return the sum of two numbers, of whatever type.", "A list of names and their places.", "def f(x): return x")
PROMPTS = CalibrationPrompts(sha256="0" * 64, count=4, tokens=160, digests=("0" * 16,))


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 200, (1, 40), generator=generator) for _ in range(4)]


def plan_of(folder, recipe):
    source = open_checkpoint(folder)
    return plan_in_memory(source, parse_target_config(source.config), recipe, PROMPTS)


def tensors_of(folder):
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def bits(tensor):
    return tensor.reshape(-1).contiguous().view(torch.uint8)


@pytest.fixture
def kconv(tmp_path):
    """Return a function that runs the command; the calibration's prompts are prompts.jsonl of its folder."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))

    def run(*words, code=0):
        done = CliRunner().invoke(main, [str(word) for word in words])
        assert done.exit_code == code, done.output
        return done

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "form, recipe", [("bf16", "nvfp4"), ("int4", "nvfp4-mlp"), ("fp8", "nvfp4-experts"), ("llama", "nvfp4")]
)
def test_both_roads_make_the_same_bits(form, recipe, forms, kconv, tmp_path):
    source, prompts, calibration = forms(form), tmp_path / "prompts.jsonl", tmp_path / "calibration.json"
    words = (
        "quantize",
        source,
        tmp_path / "modelopt",
        "--recipe",
        recipe,
        "--backend",
        "modelopt",
        "--prompts",
        prompts,
    )
    printed = json.loads(kconv(*words, "--json").stdout)
    kconv("calibrate", source, calibration, "--prompts", prompts)
    words = ("quantize", source, tmp_path / "streamed", "--recipe", recipe, "--input-scale", calibration)
    kconv(*words, "--jobs", 1)
    theirs, ours = tensors_of(tmp_path / "modelopt"), tensors_of(tmp_path / "streamed")
    assert theirs.keys() == ours.keys()
    unequal = [name for name in theirs if not torch.equal(bits(theirs[name]), bits(ours[name]))]
    packed = [name for name in ours if name.endswith(("weight_scale", "weight_scale_2", "input_scale"))]
    assert len(packed) > (100 if form == "llama" else 200)
    assert unequal == []
    configs = [(tmp_path / road / "config.json").read_text() for road in ("modelopt", "streamed")]
    assert configs[0] == configs[1]
    made = verify(tmp_path / "modelopt", open_checkpoint(source))
    assert made.spec["input_scale"].startswith("calibrated by ModelOpt on 3 prompts")
    assert {file.name for file in (tmp_path / "modelopt").iterdir()} == {f.name for f in made.files} | {"kconv.json"}
    assert (printed["modules"], printed["files"]) == (made.spec["quantized_modules"], 1)
    assert [f.rule for f in validate(Folder(tmp_path / "modelopt")).findings] == []


@pytest.mark.slow
def test_weights_alone_need_no_prompts_and_are_the_streamed_ones(forms, quantized, kconv, tmp_path):
    kconv("quantize", forms("bf16"), tmp_path / "out", "--recipe", "nvfp4-weight-only", "--backend", "modelopt")
    theirs, ours = tensors_of(tmp_path / "out"), tensors_of(quantized("bf16", "nvfp4-weight-only"))
    assert theirs.keys() == ours.keys()
    assert [name for name in theirs if not torch.equal(bits(theirs[name]), bits(ours[name]))] == []


CUTS = {
    "experts by their numbers": (["*.mlp.experts.?.*_proj"], RecipeInvalid, "experts of a layer as one"),
    "experts by their numbers, beside attention": (
        ["*.mlp.experts.?.*_proj", "*.self_attn.o_proj"],
        TensorMissing,
        "differ in",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("patterns, fault, phrase", CUTS.values(), ids=CUTS)
def test_a_recipe_that_names_the_fused_experts_one_by_one_is_told_so(patterns, fault, phrase, forms, tmp_path):
    recipe = parse_recipe(f"name: cut\nquantize: {patterns}\n")
    with pytest.raises(fault, match=phrase):
        quantize_in_memory(plan_of(forms("bf16"), recipe), tmp_path / "out", batches())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_without_batches_the_missing_input_scales_are_named(forms, tmp_path):
    with pytest.raises(TensorMissing, match="input_scale"):
        quantize_in_memory(plan_of(forms("bf16"), load_recipe("nvfp4-experts")), tmp_path / "out", [])
    assert list(tmp_path.iterdir()) == []


def test_a_wrapped_target_is_refused(forms, kconv, tmp_path):
    words = ("quantize", forms("bf16", wrapped=True), tmp_path / "out", "--recipe", "nvfp4", "--backend", "modelopt")
    assert "only a bare text model" in kconv(*words, "--prompts", tmp_path / "prompts.jsonl", code=1).output
    assert not (tmp_path / "out").exists()


def test_a_search_for_block_scales_is_refused(forms, kconv, tmp_path):
    words = ("quantize", forms("bf16"), tmp_path / "out", "--recipe", "nvfp4-experts-mse", "--backend", "modelopt")
    assert "on a GPU only" in kconv(*words, "--prompts", tmp_path / "prompts.jsonl", code=1).output
    assert not (tmp_path / "out").exists()


def test_the_plan_is_shown_before_the_target_is_loaded(forms, kconv, tmp_path):
    words = ("quantize", forms("int4"), tmp_path / "out", "--recipe", "nvfp4-experts", "--backend", "modelopt")
    shown = json.loads(kconv(*words, "--prompts", tmp_path / "prompts.jsonl", "--dry-run", "--json").stdout)
    assert shown["modules"] == 6 * 4 * 3 and shown["files"] is None and shown["estimate"] is None
    assert shown["input_scale"].startswith("calibrated by ModelOpt on 3 prompts")
    assert not (tmp_path / "out").exists()


def test_prompts_are_read_before_the_weights_are_fetched(forms, kconv, tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr(Folder, "open_weights", fetched.append)
    words = ("quantize", forms("int4"), tmp_path / "out", "--recipe", "nvfp4", "--backend", "modelopt")
    assert "no.jsonl" in kconv(*words, "--prompts", tmp_path / "no.jsonl", code=1).output
    assert fetched == []


USAGE = {
    "modelopt without prompts": (["nvfp4", "--backend", "modelopt"], "--prompts is required. Pass a JSONL file"),
    "modelopt with an input scale": (
        ["nvfp4", "--backend", "modelopt", "--prompts", "p", "--input-scale", "data-free"],
        "--input-scale: only with --backend stream",
    ),
    "modelopt with jobs": (
        ["nvfp4", "--backend", "modelopt", "--prompts", "p", "--jobs", "2"],
        "--jobs: only with --backend",
    ),
    "streaming with prompts": (["nvfp4", "--prompts", "p"], "--prompts: only with --backend modelopt"),
    "streaming with a chat template": (
        ["nvfp4", "--input-scale", "data-free", "--chat"],
        "--chat: only with --backend",
    ),
    "streaming without input scales": (["nvfp4"], "Pass a file of kconv calibrate, or data-free"),
    "weights alone with prompts": (
        ["nvfp4-weight-only", "--backend", "modelopt", "--prompts", "p"],
        "--prompts has no effect",
    ),
}


@pytest.mark.parametrize("words, phrase", USAGE.values(), ids=USAGE)
def test_options_that_do_not_go_together_are_named(words, phrase, forms, kconv, tmp_path):
    done = kconv("quantize", forms("bf16"), tmp_path / "out", "--recipe", *words, code=2)
    assert phrase in " ".join(done.output.split())


def test_modelopt_does_not_share_its_work(forms, kconv, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = (
        "quantize",
        forms("bf16"),
        tmp_path / "out",
        "--recipe",
        "nvfp4",
        "--backend",
        "modelopt",
        "--prompts",
        "p",
    )
    assert "--backend modelopt runs in one process" in kconv(*words, code=2).output
