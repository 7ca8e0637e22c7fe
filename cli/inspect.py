"""`kconv inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .options import FOLDER, open_head, reading


@click.command(short_help="Say what a head is, from its config and headers.")
@click.argument("head", type=FOLDER)
@reading
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(head: Path, as_json: bool, **hints: Any) -> None:
    """Say what HEAD is: its layout, attention, dims, RoPE, captured layers, tensors and parameters.

    Reads the config and the headers, no weights.

    \b
    Example:
      kconv inspect my-head
    """
    from .output import print_head

    print_head(open_head(head, **hints), as_json=as_json)
