"""`kconv states` and what `kconv validate` makes of them, as a user runs them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from kconv.checkpoint.hub import HubRepo
from kconv.checkpoint.source import resolve
from kconv.cli import main
from kconv.targets.states import open_states, read_record

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Write a short text about the sea and its ships.", "Again."]},
    {"question_id": 91, "category": "math", "turns": ["Add two numbers and return the sum of both of them.", "More."]},
    {"question_id": 92, "category": "math", "turns": ["Multiply a number by itself until it is above ten.", "Stop."]},
]


@pytest.fixture
def prompts(tmp_path) -> Path:
    """Return prompts in MT-Bench's form."""
    file = tmp_path / "question.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return file


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["states", *map(str, words)])


def test_states_are_written_and_told(tiny_target, prompts, tmp_path):
    out = tmp_path / "states"
    done = run(tiny_target, out, "--prompts", prompts, "--prompt-tokens", 6, "--sampled", 5, "--greedy", 4)
    assert done.exit_code == 0, done.output
    assert "9 sequences (3 held-out, 3 sampled, 3 greedy)" in done.stdout
    record = read_record(out)
    # By default the three layers that Eagle3 captures, and the target's own dtype.
    assert (record.captured, record.dtype) == ((1, 2, 3), "F32")
    assert [s.category for s in open_states(out).sequences if s.kind == "greedy"] == ["writing", "math", "math"]
    assert {s.length for s in open_states(out).sequences if s.kind == "sampled"} == {11}


def test_json_captures_and_dtype(tiny_target, prompts, tmp_path):
    out = tmp_path / "states"
    words = ("--captured", "0,6", "--dtype", "BF16", "--text-tokens", 9, "--json")
    done = run(tiny_target, out, "--prompts", prompts, *words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads((out / "states.json").read_text())
    row = open_states(out).read(0)
    assert (row.captured.dtype, tuple(row.captured.shape)) == (torch.bfloat16, (9, 128))


def test_a_chat_goes_through_the_targets_template(tiny_target, prompts, tmp_path):
    for name, words in (("plain", ()), ("chat", ("--chat", "--no-held-out", "--greedy", "3"))):
        assert run(tiny_target, tmp_path / name, "--prompts", prompts, *words).exit_code == 0
    plain, chat = (open_states(tmp_path / name).read(0).tokens.tolist() for name in ("plain", "chat"))
    assert chat[0] != plain[0]
    text = " ".join(map(str, plain))
    assert text in " ".join(map(str, chat))


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--no-held-out",), "leaves nothing to write"),
        (("--url", "http://127.0.0.1:1"), "need each other"),
        (("--url", "http://127.0.0.1:1", "--shared", ".", "--sampled", "3"), "in memory"),
        (("--captured", "3,1"), "not an ascending list"),
    ],
)
def test_options_that_do_not_go_together(tiny_target, prompts, tmp_path, words, what):
    done = run(tiny_target, tmp_path / "states", "--prompts", prompts, *words)
    assert done.exit_code == 2
    assert what in done.output


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--captured", "1,9"), "cannot be captured"),
        (("--prompts", "absent.jsonl"), "cannot be read"),
        (("--sampled", "10000000"), "but the target accepts"),
    ],
)
def test_faults_are_named_and_leave_nothing(tiny_target, prompts, tmp_path, words, what):
    done = run(tiny_target, tmp_path / "out" / "states", "--prompts", prompts, *words)
    assert done.exit_code == 1
    assert what in done.output
    assert not (tmp_path / "out" / "states").exists()


def test_a_quantized_target_that_cannot_be_run_is_named(tiny_target, prompts, tmp_path):
    folder = Path(shutil.copytree(tiny_target, tmp_path / "target"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "something-new"}
    (folder / "config.json").write_text(json.dumps(config))
    done = run(folder, tmp_path / "states", "--prompts", prompts)
    assert done.exit_code == 1
    assert "something-new" in done.output


def test_a_run_of_the_same_goes_on_and_the_finished_one_is_not_overwritten(tiny_target, prompts, tmp_path):
    words = (tiny_target, tmp_path / "states", "--prompts", prompts)
    assert run(*words).exit_code == 0
    again = run(*words)
    assert again.exit_code == 1
    assert "already exists" in again.output


def test_remote_code_runs_only_of_a_pinned_commit(prompts, tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert resolve(f"org/name@{commit}").pinned
    # As a branch's name resolves: to a commit that the user did not name.
    monkeypatch.setattr("kconv.checkpoint.source.resolve", lambda name: HubRepo("org/name", commit))
    done = run("org/name@main", tmp_path / "states", "--prompts", prompts, "--trust-remote-code")
    assert done.exit_code == 2
    assert f"org/name@{commit}" in done.output.replace("\n", "").replace(" ", "")
