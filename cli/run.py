"""`kconv run`."""

from __future__ import annotations

from pathlib import Path

import click

from .options import FOLDER


@click.command(short_help="Carry out a release, from training to the Hub, from where it stands.")
@click.argument("recipe", metavar="RELEASE.yaml", type=FOLDER)
@click.option("--out", type=FOLDER, help="The release's folder.  [default: the recipe's name]")
@click.option("--from", "first", default="", metavar="STEP", help="Begin here; take what was made before as it is.")
@click.option("--only", default="", metavar="STEP", help="Run this step alone.")
@click.option("--without", multiple=True, metavar="STEP|KIND", help="Leave out a step, or all of a kind; repeatable.")
@click.option("--dry-run", is_flag=True, help="Print which steps would run, sizes, disk and license findings.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan, or what was done, as JSON.")
def run(
    recipe: Path, out: Path | None, first: str, only: str, without: tuple[str, ...], dry_run: bool, as_json: bool
) -> None:
    """Carry out RELEASE.yaml: train, quantize, convert, validate, bench, card, publish.

    A step whose inputs and parameters are those that made its output is not run again. A failed one stops the run,
    and the next call goes on from there. The recipe, run.json (what stands as it was made) and run.jsonl (what was
    done when) lie in the release's folder.

    \b
    Example:
      kconv run examples/tiny-release.yaml --without publish
      kconv run release.yaml --dry-run
    """
    from ..pipeline.preview import check_disk, preview_release
    from ..pipeline.recipe import read_release
    from ..pipeline.release import Outcome, Selection, run_release
    from .output import status
    from .release_output import print_outcomes, print_preview

    release, text = read_release(recipe)
    root, selection = out or Path(release.name), Selection(first, only, without)
    planned = preview_release(release, text, root, selection)
    if dry_run:
        print_preview(planned, root, as_json=as_json)
        return
    check_disk(planned, root)
    outcomes: list[Outcome] = []
    try:
        with status("running") as say:
            run_release(release, text, root, selection, say, outcomes.append)
    finally:
        print_outcomes(outcomes, root, as_json=as_json)
