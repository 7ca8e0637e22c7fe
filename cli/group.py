"""The group of commands: their jobs, how they are found, and where an error becomes a message."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import click

from ..checkpoint.staging import heed_sigterm
from ..errors import KconvError, OutputFailed, RequestInvalid
from ..operations import OPERATIONS, load
from .terminal import echo

# The headings of help, in the order of use, each with the commands that are not a single operation.
JOBS: dict[str, tuple[str, ...]] = {
    "Try it": ("demo",),
    "Look": (),
    "Convert": (),
    "Check and measure": (),
    "Serve": ("serve",),
    "Make": (),
    "Release": ("run",),
    "Shell": ("completion",),
}
REST = "More"
# The answer to a bare `kconv`.
FIRST = """\
kconv: Eagle3 draft heads, from the trainer to the engines.

  kconv inspect HEAD                 show what a head is (a folder or a Hub id)
  kconv validate HEAD --for vllm     find what an engine would get wrong
  kconv to-vllm HEAD OUT             write the same weights in vLLM's layout
  kconv demo                         try it on a tiny Kimi-K2

kconv --help lists every command. kconv COMMAND --help has examples."""
# Names that other tools use for the same thing.
OTHER_WORDS = {
    "convert": ("to-vllm", "to-trtllm", "to-sglang", "to-portable"),
    "check": ("validate", "verify"),
    "evaluate": ("bench", "validate"),
    "benchmark": ("bench",),
    "cmp": ("diff", "compare"),
    "info": ("inspect",),
    "show": ("inspect",),
    "upload": ("publish",),
    "push": ("publish",),
    "release": ("run", "publish"),
    "export": ("to-trtllm", "to-vllm"),
    "finetune": ("train",),
    "measure": ("bench",),
    **dict.fromkeys(("to-tensorrt", "to-tensorrt-llm", "trtllm", "tensorrt", "tensorrt-llm"), ("to-trtllm",)),
    **dict.fromkeys(("prune", "reduce", "vocabulary"), ("vocab",)),
    **dict.fromkeys(("sample", "synthesize", "answers"), ("generate",)),
    **dict.fromkeys(("capture", "extract", "dump", "hidden-states"), ("states",)),
    **dict.fromkeys(("doctor", "version", "versions"), ("env",)),
    "to-speculator": ("to-speculators",),
    **dict.fromkeys(("launch", "deploy", "start"), ("serve",)),
}

# What users try for an option or an argument: those of kconv that it may stand for, of which the command's own is
# named. KEY=VALUE is a setting of --set.
OTHER_OPTIONS: dict[str, tuple[str, ...]] = {
    "-V": ("--version",),
    "--recipe": ("--format",),
    "--format": ("--recipe",),
    **dict.fromkeys(("-f", "--overwrite"), ("--force",)),
    **dict.fromkeys(("-o", "--out", "--output", "--output-dir"), ("OUT", "--out")),
    **dict.fromkeys(("--epochs", "--num-epochs", "--passes"), ("--set passes=N",)),
    **dict.fromkeys(("--lr", "--learning-rate"), ("--set lr=RATE",)),
    **dict.fromkeys(("--batch-size", "--batch"), ("--set batch=N",)),
    "--steps": ("--set steps=N",),
    **dict.fromkeys(("--seq-len", "--max-length"), ("--set seq=N",)),
    **dict.fromkeys(("--data", "--dataset", "--prompts"), ("--prompts", "--data", "--suite", "--text")),
    **dict.fromkeys(("--engine", "--backend"), ("--for", "--engine")),
    **dict.fromkeys(
        ("--model", "--model-path", "--base-model", "--verifier"), ("--target", "--base-model", "TARGET", "HEAD")
    ),
    **dict.fromkeys(("--draft", "--drafter", "--draft-model", "--speculative-draft-model-path"), ("--head", "HEAD")),
    **dict.fromkeys(("-k", "--k", "--num-speculative-tokens", "--num-draft-tokens"), ("--draft-tokens",)),
    **dict.fromkeys(("--layer-ids", "--aux-layers", "--aux-hidden-state-layers"), ("--captured",)),
    "--size": ("--prune",),
}
# Whether --json stands anywhere on the command line, by this key of a context's meta: some options and errors end a
# command before its own are read.
AS_JSON = "kconv.as_json"
# Spellings of one dtype.
SAME_DTYPE = (("bfloat16", "bf16"), ("float16", "fp16", "f16", "half"), ("float32", "fp32", "f32", "float"))
# OS errors of a full disk, or of one without room for this user or this file.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Command(click.Command):
    """A command whose usage errors say what it takes.

    Attributes:
        about: what each argument is, by name.
        rare: options that help shows last, under a heading of their own.
    """

    def __init__(
        self, *args: Any, about: Mapping[str, str], rare: Collection[str] = (), heading: str = "", **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.about, self.rare, self.heading = about, rare, heading

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, rare in (("Options", False), (self.heading, True)):
            own = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
            found = [one.get_help_record(ctx) for one in own if (one.name in self.rare) is rare]
            if records := [record for record in found if record]:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # What is left over is refused here, where it can be said what the command takes.
        ctx.allow_extra_args = True
        try:
            left = super().parse_args(ctx, args)
        except click.MissingParameter as error:
            said = self.about.get(getattr(error.param, "name", ""), "") or getattr(error.param, "help", "")
            if isinstance(error.param and error.param.type, click.Choice):
                said = said.removesuffix(".")  # click goes on with a full stop and the choices
            raise click.MissingParameter(said, error.ctx, error.param) from error
        except click.NoSuchOption as error:
            own = {name for param in self.params for name in param.opts}
            usage = " ".join(super().collect_usage_pieces(ctx)[1:])
            for meant in OTHER_OPTIONS.get(error.option_name, ()):
                if meant.partition(" ")[0] in own:
                    raise _no_option(error, f"Did you mean {meant}?") from error
                if meant.lower() in self.about:
                    raise _no_option(error, f"{meant} is an argument: {ctx.command_path} {usage}") from error
            if "options" in self.about:
                raise _no_option(error, self.about["options"]) from error
            raise
        if left and not ctx.resilient_parsing:
            usage = " ".join(super().collect_usage_pieces(ctx)[1:])
            taken = f"{ctx.command_path} takes {usage or 'no argument'}."
            if all(word.isdecimal() for word in left):
                taken = "A list is one word with commas, e.g. 1,29,57."
            ctx.fail(f"Got unexpected extra argument{'s' * (len(left) > 1)} ({' '.join(left)}). {taken}")
        return left


def _no_option(error: click.NoSuchOption, meant: str) -> click.NoSuchOption:
    return click.NoSuchOption(error.option_name, f"No such option {error.option_name!r}. {meant}", ctx=error.ctx)


class OneOf(click.Choice):
    """A choice that also takes another case, and another spelling of a dtype."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        given = str(value).lower()
        same = next((group for group in SAME_DTYPE if given in group), (given,))
        close = [choice for choice in self.choices if choice.lower() in same]
        if len(self.choices) == 1 and not close:
            self.fail(f"{value!r} is not {self.choices[0]}, the only value.", param, ctx)
        return super().convert(close[0] if len(close) == 1 else value, param, ctx)


class Folder(click.Path):
    """A path of a command that is no operation: ~ is the home folder, as in an operation's."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from ..options import expanded

        return Path(expanded(os.fsdecode(super().convert(value, param, ctx))))


class Kconv(click.Group):
    """The group, with the one place where an error becomes a message and exit code 1."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            # A name that the terminal's encoding lacks is shown escaped, which affects no file.
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            with heed_sigterm():
                return super().main(*args, **kwargs)
        except OSError as fault:  # click itself handles a closed pipe
            if fault.errno not in FULL:
                raise
            _forget_stdout()
            _end_with(_full(fault))

    def invoke(self, ctx: click.Context) -> Any:
        if os.environ.get("NO_COLOR"):  # rich checks it, click does not: https://no-color.org
            ctx.color = False
        as_json = ctx.meta[AS_JSON]
        try:
            with _usage(ctx):
                return super().invoke(ctx)
        except KconvError as error:
            _end_with(error, as_json)
        except ModuleNotFoundError as error:
            from ..operations.base import missing_extra

            _end_with(missing_extra(error), as_json)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*operation_commands(), *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, built from its operation on first use."""
        if (own := super().get_command(ctx, cmd_name)) is not None:
            return own
        operation = operation_commands().get(cmd_name)
        if operation is None:
            return None
        from .build import make_command

        fixed = {"to": cmd_name.removeprefix("to-")} if operation == "convert" else {}
        return make_command(cmd_name, load(operation), summary(cmd_name, operation), **fixed)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[AS_JSON] = "--json" in args
        with _usage(ctx):
            try:
                return super().parse_args(ctx, args)
            except click.NoSuchOption as error:
                if "--version" in OTHER_OPTIONS.get(error.option_name, ()):
                    raise _no_option(error, "Did you mean --version?") from error
                raise _no_option(error, "A command's options come after its name: kconv COMMAND [OPTIONS].") from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.list_commands(ctx) and not name.startswith("-") and not ctx.resilient_parsing:
            close = likely(name, self.list_commands(ctx))
            # Of the outputs, the one that is named behind: convert --to sglang.
            outputs = [f"to-{word.lower()}" for word in args[1:]]
            behind = {meant for output in outputs for meant in OTHER_WORDS.get(output, (output,))}
            close = [one for one in close if one in behind] or close
            named = " or ".join(filter(None, (", ".join(close[:-1]), *close[-1:])))
            meant = f" Did you mean {named}?" if close else " kconv --help lists them."
            ctx.fail(f"There is no command {name!r}.{meant}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        limit = (ctx.max_content_width or 80) * 2
        # From the table of operations: help imports none.
        shown = {name: summary(name, operation) for name, operation in operation_commands().items()}
        shown |= {name: command.get_short_help_str(limit) for name, command in self.commands.items()}
        column = max((len(name) for name in shown), default=0)
        for job, names in sections(list(shown)).items():
            with formatter.section(job):
                formatter.write_dl([(name.ljust(column), shown[name]) for name in names])


def operation_commands() -> dict[str, str]:
    """Return the operation behind each command; `convert` is one command per layout that kconv writes."""
    from ..engines.registry import writable

    found: dict[str, str] = {}
    for operation in OPERATIONS:
        names = [f"to-{layout}" for layout in writable()] if operation == "convert" else [operation.replace("_", "-")]
        found |= dict.fromkeys(names, operation)
    return found


def summary(name: str, operation: str) -> str:
    """Return a command's summary, one line."""
    from ..engines.registry import describe

    layout = name.removeprefix("to-")
    return f"Write a head in {describe(layout)}." if operation == "convert" else OPERATIONS[operation].summary


@contextmanager
def _usage(ctx: click.Context) -> Iterator[None]:
    """Print a usage error on stderr, and on stdout too if the command line has --json, and exit."""
    try:
        yield
    except click.UsageError as error:
        _show(error)
        if not ctx.meta[AS_JSON]:
            sys.exit(error.exit_code)
        path, fault = (error.ctx or ctx).command_path, error.__cause__
        if not isinstance(fault, RequestInvalid):
            fault = RequestInvalid(error.format_message(), where=path, fix=f"See {path} --help.")
        _print_json(fault)
        sys.exit(error.exit_code)


def _show(error: click.UsageError) -> None:
    said = io.StringIO()
    error.show(said)
    echo(said.getvalue(), err=True, nl=False, wraps=True)


def _end_with(fault: KconvError, as_json: bool = False) -> NoReturn:
    """Print an error, also on stdout as JSON if the command prints that, and exit."""
    click.secho("error: ", fg="red", bold=True, err=True, nl=False)
    echo(fault, err=True, wraps=True, behind=len("error: "))
    if as_json:
        _print_json(fault)
    sys.exit(1)


def _print_json(fault: KconvError) -> None:
    from .show import print_json

    try:
        print_json(fault.as_json())
    except OSError:  # stderr has it
        _forget_stdout()


def _forget_stdout() -> None:
    """Send what stdout could not take to nowhere; otherwise Python would try again at exit, and report it."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _full(fault: OSError) -> KconvError:
    return OutputFailed(
        f"the output could not be written: {fault.strerror}",
        where=fault.filename or "stdout, or the file of a report",
        fix="Free some space, or write to another disk. A finished checkpoint is complete and stays.",
    )


def sections(names: list[str]) -> dict[str, list[str]]:
    """Return the commands by job, in the order of `JOBS`; those without a job come last."""
    jobs = {name: job for job, members in JOBS.items() for name in members}
    jobs |= {name: OPERATIONS[operation].job for name, operation in operation_commands().items()}
    found: dict[str, list[str]] = {job: [] for job in (*JOBS, REST)}
    for name in names:
        found.get(jobs.get(name, REST), found[REST]).append(name)
    return {job: members for job, members in found.items() if members}


def likely(name: str, known: list[str]) -> list[str]:
    """Return the commands that an unknown name may stand for, the most likely first."""
    name = name.lower().replace("_", "-")
    close = [name] if name in known else get_close_matches(name, [*known, *OTHER_WORDS], n=3, cutoff=0.6)
    meant = [word for one in close for word in OTHER_WORDS.get(one, (one,)) if word in known]
    # Of an engine or a library that kconv writes nothing for, those that it does.
    meant = meant or [one for one in known if name.startswith("to-") and one.startswith("to-")]
    return list(dict.fromkeys(meant))
