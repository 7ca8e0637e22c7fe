"""The `kconv ...` lines of Markdown pages, and whether the command line takes them as they stand."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from kconv.cli import main

_CONTEXT = click.Context(main)
# Every command by its name; each is made of its operation when it is asked for.
COMMANDS = {
    name: command for name in main.list_commands(_CONTEXT) if (command := main.get_command(_CONTEXT, name)) is not None
}
SHELLS = ("bash", "sh", "console")
FENCE = re.compile(r"^ *```(\w*)")
INLINE = re.compile(r"`kconv ([a-z][a-z-]+)[ `]")
ENDS = ("|", ">", ">>", "&&", ";", "2>", "||")


@dataclass(frozen=True)
class Line:
    """A line of a page that calls kconv."""

    page: str
    number: int
    text: str


def command_lines(page: Path) -> Iterator[Line]:
    """Yield each call of kconv in a page's shell blocks; a line that ends with a backslash goes on."""
    language, started, number = "", "", 0
    for at, line in enumerate(page.read_text().splitlines(), 1):
        if fence := FENCE.match(line):
            language = fence[1] if not language else ""
            continue
        if language not in SHELLS:
            continue
        number = number if started else at
        started += line.strip().removeprefix("$ ").removesuffix("\\").strip() + " "
        if line.endswith("\\"):
            continue
        if re.match(r"(torchrun .* )?(\S*/)?kconv ", started):
            yield Line(page.name, number, started.strip())
        started = ""


def named_commands(page: Path) -> set[str]:
    """Return the commands that a page's text names, as `kconv inspect` does."""
    return set(INLINE.findall(page.read_text()))


def fault_of(line: str) -> str:
    """Return what the command line would object to in a call; "" where nothing. No path is looked at."""
    words = shlex.split(line, comments=True)
    words = words[next(i for i, word in enumerate(words) if word.split("/")[-1] == "kconv") + 1 :]
    end = next((i for i, word in enumerate(words) if word in ENDS), len(words))
    name, *arguments = words[:end]
    if name.startswith("-"):
        return "" if name in ("--help", "--version", "-h") else f"kconv has no option {name}"
    command = COMMANDS.get(name)
    if command is None:
        return f"kconv has no command {name}"
    if {"-h", "--help"} & set(arguments):
        return ""
    try:
        return _fault(command, arguments)
    except click.UsageError as fault:
        return fault.format_message()


def _fault(command: click.Command, arguments: list[str]) -> str:
    with click.Context(command, info_name=command.name) as context:
        values, left, _ = command.make_parser(context).parse_args(args=list(arguments))
        if left:
            return f"too many operands: {left}"
        # What was not given is None, or, from click 8.3 on, a mark of its own.
        values = {name: value for name, value in values.items() if isinstance(value, str | bool | tuple | list)}
        eager = any(param.is_eager and param.name in values for param in command.params)
        for param in command.params:
            given = values.get(param.name or "")
            if param.required and not given and not eager:
                return f"{param.get_error_hint(context)} is missing"
            if given is not None and isinstance(param.type, click.Choice | click.types.IntParamType | click.FloatRange):
                param.type_cast_value(context, given)
    return ""


PROGRAMS = ("vllm", "python", "trtllm-serve", "hf", "kconv", "touch", "x")
STUB = '#!/bin/sh\nprintf \'%s\\0\' $# "${0##*/}" "$@" >> "$RECORD"\n'
# Names of heads and targets that a shell, JSON, YAML or Markdown may take for something else.
NAMES = (
    "org/head", "my head", "a/b;touch PWN;#", "$(touch PWN)", "`touch PWN`", "it's", 'say "hi"', "'; touch PWN; '",
    '", "method": "x', "two\nlines", "a\ntouch PWN\n", "-x --trust", "--help", "é/中文 \U0001f600", "back\\slash\\",
    "# note", "*", "[a]?", "~/x", "a&&touch PWN", "a|touch PWN", ">PWN", "${HOME}", "!!", "{a,b}", "tab\there",
    "```\n# Heading\n```", "````", "<img src=x>", "| a | b |\n|---|---|\n| c | d |", "a: b", "null", "{{ 7*7 }}", "%s",
    "PATH_OR_ID_OF_THE_TARGET",
)  # fmt: skip


def ran(script: str, folder: Path, called: object = "script", *arguments: str) -> list[list[str]]:
    """Return how a script calls programs, program and arguments of each, the same in bash and sh; it writes nothing.

    Args:
        called, arguments: what the script sees as its own name, and as its arguments.
    """
    programs, work, record = folder / "programs", folder / "work", folder / "record"
    if not programs.exists():
        programs.mkdir()
        work.mkdir()
        for name in PROGRAMS:
            (programs / name).write_text(STUB)
            (programs / name).chmod(0o755)
    calls = []
    for shell in ("/bin/bash", "/bin/sh"):
        record.write_bytes(b"")
        environment = {"PATH": f"{programs}:/usr/bin:/bin", "RECORD": str(record), "HOME": "/home-of-nobody"}
        done = subprocess.run(
            [shell, "-c", script, str(called), *arguments], cwd=work, env=environment, capture_output=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()
        assert list(work.iterdir()) == []
        words = record.read_bytes().decode().split("\0")[:-1]
        calls.append([])
        while words:
            count = 2 + int(words[0])
            calls[-1].append(words[1:count])
            words = words[count:]
    assert calls[0] == calls[1]
    return calls[0]
