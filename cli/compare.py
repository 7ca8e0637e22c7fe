"""`kconv compare`."""

from __future__ import annotations

from pathlib import Path

import click

from .options import FOLDER


@click.command(short_help="Put acceptance figures of several heads side by side.")
@click.argument("files", nargs=-1, required=True, type=FOLDER)
@click.option("--chart", type=FOLDER, help="Draw the comparable figures into this PNG.")
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def compare(files: tuple[Path, ...], chart: Path | None, as_json: bool) -> None:
    """Compare the acceptance.json FILES of two heads or more.

    Figures stand side by side only where everything they were measured with is equal and stated; the others are listed
    with what keeps them apart. Exit 1 if nothing compares.

    \b
    Example:
      kconv compare mla/acceptance.json gqa/acceptance.json --chart heads.png
    """
    from ..bench.acceptance import read_acceptance
    from ..bench.compare import compare as run
    from ..bench.compare import draw
    from ..checkpoint.staging import refuse_existing
    from .tables import print_comparison

    if len(files) < 2:
        raise click.UsageError("give two files or more")
    if chart:
        refuse_existing(chart)
    comparison = run([read_acceptance(file) for file in files])
    print_comparison(comparison, as_json=as_json)
    if chart:
        draw(comparison, chart)
    raise SystemExit(0 if comparison.tables else 1)
