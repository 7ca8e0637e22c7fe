"""The command line: parse, call one function, print.

Modules of this room import nothing heavy at their top, so that `kconv --help` answers at once.
"""

from __future__ import annotations

import click

from . import (
    bench,
    calibrate,
    cards,
    compare,
    completion,
    convert,
    demo,
    inspect,
    publish,
    quantize,
    quantize_head,
    run,
    states,
    synth,
    train,
    validate,
    vocab,
)
from .group import FIRST, Kconv
from .versions import version_option


@click.group(
    cls=Kconv,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@version_option
@click.pass_context
def main(ctx: click.Context) -> None:
    """Eagle3 draft heads for Kimi-K2 targets, from the trainer to the engines.

    HEAD and TARGET are a folder or a hub id, org/name[@revision]. Start with kconv demo; kconv COMMAND --help has
    examples. Exit code 0: done and proven; 1: a named fault, nothing written; 2: usage.

    \b
    Example:
      kconv inspect nvidia/Kimi-K2.6-Eagle3
      kconv to-vllm nvidia/Kimi-K2.6-Eagle3 my-head
      kconv validate my-head --source nvidia/Kimi-K2.6-Eagle3
    """
    if ctx.invoked_subcommand is None:
        click.echo(FIRST, err=True)
        ctx.exit(2)


for command in (
    demo.demo,
    inspect.inspect,
    convert.to_vllm,
    convert.to_trtllm,
    convert.to_sglang,
    convert.to_portable,
    convert.verify,
    states.states,
    train.train,
    synth.synth,
    validate.validate,
    vocab.vocab,
    calibrate.calibrate,
    quantize.quantize,
    quantize_head.quantize_head,
    bench.bench,
    compare.compare,
    cards.card,
    publish.publish,
    run.run,
    completion.completion,
):
    main.add_command(command)
