"""`kconv inspect`."""

from __future__ import annotations

from typing import Any

import click

from ..checkpoint.source import Source
from .options import PATH_OR_ID, open_headers, reading


@click.command(short_help="Say what a head is, from its config and headers.")
@click.argument("head", type=PATH_OR_ID)
@reading
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(head: Source, as_json: bool, **hints: Any) -> None:
    """Say what HEAD is: its layout, attention, dims, RoPE, captured layers, tensors and parameters.

    Reads the config and the headers, no weights; those of a hub id are read where they are.

    \b
    Example:
      kconv inspect my-head
      kconv inspect nvidia/Kimi-K2.6-Eagle3
    """
    from .head_output import print_head

    print_head(open_headers(head, **hints), as_json=as_json)
