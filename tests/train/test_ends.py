"""What training from stored states reads: the target's two ends, and the rows of its own batches."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hub_routes import Reply

from kconv.checkpoint.source import Folder, resolve
from kconv.errors import HubUnreachable, StatesInvalid, TargetTooLarge
from kconv.targets.config import read_target_config
from kconv.targets.model import find_ends, load_ends
from kconv.targets.states import read_record, sample_target
from kconv.targets.tokenizer import load_tokenizer
from kconv.train.feed import Offline
from kconv.train.job import check_target, job_parts, offline_job, prepare_job
from kconv.train.options import TrainOptions
from kconv.train.run import train

from .test_offline import VALUES, store

EXTRA, SMALL = 64 << 20, 256 << 10
COUNT = Path(__file__).parent.parent / "support" / "count_reads.py"


@pytest.fixture(scope="module")
def sharded(tiny_target, tmp_path_factory) -> Path:
    """Return the tiny target in two shards, the second of 64 MiB that training has no use for."""
    folder = tmp_path_factory.mktemp("sharded") / "target"
    shutil.copytree(tiny_target, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {
        "model-00001-of-00003.safetensors": {n: w for n, w in weights.items() if not n.startswith("lm_head")},
        "model-00002-of-00003.safetensors": {n: w for n, w in weights.items() if n.startswith("lm_head")},
        "model-00003-of-00003.safetensors": {"vision_tower.pad": torch.zeros(EXTRA, dtype=torch.uint8)},
    }
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    index = {"weight_map": {tensor: name for name, tensors in shards.items() for tensor in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def states(tiny_target, tmp_path_factory) -> Path:
    return store(tiny_target, tmp_path_factory.mktemp("states"), 60)


def bytes_read() -> int:
    """Return what this process has asked the kernel to read, whatever the page cache held."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def job_of(target: Path, states: Path):
    config, tokenizer = read_target_config(target), load_tokenizer(target)
    return offline_job(target, config, tokenizer, VALUES, states, None)


def test_of_a_folder_only_the_ends_are_read(sharded, states, tmp_path):
    # Once before, for what libraries read when they are first used.
    train(job_of(sharded, states), tmp_path / "first")
    before = bytes_read()
    train(job_of(sharded, states), tmp_path / "head")
    assert bytes_read() - before < EXTRA // 2


def test_before_the_first_step_no_states_are_read(tiny_target, states, monkeypatch):
    def refuse(*_):
        raise AssertionError("states were read")

    monkeypatch.setattr("kconv.targets.states.StoredStates.read_span", refuse)
    job = job_of(tiny_target, states)
    assert job.text.mask.any()
    job_parts(job)


def test_a_batch_reads_its_own_rows(tiny_target, states):
    job = job_of(tiny_target, states)
    feed = job.states()[0]
    assert isinstance(feed, Offline)
    rows = torch.tensor([0, 1])
    feed.read(rows, job.text.ids[rows])
    before = bytes_read()
    captured, hidden = feed.read(rows, job.text.ids[rows])
    read = bytes_read() - before
    given = sum(part.numel() * part.element_size() for part in (captured, hidden))
    # The kernel's counters themselves are read too.
    assert read <= given + 4096


@pytest.mark.slow
def test_each_of_two_processes_reads_the_ends_and_its_own_rows(sharded, tiny_target, tmp_path):
    states = store(tiny_target, tmp_path, 600, seq=96)
    (tmp_path / "values.json").write_text(json.dumps(VALUES | {"seq": 96, "batches": 24, "steps": 24}))
    words = [COUNT, sharded, states, tmp_path / "values.json", tmp_path]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", *words]
    subprocess.run(
        list(map(str, command)), check=True, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    )
    ends = sum(info.size for info in find_ends(Folder(sharded)).tensors.values())
    rows = read_record(states).rows
    assert rows is not None
    # Four layers' states of 64 numbers in float32; two of a batch's four rows are a process's.
    own = 2 * 96 * 4 * 64 * 4
    stored = sum(file.stat().st_size for file in states.glob("states-*"))
    assert stored > 40 * own, "whoever reads them all would be seen"
    for rank in ("0", "1"):
        _, start, *steps = json.loads((tmp_path / f"{rank}.json").read_text())
        # Configs, tokenizers and the kernel's own counters are read besides.
        assert start < 3 * ends + SMALL
        # The ends are loaded, the evaluation rows are read, two of which are as many as `own`, and the first batch and
        # those behind it.
        assert steps[0] - start < 4 * ends + 3 * own + rows.held_out // 2 * own // 2 + SMALL
        # From the fourth step, as some batches are read ahead, to the last but these.
        taken = steps[20] - steps[3]
        assert 10 * own <= taken <= 19 * own + SMALL, (rank, taken, own)


def test_of_a_hub_id_only_the_ends_are_downloaded(sharded, hub):
    hub.commit("org/target", {file.name: file.read_bytes() for file in sharded.iterdir()})
    source = resolve("org/target")
    ends = find_ends(source)
    size = sum(info.size for info in ends.tensors.values())
    headers = 64 << 10
    assert size <= hub.sent("GET /storage/") <= size + headers
    local = find_ends(Folder(sharded))
    assert ends.digests == local.digests and len(ends.digests) == 3
    one, other = (load_ends(found, torch.float32).state_dict() for found in (ends, local))
    assert all(torch.equal(one[name], other[name]) for name in other)
    # They are kept.
    sent = hub.sent("GET /storage/")
    assert find_ends(source).digests == local.digests
    assert hub.sent("GET /storage/") == sent


def test_a_download_of_the_ends_that_broke_leaves_nothing_behind(sharded, hub, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.commit("org/target", {file.name: file.read_bytes() for file in sharded.iterdir()})
    # As often as one request is tried.
    hub.fail(r"GET /storage/", Reply(500), times=4)
    with pytest.raises(HubUnreachable):
        find_ends(resolve("org/target"))
    assert find_ends(resolve("org/target")).digests == find_ends(Folder(sharded)).digests


@pytest.mark.parametrize(("other", "what"), [("other_target", "lm_head differs"), ("fine_tune", "layers differ")])
def test_states_of_a_target_with_other_weights_are_refused(other, what, states, tmp_path, request):
    with pytest.raises(StatesInvalid, match=what):
        train(job_of(request.getfixturevalue(other), states), tmp_path / "head")


def test_layers_that_are_not_whole_are_not_compared(sharded, tmp_path):
    states, target = store(sharded, tmp_path, 60), shutil.copytree(sharded, tmp_path / "target")
    (target / "model-00003-of-00003.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert sample_target(sharded, 7) is not None and sample_target(target, 7) is None
    check_target(job_of(target, states))


def test_what_no_state_comes_from_tells_no_targets_apart(tiny_target, tmp_path):
    """A layer for multi-token prediction, behind the last one, and a vision tower."""
    for name, value in (("one", 1.0), ("other", 2.0)):
        weights = load_file(shutil.copytree(tiny_target, tmp_path / name) / "model.safetensors")
        weights |= {key: torch.full((4,), value) for key in ("model.layers.7.eh_proj.weight", "vision_tower.pad")}
        save_file(weights, tmp_path / name / "model.safetensors")
        assert sample_target(tmp_path / name, 7) == sample_target(tiny_target, 7)
        assert sample_target(tmp_path / name, 8) != sample_target(tiny_target, 8)


def test_layers_that_no_recipe_names_are_those_of_the_states(tiny_target, states):
    config, tokenizer = read_target_config(tiny_target), load_tokenizer(tiny_target)
    values = {key: value for key, value in VALUES.items() if key != "captured"}
    assert offline_job(tiny_target, config, tokenizer, values, states, None).recipe.captured == (1, 3, 5)


def test_a_target_that_does_not_fit_is_refused_before_it_is_read(sharded, tmp_path, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    monkeypatch.setattr("psutil.swap_memory", lambda: type("Swap", (), {"free": 0}))
    before = bytes_read()
    with pytest.raises(TargetTooLarge):
        prepare_job(Folder(sharded), VALUES, TrainOptions(data=str(tmp_path / "data.jsonl")))
    assert bytes_read() - before < 1 << 20
