"""`kconv serve`, which checks a head and gives way to an engine."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..engines import registry
from ..errors import EngineFailed, LayoutCannot, RequestInvalid
from ..escape import command
from .complete import complete_value
from .group import Command
from .terminal import echo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..convert.read import Head
    from ..engines.base import Engine


def _steps(ctx: click.Context, param: click.Parameter, value: int | None) -> int | None:
    if value is not None and not 1 <= value <= 32:
        raise click.BadParameter(f"{value} is not from 1 to 32")
    return value


# A launch command's word for the environment's own.
PYTHON = "python"
ABOUT = {"head": "The draft head: a folder or a Hub id.", "options": "The engine's own options stand behind --."}


@click.command(cls=Command, about=ABOUT, short_help="Check a head, and start an engine that serves it.")
@click.argument("head")
@click.argument("options", metavar="[OPTIONS]...", nargs=-1)
@click.option("--target", required=True, metavar="TARGET", help="The target: a folder or a Hub id.")
@click.option(
    "--engine",
    metavar="ENGINE",
    help="The engine; by default the first that reads HEAD and is installed.",
    shell_complete=complete_value,
)
@click.option("--engine-python", metavar="PATH", help="Python of the engine's environment; by default kconv's own.")
@click.option("--draft-tokens", type=int, callback=_steps, metavar="K", help="Draft tokens per step, 1 to 32.")
@click.option("--dry-run", is_flag=True, help="Check HEAD and print the engine's command; start nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run, print one JSON object.")
def serve(
    head: str,
    options: tuple[str, ...],
    target: str,
    engine: str | None,
    engine_python: str | None,
    draft_tokens: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Check HEAD as kconv validate does, then start an engine that serves TARGET with it.

    The engine takes this process's place, with the OPTIONS that stand behind --. A head that it would refuse, or serve
    wrongly in silence, is not served. TensorRT-LLM reads its options from a file, which kconv to-trtllm writes.

    \b
    Examples:
      kconv serve my-head-vllm --target my-target -- --port 8001
      kconv serve my-head-sglang --target my-target --engine-python sgl/bin/python
      kconv serve my-head-vllm --target my-target --dry-run
    """
    if as_json and not dry_run:
        raise click.UsageError("--json goes with --dry-run: an engine prints its own lines")
    from ..checkpoint.folder import read_json
    from ..checkpoint.manifest import Hints
    from ..convert.opening import open_head
    from ..engines.base import Deployment, Serving, needs_code
    from ..operations.validate import Validate
    from ..options import expanded
    from ..serving.start import check_start
    from ..validate.report import finding_lines
    from .progress import Terminal
    from .show import print_json, show_lines

    context, target, python = Terminal(), expanded(target), expanded(engine_python or sys.executable)
    head, aimed = expanded(head), context.source(target)
    checkpoint = context.source(head).open_weights()
    # Its values are read once, by the check.
    served = open_head(checkpoint, None, Hints(), aimed, values=False)
    # Where an environment is named, the printed command is of its programs.
    chosen = _choose(served, engine, Path(python), starts=not dry_run or engine_python is not None)
    steps = draft_tokens or served.spec.drafter.draft_tokens(served.spec)
    folder = checkpoint.folder.absolute()
    check_start(Serving(Path(python), Path(target), folder, served.spec, draft_tokens=steps), chosen)
    request = Validate(head=head, target=target, for_=(chosen.name,))
    report = request.run(context)
    if not request.passed(report):
        raise request.failure(report)
    warnings = finding_lines(one for one in report.findings if one.severity == "warning")
    show_lines(replace(line, err=True) for line in warnings)
    own_code = needs_code(read_json(aimed.fetch_config() / "config.json"), checkpoint.config)
    name, revision = aimed.served
    deployment = Deployment(name, str(folder), served.spec, own_code, steps=draft_tokens, revision=revision)
    assert chosen.launch is not None
    _refuse_repeated(options, chosen.launch.command(deployment), chosen.launch.short)
    words = [*chosen.launch.adapted(chosen.launch.command(deployment), Path(python)), *options]
    if engine_python is not None:
        words[0] = str(_program(words[0], Path(python), chosen))
    if as_json:
        print_json({"engine": chosen.name, "command": words})
        return
    for note in chosen.launch.notes(served.spec):
        echo(note, err=True)
    echo(command(words), err=not dry_run)
    if not dry_run:
        folder = Path(python).absolute().parent
        os.environ["PATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PATH"))))
        # The engine takes this process's place.
        program = str(_program(words[0], Path(python), chosen))
        os.execv(program, [program, *words[1:]])


def _refuse_repeated(options: tuple[str, ...], words: list[str], short: Mapping[str, str]) -> None:
    """Refuse an engine's option that kconv sets; a second one would change what was checked.

    Raises:
        RequestInvalid: an option is one of the command's own, a part of one (--speculative-config.method of vLLM), or
            the beginning or the short form of one, which argparse takes for it.
    """
    own = {_spelled(word) for word in words if word.startswith("--")}
    for option in options:
        first, dot, key = _spelled(option).partition(".")
        name = f"{short.get(first, first)}{dot}{key}"
        meant = next((one for one in own if one.startswith(name)), None) if name.startswith("--") else None
        if meant is not None:
            raise RequestInvalid(
                f"kconv sets {meant} itself, as the head needs it",
                where=option,
                fix="Remove it. To choose otherwise, start from the command of --dry-run.",
            )


def _spelled(word: str) -> str:
    """Return an option's name as engines compare it: without its value, and with hyphens for underscores."""
    return word.partition("=")[0].replace("_", "-")


def _program(word: str, python: Path, engine: Engine) -> Path:
    """Return the program of an environment that a launch command's first word names.

    Raises:
        EngineFailed: the environment lacks it.
    """
    program = python.absolute() if word == PYTHON else python.absolute().parent / word
    if not program.exists():
        raise EngineFailed(
            f"{engine.title} is installed there without its program {word}",
            where=program,
            fix=f"Install {engine.title} in that environment again, or run the command of --dry-run where it is.",
        )
    return program


def _choose(head: Head, name: str | None, python: Path, *, starts: bool) -> Engine:
    """Return the engine that is to serve a head; to be started, the environment of a Python must have it.

    Raises:
        EngineUnknown: there is no such engine.
        LayoutCannot: no engine reads the head's layout, or not this one, or it is told about a head in a file.
        EngineFailed: it is not installed there.
    """
    from ..operations.reading import check_python

    own = [registry.engine(name)] if name else registry.engines_of(head.layout.name)
    able = [
        one
        for one in own
        if one in registry.engines_of(head.layout.name)
        and one.launch
        and one.launch.config is None
        and head.spec.drafter.name in one.launch.drafters
    ]
    if not able:
        told = [one for one in own if one.launch and one.launch.config]
        who = " and ".join(one.title for one in own)
        follow = [
            f"follow {one.launch.file}, which kconv to-{one.name} writes beside the head" for one in told if one.launch
        ]
        layout = f"the layout {head.layout.name}"
        if name:
            what = f"kconv cannot start {who} with a head in {layout}"
        else:
            what = f"{layout} is read only by {who}, which kconv does not start" if own else f"no engine reads {layout}"
        ways = " or ".join(f"kconv to-{one}" for one in ([name] if name else registry.startable()))
        convert = [] if name and told else [f"convert the head first ({ways} HEAD OUT)"]
        fix = "; or ".join([*convert, *follow])
        raise LayoutCannot(what, where=head.checkpoint.folder, fix=f"{fix[0].upper()}{fix[1:]}.")
    refused: EngineFailed | None = None
    for one in able if starts else ():
        try:
            check_python(python, one.name)
        except EngineFailed as error:
            refused = refused or error
        else:
            return one
    if refused is not None:
        refused.fix = (
            "Pass the python of an environment that has it (--engine-python); without, --dry-run prints the command."
        )
        raise refused
    return able[0]
