"""What works on files works where torch, ModelOpt and transformers cannot be imported, and does the same."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from support import block_drafters, published
from support.good_heads import GOOD, WRITTEN
from support.heads import GQA, TARGET, random_slots, write_head
from support.releases import write_acceptance, write_release

from kconv.cli import main
from kconv.cli.group import operation_commands
from kconv.engines import BY_NAME
from kconv.options import flag

# Runs commands, given as JSON in a file, each with what it prints. None in sys.modules makes an import fail
# (https://docs.python.org/3/library/sys.html#sys.modules).
PROGRAM = """
import importlib.metadata, json, sys
hidden = set(sys.argv[2:])
sys.modules.update(dict.fromkeys(hidden))
installed = importlib.metadata.Distribution.from_name
def from_name(name):
    if name.removeprefix("nvidia-") in hidden:
        raise importlib.metadata.PackageNotFoundError(name)
    return installed(name)
importlib.metadata.Distribution.from_name = staticmethod(from_name)
from click.testing import CliRunner
from kconv.cli import main
said = [CliRunner().invoke(main, command) for command in json.load(open(sys.argv[1]))]
print(json.dumps([[one.exit_code, one.stdout, one.stderr] for one in said]))
"""
EXTRAS = ("torch", "transformers", "modelopt", "accelerate", "datasets")


class Said(NamedTuple):
    code: int
    stdout: str
    stderr: str


def run(folder: Path, commands: list[list[str]], *missing: str) -> list[Said]:
    """Run commands in a folder, in one process of its own that cannot import some packages."""
    folder.mkdir(exist_ok=True)
    (folder / "commands.json").write_text(json.dumps(commands))
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, "commands.json", *missing],
        capture_output=True, text=True, cwd=folder, check=True,
    )  # fmt: skip
    return [Said(*one) for one in json.loads(ran.stdout)]


FORMS = published.EAGLE3 | published.OTHERS | block_drafters.FORMS
HEADS = GOOD | FORMS
# What is done with each head, in this order; OUT is what it is converted to.
STEPS = {
    "inspect": ["HEAD"],
    "vocab": ["HEAD"],
    **{f"to-{layout}": ["HEAD", f"{layout}-OUT"] for layout in WRITTEN},
    "verify": ["vllm-OUT", "HEAD"],
    "validate": ["vllm-OUT", "--for", "vllm", "--source", "HEAD"],
    "diff": ["HEAD", "vllm-OUT"],
    "card": ["vllm-OUT", "--no-chart"],
}
# These take what decides a fact that the files leave open.
READING = ("inspect", "vocab", *(step for step in STEPS if step.startswith("to-")))


def commands_for(name: str, folder: str) -> list[list[str]]:
    """Return what is done with a head in a folder beside the one in which the commands run."""
    decide = [
        part for option, value in getattr(HEADS[name], "options", {}).items() for part in (flag(option), str(value))
    ]
    return [
        [step, *(part.replace("HEAD", f"../{folder}").replace("OUT", folder) for part in arguments)]
        + (decide if step in READING else [])
        for step, arguments in STEPS.items()
    ]


def files_in(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != "commands.json")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.mark.slow
def test_every_head_of_every_layout_is_worked_on_without_torch(tmp_path):
    assert {one.layout for one in HEADS.values() if one.layout} == {one.name for one in BY_NAME.values()}
    commands: list[list[str]] = []
    for i, name in enumerate(HEADS):
        HEADS[name].write(tmp_path / f"head-{i}")
        commands += commands_for(name, f"head-{i}")
    bare, full = tmp_path / "bare", tmp_path / "full"
    without, with_all = run(bare, commands, *EXTRAS), run(full, commands)
    assert [command for command, one, other in zip(commands, without, with_all, strict=True) if one != other] == []
    done = [command[0] for command, one in zip(commands, without, strict=True) if one.code == 0]
    # A card is written, and then says that no license is stated.
    assert set(done) == STEPS.keys() - {"card"} and len(done) > len(commands) / 2
    mine, theirs = files_in(bare), files_in(full)
    assert sum(name.endswith("README.md") for name in mine) == done.count("to-vllm")
    assert mine.keys() == theirs.keys() and [name for name in mine if mine[name] != theirs[name]] == []


# The other commands that compute with no weights; each works on what is in the folder, or an earlier one wrote.
OTHERS = {
    "env": [],
    "publish": ["release", "org/head", "--tag", "v1", "--dry-run", "--offline"],
    "compare": ["release/acceptance.json", "other.json"],
    "curve": ["release/acceptance.json", "--out", "curve.yaml"],
    "quote": ["curve.yaml", "--dataset", "MT-Bench", "--out", "quoted.json"],
    "vocab": ["reduced", "marked", "--rebuild-t2d"],
    "to-vllm": ["full", "with-target", "--target", "target"],
    "to-speculators": ["full", "speculators", "--target", "target"],
    "to-portable": ["wide", "rounded", "--dtype", "bfloat16"],
    "serve": ["full", "--target", "target", "--dry-run"],
    "run": ["recipe.yaml"],
    "completion": ["bash"],
}
# Commands that compute with weights or run a target, and what they miss first.
REFUSED = {
    "to-vllm": ("torch", ["full", "OUT", "--attention", "mla", "--target", "target", "--prompts", "prompts.jsonl"]),
    "vocab": ("torch", ["reduced", "OUT", "--expand"]),
    "validate": ("torch", ["full", "--target", "target", "--prompts", "prompts.jsonl"]),
    "tiny": ("torch", ["OUT"]),
    "demo": ("transformers", ["OUT"]),
    "bench": ("torch", ["--head", "full", "--target", "target", "--suite", "prompts.jsonl", "--out", "OUT"]),
    "states": ("torch", ["target", "OUT", "--prompts", "prompts.jsonl"]),
    "train": (
        "torch",
        ["target", "OUT", "--recipe", "eagle3-gqa", "--data", "dialogues.jsonl", "--set", "intermediate=64"],
    ),
    "calibrate": ("torch", ["target", "OUT", "--prompts", "prompts.jsonl"]),
    "quantize": ("torch", ["target", "OUT", "--recipe", "nvfp4-mlp", "--input-scale", "data-free"]),
    "quantize-head": ("torch", ["full", "OUT", "--format", "fp8", "--states", "states", "--target", "target"]),
}
# It asks a server alone.
ASKS = {"generate"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a release, heads, a target's config and prompts."""
    folder = tmp_path_factory.mktemp("files")
    for name, spec in (("full", GQA), ("reduced", replace(GQA, draft_vocab=40)), ("wide", replace(GQA, dtype="F32"))):
        write_head(folder / name, BY_NAME["vllm"], spec, random_slots(spec))
    write_release(folder / "release")
    write_acceptance(
        folder / "release", averaging="micro_steps", reasoning="off", precision="BF16", max_tokens=100, revision="a"
    )
    other = json.loads((folder / "release" / "acceptance.json").read_text()) | {"head": "another"}
    (folder / "other.json").write_text(json.dumps(other))
    (folder / "target").mkdir()
    (folder / "target" / "config.json").write_text(json.dumps(TARGET))
    (folder / "target" / "tokenizer.json").write_text("{}")
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n")
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (folder / "dialogues.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    steps = {
        "engine": {"do": "convert", "head": "full", "to": "sglang"},
        "report": {"do": "validate", "head": "$engine", "source": "full", "target": "target"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"name": "made", "steps": steps}))
    return folder


def test_each_command_is_in_a_table():
    known = {*operation_commands(), *main.commands}
    assert known == STEPS.keys() | OTHERS.keys() | REFUSED.keys() | ASKS


def test_the_other_commands_work_without_torch(folder):
    said = run(folder, [[name, *arguments] for name, arguments in OTHERS.items()], *EXTRAS)
    assert {name: one.code for name, one in zip(OTHERS, said, strict=True)} == dict.fromkeys(OTHERS, 0), said
    assert "not known without torch" in said[0].stdout


def test_what_computes_with_weights_says_how_to_add_torch(folder):
    commands = [[name, *("refused" if one == "OUT" else one for one in words)] for name, (_, words) in REFUSED.items()]
    for (missing, _), command, one in zip(REFUSED.values(), commands, run(folder, commands, *EXTRAS), strict=True):
        extra = "[torch]" if missing == "torch" else "[optimize]"
        assert one.code == 1 and f"error: {missing} is not installed" in one.stderr, (command, one)
        assert "pip install" in one.stderr and extra in one.stderr and "[optimize]" in one.stderr
    assert not (folder / "refused").exists()


def test_what_lacks_only_an_extra_names_it_as_json(folder):
    [one] = run(folder, [["vocab", "reduced", "refused", "--expand", "--json"]], "torch")
    error = json.loads(one.stdout)["error"]
    assert one.code == 1 and error["code"] == "missing-extra" and "[torch]" in error["fix"]


def test_files_are_worked_on_where_a_system_has_no_locks_and_no_limits(folder):
    commands = [
        ["inspect", "full"],
        ["validate", "full", "--for", "vllm"],
        ["to-vllm", "full", "unlocked"],
        ["verify", "unlocked", "full"],
    ]
    said = run(folder, commands, "fcntl", "resource")
    assert [one.code for one in said] == [0] * len(commands), said
    assert not list(folder.glob(".*unlocked*"))
