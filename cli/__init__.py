"""The command line: commands generated from operations, and how their results are printed.

Modules of this package import nothing heavy at their top, so that `kconv --help` answers at once.
"""

from __future__ import annotations

import atexit
import gc

import click

from .group import FIRST, Kconv
from .others import completion, demo, run
from .serve import serve
from .terminal import echo
from .versions import version_option

# torch and ModelOpt are a million objects that are no garbage: to look through them again and again takes a quarter of
# their import, and half of the program's end. The thresholds are mypy's.
gc.set_threshold(200_000, 30, 30)
atexit.register(gc.freeze)


@click.group(
    cls=Kconv,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@version_option
@click.pass_context
def main(ctx: click.Context) -> None:
    """Convert, check, measure and release Eagle3 draft heads for vLLM, SGLang and TensorRT-LLM.

    HEAD and TARGET are a folder or a Hub id, org/name[@revision]. kconv COMMAND --help has examples.
    Exit code 0: done and checked; 1: an error or a failed check; 2: usage; 3: undecided (kconv validate).

    \b
    Example:
      kconv inspect nvidia/Kimi-K2.6-Eagle3
      kconv to-vllm nvidia/Kimi-K2.6-Eagle3 my-head
      kconv validate my-head --source nvidia/Kimi-K2.6-Eagle3
    """
    if ctx.invoked_subcommand is None:
        echo(FIRST, err=True)
        ctx.exit(2)


for command in (demo, run, serve, completion):
    main.add_command(command)
