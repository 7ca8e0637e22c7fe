"""Processes of several nodes: each reads rows of its own, so a node needs a part of the files alone."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kconv.cli import main
from kconv.errors import StatesInvalid
from kconv.targets.config import read_target_config
from kconv.targets.rows import divide
from kconv.targets.states import open_states
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.text import read_corpus
from kconv.train.data import place_sequences
from kconv.train.job import offline_job

from .test_offline import VALUES


@pytest.fixture(scope="module")
def states(tiny_target, tmp_path_factory) -> Path:
    """Return the states of texts of about 500 tokens, in five files."""
    folder = tmp_path_factory.mktemp("states")
    texts = [text for text in read_corpus().train if len(text) > 900][:12]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in texts) + "\n")
    words = ["states", tiny_target, folder / "states", "--prompts", folder / "prompts.jsonl", "--captured", "1,3,5"]
    done = CliRunner().invoke(
        main,
        [str(w) for w in [*words, "--text-tokens", 400, "--dtype", "F32", "--shard-mib", 1, "--seq", VALUES["seq"]]],
    )
    assert done.exit_code == 0, done.output
    assert len(list((folder / "states").glob("states-*.safetensors"))) >= 4
    return folder / "states"


def test_runs_are_of_nearly_one_size():
    assert divide(8, 3) == [range(3), range(3, 6), range(6, 8)]
    assert divide(3, 3) == [range(1), range(1, 2), range(2, 3)]
    assert divide(2, 4) == [range(1), range(1, 2), range(1), range(1, 2)]
    assert divide(0, 2) == []


@pytest.mark.parametrize("pack", [False, True])
def test_processes_have_rows_of_their_own_and_together_all(states, pack):
    stored = open_states(states)
    whole, parts = (place_sequences(stored, 64, held_out=False, pack=pack, processes=n) for n in (1, 3))
    assert {span for row in whole.places for span in row} == {span for row in parts.places for span in row}
    assert sorted(row for share in parts.rows.shares for row in share) == list(range(len(parts.places)))
    # As many for each, in whole batches.
    own = [parts.rows.own(rank, 3, 4).tolist() for rank in range(3)]
    assert {len(rows) for rows in own} == {min(map(len, parts.rows.shares)) // 4 * 4}
    assert not set(own[0]) & set(own[1])
    # What they read is not much more than a third each.
    files = [set(stored.files_of(parts.sequences_of(rank))) for rank in range(3)]
    assert set.union(*files) == set(stored.files_of(whole.sequences_of(0)))
    assert max(map(len, files)) < len(set.union(*files))


def job_of(target: Path, states: Path):
    return offline_job(target, read_target_config(target), load_tokenizer(target), VALUES, states, None)


def test_a_file_that_a_process_reads_has_to_be_there_and_no_other(states, tiny_target, tmp_path, monkeypatch):
    folder = shutil.copytree(states, tmp_path / "states")
    names = sorted(file.name for file in folder.glob("states-*.safetensors"))
    (folder / names[-1]).unlink()
    with pytest.raises(StatesInvalid, match=f"1 of the {len(names)} files .* missing, first {names[-1]}"):
        job_of(tiny_target, folder)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert job_of(tiny_target, folder).text.shares
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(StatesInvalid, match="reads are missing"):
        job_of(tiny_target, folder)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def by_torchrun(words: list[object], *nodes: Path) -> None:
    """Run `kconv train` in two processes: of one node, or of two that meet here, each in a folder of its own."""
    program = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={2 // len(nodes)}", "--no-python"]
    program += [f"--nnodes={len(nodes)}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    program += [sys.executable, "-c", "from kconv.cli import main; main()", "train", *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen(program, env=environment, cwd=node, **pipes) for node in nodes]
    said = [process.communicate()[0] for process in started]
    assert not any(process.returncode for process in started), said


@pytest.mark.slow
def test_two_nodes_with_their_own_files_end_with_the_weights_of_one_that_has_all(states, tiny_target, tmp_path):
    (tmp_path / "recipe.yaml").write_text(json.dumps(VALUES | {"steps": 8, "batches": 8}))
    common = ["--recipe", tmp_path / "recipe.yaml", "--states", "states", "--save-every", 3, "--eval-every", 8]
    words = ["train", tiny_target, tmp_path / "none", *common[:2], "--states", states, "--dry-run", "--json"]
    plan = CliRunner().invoke(main, list(map(str, words)), env={"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"})
    needed = json.loads(plan.stdout)["nodes"]
    assert len(needed) == 2
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node, names in zip(nodes, needed, strict=True):
        (node / "states").mkdir(parents=True)
        assert len(names) < len(list(states.glob("states-*.safetensors")))
        for name in (*names, "states.json", "index.safetensors"):
            shutil.copy(states / name, node / "states")
    by_torchrun([tiny_target, tmp_path / "apart", *common], *nodes)
    by_torchrun([tiny_target, tmp_path / "together", *common], states.parent)
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("apart", "together"))
    assert one == other
    told = [json.loads((tmp_path / name / "kconv.json").read_text())["training"] for name in ("apart", "together")]
    assert told[0]["trained"] == told[1]["trained"]
