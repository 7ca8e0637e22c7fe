"""Acceptance figures as tables on stdout."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from ..bench.acceptance import AcceptanceFile, AcceptanceRow
from ..bench.compare import Comparison
from .output import print_json

WAYS = {
    "micro_steps": "steps",
    "macro_request": "requests",
    "macro_category": "categories",
    "micro_positions": "positions",
}


def print_acceptance(acceptance: AcceptanceFile, *, as_json: bool) -> None:
    """Print what was measured: a line for each category, a column for each kind of mean."""
    if as_json:
        click.echo(acceptance.to_json(), nl=False)
        return
    rows, console = acceptance.rows, Console()
    ways = list(dict.fromkeys(row.averaging or "" for row in rows))
    first, last = rows[0], rows[-1]
    title = f"acceptance length, K={first.draft_tokens}, bonus token included, by {first.engine}; mean over"
    console.print(title, highlight=False)
    table = Table("", "N", *(WAYS.get(way, way) for way in ways), box=None, header_style="bold")
    for category in dict.fromkeys(row.category for row in rows):
        own = {row.averaging: row for row in rows if row.category == category}
        some = next(iter(own.values()))
        table.add_row(category or "all", str(some.prompts or ""), *(_figure(own[w]) if w in own else "" for w in ways))
    console.print(table)
    for row in rows:
        if row.category == last.category and row.sanity:
            said = f"answers: {row.sanity.mean_tokens:.0f} tokens, {row.sanity.distinct_4grams:.0%} distinct 4-grams"
            console.print(said + (f"; speed-up {row.speed.speedup:.2f}" if row.speed else ""), highlight=False)
            break


def _figure(row: AcceptanceRow) -> str:
    interval = f" [{row.interval.low:.2f}, {row.interval.high:.2f}]" if row.interval else ""
    return row.shown + interval.replace("[", "\\[")


def print_comparison(comparison: Comparison, *, as_json: bool) -> None:
    """Print tables of what compares, then what does not, with the reason."""
    if as_json:
        print_json(comparison.to_json())
        return
    console = Console()
    for shared in comparison.tables:
        console.print(shared.method, highlight=False)
        table = Table("", *comparison.heads, box=None, header_style="bold")
        for about, rows in shared.lines:
            table.add_row(about, *(_figure(row) if row else "" for row in rows))
        console.print(table, "")
    if comparison.apart:
        table = Table("head", "figure of", "", "not comparable, as", box=None, header_style="bold")
        for apart in comparison.apart:
            table.add_row(apart.head, apart.about, apart.figure, apart.reason)
        console.print(table)
    if not comparison.tables:
        console.print("nothing compares")
