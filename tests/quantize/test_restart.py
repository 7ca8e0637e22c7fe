"""Interrupted, shared and restarted work: the same bytes as of one quiet run."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import verify
from kconv.checkpoint.staging import keep_staging
from kconv.errors import NotACheckpoint, OutputExists, WorkerFailed
from kconv.quantize import run
from kconv.quantize.run import World, quantize, read_world
from kconv.quantize.stream import Workplace

SHARD = 100_000
WORK = Path(__file__).parent.parent / "support" / "quantize_once.py"


def digests(folder):
    files = json.loads((folder / "kconv.json").read_text())["files"]
    return {file["name"]: file["sha256"] for file in files}


@pytest.fixture(scope="module")
def quiet(forms, plan, tmp_path_factory):
    """Return what one run makes, uninterrupted."""
    out = tmp_path_factory.mktemp("quiet") / "out"
    quantize(plan(forms("int4"), shard=SHARD), out)
    assert len(list(out.glob("*.safetensors"))) > 8
    return out


def start(source, out, *, jobs=1, slow=0.0, **environment):
    command = [sys.executable, str(WORK), str(source), str(out), str(SHARD), str(jobs), str(slow)]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    # A run in the background of a shell ignores the signal of Ctrl-C, and what it starts does so too.
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=heard)


def test_several_processes_make_the_same_bytes(forms, plan, quiet, tmp_path):
    counted = []
    quantize(plan(forms("int4"), shard=SHARD), tmp_path / "out", jobs=2, advance=counted.append)
    assert digests(tmp_path / "out") == digests(quiet)
    assert sum(counted) == plan(forms("int4"), shard=SHARD).bytes_in


def test_two_ranks_make_the_same_bytes(forms, quiet, tmp_path):
    ranks = [start(forms("int4"), tmp_path / "out", RANK=str(rank), WORLD_SIZE="2") for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0], [rank.stderr and rank.stderr.read() for rank in ranks]
    assert digests(tmp_path / "out") == digests(quiet)
    assert [left.name for left in tmp_path.iterdir()] == ["out"]


def test_a_rank_that_comes_late_finds_the_work_done(forms, plan, quiet):
    assert quantize(plan(forms("int4"), shard=SHARD), quiet, world=World(1, 2))
    with pytest.raises(OutputExists):
        quantize(plan(forms("int4"), shard=SHARD), quiet, world=World(0, 2))


def test_a_rank_that_fails_tells_the_one_that_waits(forms, plan, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "GRACE", 0)
    decided = plan(forms("int4"), shard=SHARD)
    out = tmp_path / "out"
    quantize(decided, out, world=World(1, 3))
    place = next(tmp_path.glob(".kconv-partial-*"))
    Workplace(place).failure(2).write_text("the disk is gone")
    with pytest.raises(WorkerFailed, match="rank 2 failed: the disk is gone"):
        quantize(decided, out, world=World(0, 3))
    assert not out.exists()


def test_the_fault_of_an_earlier_run_is_none_of_this_one(forms, plan, quiet, tmp_path, monkeypatch):
    """The other rank starts later, and takes back then what it said."""
    decided, out, waits = plan(forms("int4"), shard=SHARD), tmp_path / "out", []
    place = Workplace(keep_staging(out, decided.key))
    place.failure(1).write_text("the disk was full")

    def other_rank(_):
        waits.append(place.failure(1).exists())
        quantize(decided, out, world=World(1, 2))

    monkeypatch.setattr(run.time, "sleep", other_rank)
    quantize(decided, out, world=World(0, 2))
    assert waits == [True]
    assert digests(out) == digests(quiet)


def test_a_restart_makes_only_what_is_missing(forms, plan, quiet, tmp_path):
    decided = plan(forms("int4"), shard=SHARD)
    out = tmp_path / "out"
    quantize(decided, out, world=World(1, 2))
    files = next(tmp_path.glob(".kconv-partial-*/.kconv-partial-files"))
    before = {file.name: file.stat().st_mtime_ns for file in files.iterdir()}
    # A file of another size than its record says was cut by something, and is made again.
    spoiled = sorted(files.iterdir())[0]
    spoiled.write_bytes(spoiled.read_bytes()[:-1])
    before.pop(spoiled.name)
    said = []
    quantize(decided, out, say=said.append)
    assert any("files are already there" in text for text in said)
    assert {name: (out / name).stat().st_mtime_ns for name in before} == before
    assert digests(out) == digests(quiet)


def test_another_recipe_does_not_go_on_with_this_ones_work(forms, plan, tmp_path):
    out = tmp_path / "out"
    quantize(plan(forms("int4"), "nvfp4-experts", shard=SHARD), out, world=World(1, 2))
    quantize(plan(forms("int4"), "nvfp4-mlp", shard=SHARD), out)
    verify(out, open_checkpoint(forms("int4")))


def made_in(folder):
    return len(list(folder.glob(".kconv-partial-*/*.json")))


def started_by(work):
    return len(Path(f"/proc/{work.pid}/task/{work.pid}/children").read_text().split())


@pytest.mark.parametrize("when", ["they start", "they work"])
def test_ctrl_c_prints_no_workers_tracebacks(forms, tmp_path, when):
    """At commit b7451f2 the workers that were importing printed theirs."""
    work = start(forms("int4"), tmp_path / "out", jobs=2, slow=1.5)
    # Beside the workers there is what multiprocessing keeps its resources with.
    while work.poll() is None and (started_by(work) < 3 if when == "they start" else made_in(tmp_path) < 1):
        time.sleep(0.01)
    time.sleep(0.4 if when == "they start" else 0)
    # A terminal sends it to the workers too.
    os.killpg(work.pid, signal.SIGINT)
    said = work.communicate(timeout=60)[1].decode()
    assert work.returncode and said.count("Traceback") <= 1 and "Process Spawn" not in said, said
    assert not (tmp_path / "out").exists()


def test_ctrl_c_ends_no_wait_that_holds_the_futures(forms, plan, tmp_path, monkeypatch):
    """Such a future stayed locked, and the process never ended."""
    wait, whole = run.wait, []

    def interrupted(*args, **options):
        signal.raise_signal(signal.SIGINT)
        whole.append(wait(*args, **options))
        return whole[-1]

    monkeypatch.setattr(run, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize(plan(forms("int4"), shard=SHARD), tmp_path / "out", jobs=2)
    assert len(whole) == 1 and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_killed_at_random_and_restarted_it_makes_the_same_bytes(forms, quiet, tmp_path):
    moments = random.Random(0)
    source = shutil.copytree(forms("int4"), tmp_path / "source")
    out = tmp_path / "out"
    killed = 0
    for turn in range(40):
        # Each file takes its time, so that kills fall into every phase of making one, and into several of a dozen.
        work = start(source, out, jobs=1 + turn % 2, slow=0.4)
        wanted = made_in(tmp_path) + moments.randint(1, 2)
        while work.poll() is None and made_in(tmp_path) < wanted:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.2))
        if work.poll() is not None:
            break
        work.send_signal(signal.SIGKILL)
        work.wait()
        killed += 1
        if out.exists():  # the kill came after the rename
            break
        for left in tmp_path.glob(".kconv-partial-*"):
            for folder in (left, *(path for path in left.iterdir() if path.is_dir())):
                with pytest.raises(NotACheckpoint):
                    open_checkpoint(folder)
    assert out.exists() and killed >= 3
    time.sleep(0.5)  # workers of a killed process see that it is gone
    verify(out, open_checkpoint(source))
    assert {n: d for n, d in digests(out).items() if n.endswith(".safetensors")} == {
        n: d for n, d in digests(quiet).items() if n.endswith(".safetensors")
    }


def test_the_environment_says_which_rank_this_is():
    assert read_world({}) == World(0, 1)
    assert read_world({"RANK": "3", "WORLD_SIZE": "4"}) == World(3, 4)
    for wrong in ({"RANK": "1"}, {"RANK": "4", "WORLD_SIZE": "4"}, {"RANK": "x", "WORLD_SIZE": "2"}):
        with pytest.raises(WorkerFailed, match="the environment has"):
            read_world(wrong)
