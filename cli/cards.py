"""`kconv card`."""

from __future__ import annotations

from pathlib import Path

import click

from .options import FOLDER


@click.command(short_help="Write a converted head's README.md.")
@click.argument("head", type=FOLDER)
@click.option("--report", type=FOLDER, help="report.json of kconv validate, for the acceptance table.")
@click.option("--base-model", default="", help="Hub id of the target.")
@click.option("--license", "licence", default="unknown", show_default=True, help="Hub licence identifier.")
def card(head: Path, report: Path | None, base_model: str, licence: str) -> None:
    """Write HEAD's model card from its manifest and a validation report.

    \b
    Example:
      kconv card my-head-vllm --report report/report.json --base-model moonshotai/Kimi-K2.6
    """
    from ..cards.card import CardFacts, write_card
    from ..validate.report import read_report

    click.echo(write_card(head, read_report(report) if report else None, CardFacts(base_model, licence)))
