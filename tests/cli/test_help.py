"""Help: each command has an example that the command itself can parse."""

import shlex
from importlib.metadata import version

import click
import pytest
from click.testing import CliRunner

from kconv.cli import main

COMMANDS = sorted(main.commands)


def text(*arguments):
    """Return what a help says, with each line's margin taken off."""
    result = CliRunner().invoke(main, [*arguments, "--help"])
    assert result.exit_code == 0 and result.stderr == ""
    return [line.strip() for line in result.stdout.splitlines()]


def test_the_group_lists_every_command_with_a_sentence():
    lines = text()
    for name in COMMANDS:
        (line,) = [line for line in lines if line.split(" ")[0] == name]
        assert len(line.split()) > 3


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_an_example_that_parses(name):
    lines = text(name)
    assert any(line.startswith("Example") for line in lines)
    examples = [shlex.split(line) for line in lines if line.startswith(f"kconv {name}")]
    assert examples
    for _, _, *arguments in examples:
        values = parse(main.commands[name], arguments)
        assert not [word for word in values if word.startswith("-")]


def parse(command, arguments):
    """Return the arguments that a command takes for its operands, without converting or resolving any."""
    with click.Context(command, info_name=command.name) as context:
        _, operands, _ = command.make_parser(context).parse_args(args=list(arguments))
    needed = [p for p in command.params if isinstance(p, click.Argument) and p.required]
    options, _, _ = command.make_parser(click.Context(command)).parse_args(args=list(arguments))
    assert all(options.get(argument.name) for argument in needed), (command.name, arguments)
    return operands


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does(name):
    for option in main.commands[name].params:
        assert not isinstance(option, click.Option) or option.help, option.name


def test_version():
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0 and result.stdout.endswith(f"version {version('kconv')}\n")


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["inspect"], ["inspect", "a", "b"], ["to-vllm", "a"], ["inspect", "x", "--what"]]
)
def test_misuse_is_exit_2(arguments):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and "Usage:" in result.stderr and result.stdout == ""


@pytest.mark.parametrize("ids", ["", "1,", "a", "3,1", "1,1", "-1,2", "1 2", "9" * 5000])
def test_captured_layers_that_are_no_ascending_list_are_misuse(ids, tmp_path):
    result = CliRunner().invoke(main, ["inspect", str(tmp_path), "--captured", ids])
    assert result.exit_code == 2 and "ascending" in result.stderr
