"""A target whose tokenizer is Python of its own: run by the steps that read text where the recipe trusts one commit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.heads import MLA, random_slots, write_head

import kconv
from kconv.checkpoint.hub import HubRepo
from kconv.cli import main
from kconv.engines import by_name
from kconv.errors import NotACheckpoint, RequestInvalid, TargetInvalid, TrainingDataInvalid
from kconv.operations.base import Context
from kconv.operations.reading import check_trusted
from kconv.targets.config import read_target_config

CODE = "from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast):\n    pass\n"


@pytest.fixture
def target(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a target with a tokenizer as Kimi-K2's is."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = shutil.copytree(tiny_target, tmp_path / "target")
    file = folder / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "tokenizer_class": "Own"}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    (folder / "own.py").write_text(CODE)
    return folder


@pytest.fixture
def head(target: Path, tmp_path: Path) -> Path:
    config = read_target_config(target)
    sizes = {"hidden": config.hidden, "target_hidden": config.hidden, "vocab": config.vocab}
    spec = replace(MLA, **sizes, draft_vocab=config.vocab)
    return write_head(tmp_path / "head", by_name("vllm"), spec, random_slots(spec))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "Why is the sky blue?"}) + "\n")
    return file


def test_a_head_is_trained_with_it(target, tmp_path):
    def run(trusted: bool) -> None:
        data = tmp_path / "too-little.jsonl"
        data.write_text(json.dumps({"text": "Why is the sky blue?"}) + "\n")
        kconv.train(target, tmp_path / "out", recipe="eagle3-gqa", data=data, trust_remote_code=trusted)

    _refuses_and_goes_on(run, TrainingDataInvalid)


def test_a_head_is_validated_with_it(target, head, prompts):
    def run(trusted: bool) -> None:
        head.joinpath("config.json").unlink(missing_ok=True)
        report = kconv.validate(head, target=target, prompts=prompts, trust_remote_code=trusted)
        raise NotACheckpoint(report.findings[0].message)

    _refuses_and_goes_on(run, NotACheckpoint)


def _refuses_and_goes_on(run: Callable[[bool], None], beyond: type[Exception]) -> None:
    with pytest.raises(TargetInvalid, match="cannot be loaded"):
        run(False)
    with pytest.raises(beyond):
        run(True)


def test_a_head_is_benched_with_it(target, head, prompts, tmp_path):
    out = tmp_path / "acceptance.json"
    words = {"head": head, "target": target, "suite": prompts, "max_tokens": 3, "out": out}
    with pytest.raises(TargetInvalid, match="cannot be loaded"):
        kconv.bench(**words)
    kconv.bench(**words, trust_remote_code=True)
    assert out.is_file()


def test_the_bench_command_has_the_option_that_its_fault_names(target, head, prompts, tmp_path):
    words = ["bench", "--head", head, "--target", target, "--suite", prompts, "--max-tokens", 3, "--out"]
    refused = CliRunner().invoke(main, [*map(str, words), str(tmp_path / "a.json")])
    assert refused.exit_code == 1 and "--trust-remote-code" in refused.stderr
    done = CliRunner().invoke(main, [*map(str, words), str(tmp_path / "a.json"), "--trust-remote-code"])
    assert done.exit_code == 0, done.output


def test_an_attention_is_converted_with_it(target, head, prompts, tmp_path):
    out = tmp_path / "mha"
    words = ["to-vllm", head, out, "--attention", "mha", "--target", target, "--prompts", prompts, "--context", 16]
    refused = CliRunner().invoke(main, list(map(str, words)))
    assert refused.exit_code == 1 and "--trust-remote-code" in refused.stderr
    read = CliRunner().invoke(main, [*map(str, words), "--trust-remote-code"])
    assert read.exit_code == 1 and "of 1 in all these have 0 and 0 tokens" in read.stderr and not out.exists()


def test_an_attention_is_converted_with_one_commits_code_alone(target, head, prompts, hub, tmp_path):
    hub.commit("org/kimi", target)
    words = ["to-vllm", head, tmp_path / "mha", "--attention", "mha", "--prompts", prompts, "--trust-remote-code"]
    asked = CliRunner().invoke(main, [*map(str, words), "--target", "org/kimi@main"])
    assert asked.exit_code == 2 and "needs a pinned target" in asked.stderr


def test_only_one_commit_is_trusted():
    context, named = Context(), HubRepo("org/kimi", "a" * 40, "a" * 40)
    context._sources["pinned"], context._sources["moving"] = named, replace(named, revision="main")
    check_trusted(context, True, "pinned")
    check_trusted(context, False, "moving")
    with pytest.raises(RequestInvalid, match="pinned") as error:
        check_trusted(context, True, "moving")
    assert named.name in error.value.fix
