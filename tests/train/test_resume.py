"""Training runs that stopped, and are gone on with."""

import dataclasses
import json
import resource
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from support.listing import names

from kconv.errors import OutputExists, OutputFailed, TrainingFailed
from kconv.train import checkpoints, run
from kconv.train.checkpoints import clear_finished, newest, workplace
from kconv.train.options import TrainOptions
from kconv.train.recipe import TEST_GQA
from kconv.train.run import train

GQA = dataclasses.replace(TEST_GQA, batches=4, steps=12, batch=4, seq=24, warmup=2)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Before the first checkpoint, at one, between two, and behind the last.
STOPS = [4, 6, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 5, 11))]


@pytest.mark.parametrize("step", STOPS)
def test_a_run_that_stopped_ends_with_the_same_weights(make_job, unstopped, tmp_path, step):
    class Stopped(Exception):
        pass

    def stop(done: int, _steps: int, _loss: float) -> None:
        if done == step:
            raise Stopped

    options = TrainOptions(save_every=5, eval_every=6)
    with pytest.raises(Stopped):
        train(make_job(GQA), tmp_path / "head", options, stop)
    assert same(weights(train(make_job(GQA), tmp_path / "head", options)), weights(unstopped))


def test_a_checkpoint_that_was_cut_short_is_not_gone_on_from(make_job, unstopped, tmp_path):
    def stop(done: int, _steps: int, _loss: float) -> None:
        if done == 12:
            raise KeyboardInterrupt

    options = TrainOptions(save_every=5, eval_every=6)
    with pytest.raises(KeyboardInterrupt):
        train(make_job(GQA), tmp_path / "head", options, stop)
    work = tmp_path / ".head.training"
    assert newest(work, 12) == work / "checkpoint-10"
    (work / "checkpoint-10" / "trainer_state.json").write_text('{"epoch": 2')
    assert newest(work, 12) == work / "checkpoint-5"
    assert same(weights(train(make_job(GQA), tmp_path / "head", options)), weights(unstopped))


@pytest.mark.parametrize("part", ["head", "optimizer"])
def test_a_damaged_checkpoint_is_named_without_a_traceback(make_job, tmp_path, part, capfd):
    def stop(done: int, _steps: int, _loss: float) -> None:
        if done == 3:
            raise KeyboardInterrupt

    options = TrainOptions(save_every=2)
    with pytest.raises(KeyboardInterrupt):
        train(make_job(GQA), tmp_path / "head", options, stop)
    folder = tmp_path / ".head.training" / "checkpoint-2" / part
    largest = max(folder.iterdir(), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:100])
    with pytest.raises(TrainingFailed, match="the checkpoint is damaged") as caught:
        train(make_job(GQA), tmp_path / "head", options)
    assert "Traceback" not in str(caught.value) + capfd.readouterr().err and str(caught.value.where) == str(folder)


@pytest.mark.parametrize("save_every", [pytest.param(5, marks=pytest.mark.slow), 10])
def test_a_run_that_stopped_behind_its_last_step_takes_no_further_one(make_job, tmp_path, monkeypatch, save_every):
    # Under a rate that does not end at 0 a further step would show; the last one is within a pass.
    recipe, options = (
        dataclasses.replace(GQA, steps=10, schedule="constant_with_warmup"),
        TrainOptions(save_every=save_every),
    )
    wanted = train(make_job(recipe), tmp_path / "unstopped", options)

    def fail(*_):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run, "leave", fail)
        with pytest.raises(OutputFailed, match="no space left"):
            train(make_job(recipe), tmp_path / "head", options)
    told = []
    out = train(make_job(recipe), tmp_path / "head", options, lambda *step: told.append(step[:2]))
    assert told == [(step, 10) for step in range(10 - save_every + 1, 11)]
    assert same(weights(out), weights(wanted))


def test_a_run_is_gone_on_with_by_as_many_processes(make_job, unstopped, tmp_path, monkeypatch):
    def stop(done: int, *_) -> None:
        if done == 7:
            raise KeyboardInterrupt

    options = TrainOptions(save_every=5, eval_every=6)
    with pytest.raises(KeyboardInterrupt):
        train(make_job(GQA), tmp_path / "head", options, stop)
    with monkeypatch.context() as patch, pytest.raises(OutputExists, match="had WORLD_SIZE 1, not 2"):
        patch.setenv("WORLD_SIZE", "2")
        train(make_job(GQA), tmp_path / "head", options)
    told = []
    out = train(make_job(GQA), tmp_path / "head", options, lambda *step: told.append(step[0]))
    assert told == list(range(6, 13))
    assert same(weights(out), weights(unstopped))


def test_another_runs_checkpoints_are_refused(make_job, tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(make_job(GQA), tmp_path / "head", progress=stop)
    with pytest.raises(OutputExists, match=r"stopped run, but lr is .* in its recipe, 0\.01 now\n"):
        train(make_job(dataclasses.replace(GQA, lr=0.01)), tmp_path / "head")


@pytest.mark.parametrize("part", ["head", "optimizer", "scheduler.pt"])
def test_a_disk_that_fills_at_a_checkpoint_is_named_and_the_run_is_gone_on_with(
    make_job, unstopped, tmp_path, monkeypatch, part
):
    """A limit on a file's size stands for the disk: the system refuses the write in the same way.

    It is set just before a part of the second checkpoint is written. torch's own writer, of the last part, raises no
    OSError.
    """
    before, work = resource.getrlimit(resource.RLIMIT_FSIZE), tmp_path / ".head.training"
    saves = {"head": "_save", "optimizer": "_save", "scheduler.pt": "torch.save"}
    save = checkpoints.torch.save if part == "scheduler.pt" else checkpoints._save
    reached = []

    def fill(state: object, file: Path | str, *more: object) -> None:
        if Path(file) == work / "checkpoint-10" / part:
            reached.append(part)
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
        save(state, file, *more)

    options = TrainOptions(save_every=5, eval_every=6)
    try:
        with monkeypatch.context() as patch, pytest.raises(OutputFailed, match="could not be written") as caught:
            patch.setattr(sys, "dont_write_bytecode", True)
            patch.setattr(f"kconv.train.checkpoints.{saves[part]}", fill)
            train(make_job(GQA), tmp_path / "head", options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert reached == [part] and "Free some space" in caught.value.fix
    assert newest(work, 12) == work / "checkpoint-5"
    assert same(weights(train(make_job(GQA), tmp_path / "head", options)), weights(unstopped))
    assert names(tmp_path) == ["head"]


def test_two_runs_of_one_output_a_long_name_and_a_kill_behind_the_rename(make_job, unstopped, tmp_path, monkeypatch):
    out, refused = tmp_path / ("n" * 255), []

    def begin_another(step: int, *_: object) -> None:
        if step == 2:
            with pytest.raises(OutputExists, match="another run is training") as caught:
                train(make_job(GQA), out)
            refused.append(caught.value)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    options = TrainOptions(save_every=5, eval_every=6)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        # It is called for the export first, which is not there yet, and behind the rename.
        patch.setattr(
            run, "shutil", SimpleNamespace(move=shutil.move, rmtree=lambda path, **_: path.exists() and die())
        )
        train(make_job(GQA), out, options, begin_another)
    assert len(refused) == 1 and same(weights(out), weights(unstopped))
    assert names(tmp_path) == sorted([out.name, workplace(out).name])
    with pytest.raises(OutputExists, match="already exists"):
        train(make_job(GQA), out, options)
    assert names(tmp_path) == [out.name]


def test_checkpoints_beside_an_output_of_another_run_stay(tmp_path):
    out = tmp_path / "head"
    for file, key in ((workplace(out) / "run.json", "a"), (out / "modelopt" / "training.json", "b")):
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"key": key}))
    clear_finished(out)
    assert workplace(out).exists()
    (out / "modelopt" / "training.json").write_text("[]")
    clear_finished(out)
    assert workplace(out).exists()


def test_where_checkpoints_cannot_stand_is_named(make_job, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputFailed, match="could not be written"):
        train(make_job(GQA), tmp_path / "file" / "head")
