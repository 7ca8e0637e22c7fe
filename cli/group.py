"""The group of commands: which job each does, how it is found, and where a named fault becomes a message."""

from __future__ import annotations

import errno
import os
import sys
from difflib import get_close_matches
from typing import Any, NoReturn

import click

from ..errors import KconvError, MissingExtra, OutputFailed

# The order in which one meets them; a command of no job is listed last.
JOBS = {
    "Try it": ("demo",),
    "Look": ("inspect", "vocab"),
    "Convert": ("to-vllm", "to-trtllm", "to-sglang", "to-portable", "verify"),
    "Check and measure": ("validate", "bench", "compare"),
    "Make": ("states", "synth", "train", "calibrate", "quantize", "quantize-head"),
    "Release": ("card", "publish", "run"),
    "Shell": ("completion",),
}
REST = "More"
# What `kconv` alone is answered with.
FIRST = """\
kconv: Eagle3 draft heads for Kimi-K2 targets, from the trainer to the engines.

  kconv demo                         see it work on a tiny Kimi-K2
  kconv inspect HEAD                 what a head is: a folder, or a hub id
  kconv to-vllm HEAD OUT             the same head in vLLM's layout, exactly
  kconv validate OUT --source HEAD   what an engine would get wrong

kconv --help lists every command, kconv COMMAND --help has examples."""
# What the same thing is called elsewhere.
OTHER_WORDS = {
    "convert": ("to-vllm", "to-trtllm", "to-sglang", "to-portable"),
    "check": ("validate", "verify"),
    "evaluate": ("bench", "validate"),
    "benchmark": ("bench",),
    "info": ("inspect",),
    "show": ("inspect",),
    "upload": ("publish",),
    "push": ("publish",),
    "release": ("run", "publish"),
    "export": ("to-trtllm", "to-vllm"),
}

# What a disk says that has no room, or no room for this user or this file.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Packages that only some commands take, and the extra that brings them.
EXTRAS = {
    **dict.fromkeys(("modelopt", "transformers", "accelerate", "datasets", "psutil", "requests"), "optimize"),
    "matplotlib": "plots",
}


class Kconv(click.Group):
    """The group, with the one place where a named fault becomes a message and exit code 1."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as fault:  # click itself ends where a pipe was closed
            if fault.errno not in FULL:
                raise
            _forget_stdout()
            _end_with(_full(fault))

    def invoke(self, ctx: click.Context) -> Any:
        if os.environ.get("NO_COLOR"):  # rich looks by itself, click does not: https://no-color.org
            ctx.color = False
        try:
            return super().invoke(ctx)
        except (KconvError, ModuleNotFoundError) as fault:
            _end_with(_missing(fault) if isinstance(fault, ModuleNotFoundError) else fault)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.commands and not name.startswith("-") and not ctx.resilient_parsing:
            close = likely(name, self.list_commands(ctx))
            meant = f" Did you mean {' or '.join(close)}?" if close else ""
            ctx.fail(f"There is no command {name!r}.{meant}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        limit = (ctx.max_content_width or 80) * 2
        shown = {
            name: command.get_short_help_str(limit) for name, command in self.commands.items() if not command.hidden
        }
        column = max((len(name) for name in shown), default=0)
        for job, names in sections(list(shown)).items():
            with formatter.section(job):
                formatter.write_dl([(name.ljust(column), shown[name]) for name in names])


def _end_with(fault: KconvError) -> NoReturn:
    click.secho("error: ", fg="red", bold=True, err=True, nl=False)
    click.echo(str(fault), err=True)
    sys.exit(1)


def _forget_stdout() -> None:
    """Have what stdout could not take go nowhere, or Python would try once more as it ends, and say so."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _full(fault: OSError) -> KconvError:
    return OutputFailed(
        f"what was asked for could not be written: {fault.strerror}",
        where=fault.filename or "stdout, or the file of a report",
        fix="Free some space, or write to another disk. A checkpoint that was made is whole, and stays.",
    )


def _missing(fault: ModuleNotFoundError) -> KconvError:
    """Return the fault of a package that an extra of kconv brings; any other missing module is a bug, and raised."""
    package = (fault.name or "").partition(".")[0]
    if package not in EXTRAS:
        raise fault
    extra = EXTRAS[package]
    return MissingExtra(f"this takes {package}, which is not installed", fix=f"pip install 'kconv[{extra}]'")


def sections(names: list[str]) -> dict[str, list[str]]:
    """Return the commands by the job they do, in the order of `JOBS`; those of no job come last."""
    found = {job: [name for name in members if name in names] for job, members in JOBS.items()}
    placed = {name for members in JOBS.values() for name in members}
    found[REST] = [name for name in names if name not in placed]
    return {job: members for job, members in found.items() if members}


def likely(name: str, known: list[str]) -> list[str]:
    """Return the commands that a name which is none may stand for, the likeliest first."""
    close = get_close_matches(name.lower(), [*known, *OTHER_WORDS], n=3, cutoff=0.6)
    meant = [word for one in close for word in OTHER_WORDS.get(one, (one,)) if word in known]
    return list(dict.fromkeys(meant))
