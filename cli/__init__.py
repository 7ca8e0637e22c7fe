"""The command line: parse, call one function, print. What belongs here: the click group, and its one error handler.

Modules of this room import nothing heavy at their top, so that `kconv --help` answers at once.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from ..errors import KconvError
from . import cards, convert, demo, inspect, validate, vocab


class Kconv(click.Group):
    """The group, with the one place where a named fault becomes a message and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KconvError as fault:
            click.secho("error: ", fg="red", bold=True, err=True, nl=False)
            click.echo(str(fault), err=True)
            sys.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=Kconv, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="kconv")
def main() -> None:
    """Eagle3 draft heads for Kimi-K2 targets: convert, validate, describe.

    \b
    Start here:
      kconv demo                        a tiny Kimi, two trained heads, and proof
      kconv inspect HEAD                what a head is
      kconv to-vllm HEAD OUT            the same head in vLLM's layout
    """


for command in (
    demo.demo,
    inspect.inspect,
    convert.to_vllm,
    convert.to_trtllm,
    convert.to_sglang,
    convert.to_portable,
    convert.verify,
    validate.validate,
    vocab.vocab,
    cards.card,
):
    main.add_command(command)
