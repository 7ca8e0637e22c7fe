"""`kconv card`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from ..checkpoint.source import Source
from .options import FOLDER, PATH_OR_ID

if TYPE_CHECKING:
    from ..cards.facts import Facts
    from ..validate.report import Finding


@click.command(short_help="Write a head's README.md, its licenses and its notice.")
@click.argument("head", type=FOLDER)
@click.option("--report", type=FOLDER, help="report.json of kconv validate, for the acceptance table.")
@click.option("--acceptance", multiple=True, type=FOLDER, help="acceptance.json of kconv bench, or quoted; repeatable.")
@click.option("--facts", "facts_file", type=FOLDER, help="YAML with what no file of the head says.")
@click.option("--style", type=click.Choice(["short", "compact", "nvidia"]), default="short", show_default=True,
              help="Which sections, in which order.")  # fmt: skip
@click.option("--base-model", default="", help="Hub id of the target.")
@click.option("--license", "license", default="unknown", show_default=True, help="The head's license, by kconv's id.")
@click.option("--license-file", "license_files", multiple=True, type=FOLDER, help="A license's text; repeatable.")
@click.option("--target", type=PATH_OR_ID, help="The target, for its license.")
@click.option("--source", type=PATH_OR_ID, help="What HEAD was made from, for its license, if it is not at hand.")
@click.option("--model-index", is_flag=True, help="Put the figures into the front matter too.")
@click.option("--no-chart", "chart", is_flag=True, default=True, flag_value=False, help="Draw no chart.")
@click.option("--missing", is_flag=True, help="List what the card asks for and nobody said; write nothing.")
@click.option("--check", is_flag=True, help="Check HEAD's card and licenses; write nothing.")
def card(
    head: Path, report: Path | None, acceptance: tuple[Path, ...], facts_file: Path | None, style: str,
    base_model: str, license: str, license_files: tuple[Path, ...], target: Source | None,
    source: Source | None, model_index: bool,
    chart: bool, missing: bool, check: bool,
) -> None:  # fmt: skip
    """Write HEAD's model card from its manifest, reports, figures and facts; what none of them says stands as that.

    License texts are copied from the source, the target and --license-file. A folder that kconv did
    not make has a card where the facts name the head. Exit 1 where --missing or --check find
    something, or where a license asks for more than the written card has.

    \b
    Examples:
      kconv card my-head-vllm --report report/report.json --base-model moonshotai/Kimi-K2.6
      kconv card my-head-vllm --style nvidia --facts facts.yaml --acceptance acceptance.json --license-file LICENSE
    """
    from ..bench.acceptance import read_acceptance
    from ..cards.card import gather, make_card, write
    from ..cards.license_checks import check_folder
    from ..validate.report import read_report

    facts = _facts(facts_file, base_model, license)
    if check:
        _end_with(head, check_folder(head, facts), err=False)
    evidence = gather(
        head,
        read_report(report) if report else None,
        facts,
        [read_acceptance(file) for file in acceptance],
        license_files,
        target.fetch_license() if target else None,
        source.fetch_license() if source else None,
    )
    made = make_card(evidence, style, model_index=model_index, chart=chart)
    if missing:
        for name, asked in made.missing.items():
            click.echo(f"{name}: {asked}" if asked else name)
        raise SystemExit(1 if made.missing else 0)
    click.echo(write(head, made))
    _end_with(head, check_folder(head, facts), err=True)


def _end_with(head: Path, found: Sequence[Finding], *, err: bool) -> NoReturn:
    """Print what was found, and exit with 1 where it is an error."""
    for finding in found:
        click.echo(
            f"{finding.severity} {finding.rule} {finding.where}: {finding.message}\n  fix: {finding.fix}", err=err
        )
    click.echo(f"{head}: " + (f"{len(found)} finding(s)" if found else "nothing found"), err=err)
    raise SystemExit(1 if any(finding.severity == "error" for finding in found) else 0)


def _facts(file: Path | None, base_model: str, license: str) -> Facts:
    """Return the facts of a file, with what the command line says put in their place."""
    from ..cards.facts import Facts, read_facts
    from ..cards.licenses import by_id

    facts = read_facts(file) if file else Facts()
    if license != "unknown":
        facts = facts.model_copy(update={"license": facts.license.model_copy(update={"id": by_id(license).id})})
    return facts.model_copy(update={"base_model": base_model}) if base_model else facts
