"""The pages' commands: each `kconv ...` line is one that the command line takes."""

from pathlib import Path

import pytest
from support.commands import COMMANDS, Line, command_lines, fault_of, named_commands

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINES = [line for page in PAGES for line in command_lines(page)]


def called(line: Line) -> str:
    return next(word for word in line.text.partition("kconv ")[2].split() if word)


def test_the_pages_show_every_command():
    assert {called(line) for line in LINES} >= COMMANDS.keys() - {"completion", "compare"}


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.page}:{line.number}")
def test_a_command_parses(line):
    assert fault_of(line.text) == "", line.text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_commands_exist(page):
    assert named_commands(page) <= COMMANDS.keys()


@pytest.mark.parametrize(
    "line, fault",
    {
        "kconv inspct head": "no command inspct",
        "kconv inspect": "missing",
        "kconv inspect a b": "too many operands",
        "kconv inspect head --jsn": "--jsn",
        "kconv to-vllm a b --attention gqa": "gqa",
        "kconv train a b --data c": "--recipe",
        "kconv bench --suite mt-bench --head h --out a --max-tokens many": "many",
        "kconv --vresion": "--vresion",
    }.items(),
)
def test_a_wrong_command_is_seen(line, fault):
    assert fault in fault_of(line)


def test_blocks_are_read_as_a_shell_would(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "kconv no\n```sh\nkconv inspect a \\\n  --json  # why\nls\n```\n```yaml\nkconv no\n```\n`kconv vocab A`"
    )
    assert [line.text for line in command_lines(page)] == ["kconv inspect a --json  # why"]
    assert named_commands(page) == {"vocab"}
