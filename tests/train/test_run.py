"""Training runs as a whole: what comes out of them, from another head, refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from support.families import write_target

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import ConversionRecord, Hints, verify
from kconv.cli import main
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.drafters.spec import Yarn
from kconv.engines import by_name
from kconv.errors import LayoutCannot, RecipeInvalid, TrainingFailed
from kconv.targets.config import read_target_config
from kconv.train.checkpoints import newest
from kconv.train.options import TrainOptions
from kconv.train.recipe import TEST_GQA, TEST_MLA
from kconv.train.run import train

FEW = {"batches": 4, "steps": 12, "batch": 4, "seq": 24, "warmup": 2}
GQA = dataclasses.replace(TEST_GQA, **FEW)
MLA = dataclasses.replace(TEST_MLA, **FEW)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


REDUCED_GQA, REDUCED_MLA = (dataclasses.replace(recipe, draft_vocab=96) for recipe in (GQA, MLA))


BF16_MLA = dataclasses.replace(MLA, compute="BF16")


# TensorRT-LLM runs no MLA head of a reduced vocabulary, and none in float32.
@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        pytest.param(GQA, "trtllm", id="gqa"),
        pytest.param(BF16_MLA, "trtllm", id="mla in bfloat16", marks=pytest.mark.slow),
        pytest.param(MLA, "vllm", id="mla", marks=pytest.mark.slow),
        pytest.param(REDUCED_GQA, "trtllm", id="reduced gqa", marks=pytest.mark.slow),
        pytest.param(REDUCED_MLA, "vllm", id="reduced mla"),
    ],
)
def test_what_comes_out_is_the_recipes_head_and_proven(make_job, tiny_target, tmp_path, recipe, layout):
    out = train(make_job(recipe), tmp_path / "head")
    head = read_head(open_checkpoint(out))
    assert head.layout.name == layout
    assert head.spec == recipe.spec(read_target_config(tiny_target))
    training = verify(out).training
    assert training is not None
    assert training["recipe"]["steps"] == recipe.steps
    assert training["trained"]["loss"] < training["untrained"]["loss"]
    assert {path.name for path in tmp_path.iterdir()} == {"head"}


# ModelOpt makes a head's config of its target's class, and theirs know nothing of MLA.
@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_an_mla_head_is_trained_for_a_target_of_another_family(make_job, tiny_target, tmp_path, kind):
    target = write_target(tmp_path / "target", kind, tiny_target, None)
    out = train(make_job(MLA, target), tmp_path / "head")
    head = read_head(open_checkpoint(out))
    assert head.spec == MLA.spec(read_target_config(target))
    report = json.loads((out / "modelopt" / "training.json").read_text())
    assert report["trained"]["loss"] < report["untrained"]["loss"]


def test_the_prompts_digests_stand_in_the_manifest_alone(make_job, tmp_path):
    data = {"name": "texts", "prompts": ["a" * 16]}
    out = train(make_job(dataclasses.replace(GQA, steps=2), data=data), tmp_path / "head")
    assert json.loads((out / "kconv.json").read_text())["training"]["data"] == data
    assert json.loads((out / "modelopt" / "training.json").read_text())["data"] == {"name": "texts"}


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_last_good_checkpoint(make_job, tmp_path):
    recipe = dataclasses.replace(GQA, lr=1e30, optimizer="adamw")
    with pytest.raises(TrainingFailed, match=r"loss is \w+ at step|hold NaN or Inf after step"):
        train(make_job(recipe), tmp_path / "head", TrainOptions(save_every=1))
    assert not (tmp_path / "head").exists()
    kept = newest(tmp_path / ".head.training", recipe.steps)
    assert kept is not None
    tensors = [tensor for part in (kept / "head").glob("*.safetensors") for tensor in load_file(part).values()]
    assert tensors and all(torch.isfinite(tensor).all() for tensor in tensors)


def test_products_in_bf16_move_weights_that_bf16_would_not(make_job, tmp_path):
    recipe = dataclasses.replace(GQA, compute="BF16", optimizer="adamw", lr=1e-4, rest_lr=1e-4)
    out = train(make_job(recipe), tmp_path / "head")
    assert read_head(open_checkpoint(out)).spec.dtype == "BF16"
    gain = load_file(out / "modelopt" / "eagle_module.safetensors")["norm.weight"]
    assert gain.dtype == torch.float32
    assert (gain != 1).all()
    assert (gain.bfloat16() == 1).any()


@pytest.mark.parametrize("layout", ["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
def test_training_goes_on_from_a_head_of_any_layout(make_job, unstopped, tmp_path, layout):
    execute(plan(read_head(open_checkpoint(unstopped)), by_name(layout)), tmp_path / "start")
    start = read_head(open_checkpoint(tmp_path / "start"))
    out = train(make_job(dataclasses.replace(GQA, steps=4, lr=1e-3), init_from=start), tmp_path / "head")
    ended, began = (json.loads((folder / "kconv.json").read_text())["training"] for folder in (out, unstopped))
    assert began["trained"]["loss"] == pytest.approx(ended["untrained"]["loss"], rel=1e-5)
    assert ended["started_from"].endswith("start")


def test_what_a_head_was_calibrated_on_is_told_on_when_it_is_trained(make_job, unstopped, tmp_path):
    record = ConversionRecord(
        method="GQA to MLA, approximate", calibration="texts", calibration_sha256="0" * 64, sequences=8, context=16,
        rows=99, heal_steps=0, held_out={"kept": 0.98}, prompts=("a", "b"),
    )  # fmt: skip
    planned = plan(read_head(open_checkpoint(unstopped)), by_name("vllm"))
    execute(dataclasses.replace(planned, conversion=record), tmp_path / "start")
    start = read_head(open_checkpoint(tmp_path / "start"))
    out = train(make_job(dataclasses.replace(GQA, steps=2), init_from=start), tmp_path / "head")
    assert verify(out).conversion == record
    assert verify(unstopped).conversion is None


def test_rows_that_the_processes_cannot_share_are_refused(make_job, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(RecipeInvalid, match="3 processes"):
        train(make_job(GQA), tmp_path / "head")


def test_a_step_of_several_batches_is_told_once_and_with_its_whole_loss(make_job, tmp_path):
    told = []
    recipe = dataclasses.replace(GQA, steps=4, accumulate=2, warmup=0)
    out = train(make_job(recipe), tmp_path / "head", progress=lambda *step: told.append(step))
    assert [step[:2] for step in told] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    began = json.loads((out / "modelopt" / "training.json").read_text())["untrained"]["loss"]
    assert told[0][2] == pytest.approx(began, rel=0.1)


def test_a_head_that_no_engine_could_load_is_refused_before_it_is_trained(make_job, tmp_path):
    assert isinstance(MLA.rope.scaling, Yarn)
    rope = dataclasses.replace(MLA.rope, scaling=dataclasses.replace(MLA.rope.scaling, mscale=None))
    with pytest.raises(LayoutCannot, match="mscale"):
        train(make_job(dataclasses.replace(MLA, rope=rope)), tmp_path / "head")
    assert not list(tmp_path.iterdir())


def test_a_head_is_not_copied_in_silence_where_it_was_to_be_spread(make_job, tmp_path):
    with pytest.raises(RecipeInvalid, match="GPUs"):
        train(make_job(GQA), tmp_path / "head", TrainOptions(shard=True))
    assert not list(tmp_path.iterdir())


def test_modelopts_raw_export_and_the_repaired_head_are_the_same_head(unstopped):
    raw = load_file(unstopped / "modelopt" / "eagle_module.safetensors")
    repaired = weights(unstopped)
    assert all(torch.equal(tensor, repaired[name]) for name, tensor in raw.items() if name in repaired)
    assert read_head(open_checkpoint(unstopped), hints=Hints()).layout.name == "trtllm"


TRAINING = {
    "captured": lambda training: training["recipe"].update(captured=[9, 9, 9]),
    "width": lambda training: training["recipe"].update(intermediate=1),
    "steps": lambda training: training["recipe"].update(steps=1),
    "no recipe": lambda training: training.pop("recipe"),
    "parameters": lambda training: training.update(parameters=5),
    "tokens": lambda training: training.update(tokens={"text": 10**12}),
    "data": lambda training: training.update(data="all of the web"),
    "figures": lambda training: training.update(trained={"al": 4.0}),
    "a key of its own": lambda training: training.update(reviewed_by="nobody"),
}


@pytest.mark.parametrize("change", TRAINING.values(), ids=TRAINING)
def test_what_a_manifest_says_of_a_training_is_held_against_the_head_and_the_trainers_record(
    unstopped, tmp_path, change
):
    """The attack's own case: of all that a manifest says, `training` was held against nothing."""
    head = shutil.copytree(unstopped, tmp_path / "head")
    assert CliRunner().invoke(main, ["verify", str(head)]).exit_code == 0
    said = json.loads((head / "kconv.json").read_text())
    change(said["training"])
    (head / "kconv.json").write_text(json.dumps(said))
    found = CliRunner().invoke(main, ["verify", str(head)])
    assert found.exit_code == 1 and "match its manifest" in found.output, found.output
