"""What `kconv publish` and `kconv run` print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.markup import escape
from rich.table import Table

from .output import print_json, wide_console

if TYPE_CHECKING:
    from ..cards.publish.run import ApprovedRelease, Published
    from ..pipeline.preview import Preview
    from ..pipeline.release import Outcome


def print_published(release: ApprovedRelease, made: Published, *, dry_run: bool, as_json: bool) -> None:
    """Print what a publication did, or would do."""
    if as_json:
        passed = [{"rule": f.rule, "where": f.where, "found": f.message, "why": a.why} for f, a in release.passed]
        findings = [finding.model_dump(mode="json") for finding in release.findings]
        print_json({"dry_run": dry_run} | asdict(made) | {"findings": findings, "allowed": passed})
        return
    for finding, allowance in release.passed:
        click.echo(f"allowed {finding.rule} {finding.where}: {finding.message} ({allowance.why})")
    sizes = {file.name: file.size for file in release.files}
    table = Table("file", "bytes", "sha256", "", box=None, header_style="bold")
    for name, size in sizes.items():
        table.add_row(escape(name), f"{size:,}", made.files[name][:16], "new" if name in made.uploaded else "there")
    for name in made.deleted:
        table.add_row(escape(name), "", "", "deleted")
    wide_console().print(table)
    at = f"{made.repo}@{made.tag or made.commit or made.revision}"
    if dry_run:
        click.echo(f"{at}: every check passed; nothing was changed, leave --dry-run out to publish")
    elif made.done:
        click.echo(f"{at}: {', '.join(made.done)}")
    else:
        click.echo(f"{at}: nothing to do, these very files are there")
    click.echo(f"commit {made.commit or 'not made yet'}, {'private' if made.private else 'public'}")


def print_preview(preview: Preview, root: Path, *, as_json: bool) -> None:
    """Print what running a release would do."""
    if as_json:
        findings = [finding.model_dump(mode="json") for finding in preview.findings]
        print_json(asdict(preview) | {"out": str(root), "heavy": preview.heavy, "findings": findings})
        return
    table = Table("step", "kind", "", "size", "why", box=None, header_style="bold")
    for step in preview.steps:
        runs = {True: "runs", False: "stands", None: "may run"}[step.runs]
        size = "not known yet" if step.size is None else _bytes(step.size) if step.size else ""
        table.add_row(escape(step.name), step.do, runs, size, escape(step.why))
    wide_console().print(table)
    least = "" if preview.whole else "at least "
    click.echo(f"disk: {least}{_bytes(preview.needed)} needed, {_bytes(preview.free)} free in {root.absolute().parent}")
    for finding in preview.findings:
        click.echo(f"{finding.severity} {finding.rule} {finding.where}: {finding.message}")
    click.echo("nothing was done; leave --dry-run out to run it")


def print_outcomes(outcomes: Sequence[Outcome], root: Path, *, as_json: bool) -> None:
    """Print what became of each step."""
    if as_json:
        print_json({"out": str(root), "steps": [asdict(outcome) for outcome in outcomes]})
        return
    table = Table("step", "kind", "", "seconds", "size", "why", box=None, header_style="bold")
    for one in outcomes:
        made = one.status == "made"
        size = _bytes(one.size) if one.size else ""
        table.add_row(escape(one.name), one.do, one.status, f"{one.seconds:.1f}" if made else "", size, escape(one.why))
    wide_console().print(table)
    counts = [f"{sum(o.status == s for o in outcomes)} {s}" for s in dict.fromkeys(o.status for o in outcomes)]
    if outcomes:
        click.echo(f"{root}: {', '.join(counts)}")


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
