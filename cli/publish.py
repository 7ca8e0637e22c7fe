"""`kconv publish`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import FOLDER

if TYPE_CHECKING:
    from ..cards.publish.floor import Floor


@click.command(short_help="Put a finished folder on the Hub, if nothing speaks against it.")
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.argument("repo", metavar="[REPO]", default="")
@click.option("--tag", default="", help="Tag of this release, given once every file was read back.")
@click.option("--private", is_flag=True, help="Refuse a repository that is public.")
@click.option("--public", is_flag=True, help="Make it public once everything was read back; a new one is private.")
@click.option("--revision", default="", help="Branch to commit to.  [default: main]")
@click.option("--create-pr", is_flag=True, help="Open a pull request in place of moving the branch.")
@click.option("--expect-parent", default="", metavar="SHA", help="Refuse if the branch is on another commit.")
@click.option("--report", type=FOLDER, help="report.json of kconv validate; DIR's own otherwise.")
@click.option("--acceptance", multiple=True, type=FOLDER, help="acceptance.json; DIR's own otherwise; repeatable.")
@click.option("--facts", type=FOLDER, help="The card's facts file, for the license checks; else the recipe's.")
@click.option("--min-acceptance", type=click.FloatRange(min=0, min_open=True), help="The floor; else the recipe's.")
@click.option("--metric", default="al_incl_bonus", show_default=True, help="What the floor is of.")
@click.option("--suite", help="What it is measured on, e.g. MT-Bench, or a report's text, e.g. sampled.")
@click.option("--target", metavar="NAME", help="For which target, as acceptance.json names it, e.g. org/name@commit.")
@click.option("--temperature", type=click.FloatRange(0), help="At which temperature; not of a report's text.")
@click.option("--draft-tokens", type=click.IntRange(1), metavar="K", help="At which K it is measured.")
@click.option("--prompts", type=click.IntRange(1), metavar="N", help="On how many prompts at least.")
@click.option("--max-loss", type=click.FloatRange(0, 1, max_open=True), help="Largest loss against the source (share).")
@click.option("--allow", "rules", multiple=True, metavar="RULE", help="Let a check pass; needs --why.")
@click.option("--why", "reasons", multiple=True, metavar="TEXT", help="The reason, which the card will state.")
@click.option("--dry-run", is_flag=True, help="Run the gate, look at the repository, and change nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print what was done, or would be, as JSON.")
def publish(
    folder: Path,
    repo: str,
    tag: str,
    private: bool,
    public: bool,
    revision: str,
    create_pr: bool,
    expect_parent: str,
    report: Path | None,
    acceptance: tuple[Path, ...],
    facts: Path | None,
    min_acceptance: float | None,
    metric: str,
    suite: str | None,
    target: str | None,
    temperature: float | None,
    draft_tokens: int | None,
    prompts: int | None,
    max_loss: float | None,
    rules: tuple[str, ...],
    reasons: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Publish DIR, a head with its card, as the repository REPO (org/name) of the Hub.

    Refused unless the manifest holds, the report is clean and of these very weights, the acceptance reaches the
    floor, the card says what they say, and its licenses are complete. Then: one commit, every file read back and
    compared, the tag. A repeated call does nothing; an interrupted one goes on. The token comes from HF_TOKEN, hf
    auth login, or, where HF_OIDC_RESOURCE is set, from the CI job's identity.

    DIR's recipe says what is not said here: the floor, the facts, and, of the step that publishes to REPO or of the
    only one, the repository, its tag, branch and visibility, and what is let pass. With --create-pr, its tag, branch
    and --public are left for when the pull request is merged.

    \b
    Example:
      kconv publish my-release my-org/my-head --tag v1 --dry-run
      kconv publish my-release --min-acceptance 2.5 --suite sampled --draft-tokens 3 --prompts 80 --max-loss 0.01
    """
    if len(rules) != len(reasons):
        raise click.UsageError("each --allow needs a --why, and each --why an --allow")
    about = {"--suite": suite, "--draft-tokens": draft_tokens, "--prompts": prompts, "--max-loss": max_loss}
    stated = _floor(min_acceptance, metric, about, {"--target": target, "--temperature": temperature})
    from ..cards.facts import read_facts
    from ..cards.publish.floor import read_floor, recipe_facts
    from ..cards.publish.gate import Allowance, allowable
    from ..cards.publish.release import open_candidate, refuse_absent
    from ..cards.publish.run import MAIN, Publication, prepare, preview, refuse_contradictions
    from ..cards.publish.run import publish as run
    from ..pipeline.proving import allowances_of, wish_of
    from ..pipeline.recipe import publications
    from .output import status
    from .release_output import print_published

    if unknown := set(rules) - allowable():
        known = ", ".join(sorted(allowable()))
        raise click.UsageError(f"--allow {', '.join(sorted(unknown))}: what can be let pass is {known}")
    refuse_absent(folder)
    floor = read_floor(folder)
    said = read_facts(facts) if facts else recipe_facts(folder)
    if stated and floor:
        raise click.UsageError(f"{folder}'s recipe states the floor; leave out --min-acceptance")
    steps = [step for step in publications(folder) if repo in ("", step.repo)]
    if not (repo or steps):
        raise click.UsageError(f"name REPO: no recipe in {folder} has a step that publishes")
    if len(steps) > 1:
        several = f"{len(steps)} steps of {folder}'s recipe publish{f' to {repo}' if repo else ''}"
        raise click.UsageError(f"{several}; run one with kconv run --only STEP{'' if repo else ', or name REPO'}")
    given: dict[str, Any] = {
        "tag": tag, "revision": revision, "private": private, "public": public, "create_pr": create_pr,
        "expect_parent": expect_parent,
    }  # fmt: skip
    wish = wish_of(steps[0]) if steps else Publication(repo)
    if create_pr:
        # A pull request has none of these; the step's are for when it is merged.
        wish = replace(wish, tag="", revision=MAIN, public=False)
    wish = replace(wish, **{k: value for k, value in given.items() if value})
    refuse_contradictions(wish)
    allowances = [one for step in steps for one in allowances_of(step)]
    allowances += [Allowance(rule, why) for rule, why in zip(rules, reasons, strict=True)]
    with status("publishing") as say:
        say("checking every byte")
        release = prepare(open_candidate(folder, report, acceptance, stated or floor, said), allowances)
        made = (preview if dry_run else run)(release, wish, say)
    print_published(release, made, dry_run=dry_run, as_json=as_json)


def _floor(
    least: float | None, metric: str, about: Mapping[str, str | float | None], more: Mapping[str, str | float | None]
) -> Floor | None:
    """Return the floor that the options state: a least figure, what it is about, and what only a suite's is about."""
    options = {**about, **more}
    given = [option for option, value in options.items() if value is not None]
    if least is None:
        if given:
            raise click.UsageError(f"{', '.join(given)}: only with --min-acceptance")
        return None
    if lacking := [option for option in about if option not in given]:
        raise click.UsageError(f"--min-acceptance needs {', '.join(lacking)} too, without which it says nothing")
    from pydantic import ValidationError

    from ..cards.publish.floor import Floor
    from ..checkpoint.schema import first_wrong

    try:
        stated = {option.removeprefix("--").replace("-", "_"): options[option] for option in given}
        return Floor.model_validate(stated | {"metric": metric, "at_least": least})
    except ValidationError as fault:
        raise click.UsageError(f"the floor cannot be: {first_wrong(fault)}") from fault
