"""Each place that reads YAML, with what is YAML and yet none: it ends in a message, and exit code 1."""

import shutil

import pytest
from click.testing import CliRunner
from support.releases import write_release

from kconv.cli import main

# A date with a typo is enough; PyYAML lets through what Python's own types raise.
TEXTS = {
    "a date with a typo": "2026-13-45",
    "a number that is none": "!!int x",
    "a yes that is none": "!!bool maybe",
    "5,000 digits": "9" * 5000,
    "3,000 lists": "[" * 3000 + "]" * 3000,
    "a Python object": "!!python/object/apply:os.getcwd []",
    "what is in itself": "&a [*a]",
}


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return write_release(tmp_path_factory.mktemp("hostile") / "head")


def recipe(where, text):
    where.write_text(f"name: {text}\n")
    return where


COMMANDS = {
    "a release's recipe": lambda head, text: ["run", recipe(head / "r.yaml", text), "--dry-run"],
    "facts": lambda head, text: ["card", head, "--facts", recipe(head / "f.yaml", text), "--missing"],
    "a quantization's recipe": lambda head, text: [
        "quantize", head, head / "out", "--recipe", recipe(head / "q.yaml", text), "--dry-run",
    ],
    "a training's recipe": lambda head, text: [
        "train", head, head / "out", "--data", "x", "--recipe", recipe(head / "t.yaml", text),
    ],
    "the floor at the gate": lambda head, text: [
        "publish", recipe(head / "release.yaml", text).parent, "o/n", "--dry-run",
    ],
    "the steps at the gate": lambda head, text: ["publish", recipe(head / "release.yaml", text).parent, "--dry-run"],
    "front matter": lambda head, text: ["card", front(head, text), "--check"],
}  # fmt: skip


def front(head, text):
    (head / "README.md").write_text(f"---\nlicense: mit\nreleased: {text}\n---\n# A head\n")
    return head


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("which", COMMANDS)
def test_yaml_that_is_none_ends_in_a_message(head, tmp_path, monkeypatch, which, text):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "head"
    shutil.copytree(head, folder)
    command = [str(word) for word in COMMANDS[which](folder, text)]
    ended = CliRunner().invoke(main, command)
    assert isinstance(ended.exception, SystemExit) and ended.exit_code == 1, (ended.exception, ended.output)
    assert "fix:" in ended.output
