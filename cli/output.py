"""What commands print: results on stdout, progress on stderr. What belongs here: tables, and nothing decided."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from ..checkpoint.manifest import Manifest
from ..convert.plan import Plan
from ..convert.read import Head
from ..validate.report import AcceptanceFigures, Report

if TYPE_CHECKING:
    from ..pipeline.demo import Made


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar over bytes on stderr; the yielded function advances it."""
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.update(task, advance=count)


def print_json(value: Any) -> None:
    """Print one JSON object on stdout."""
    click.echo(json.dumps(value, indent=2))


def print_head(head: Head, *, as_json: bool) -> None:
    """Print what a head is."""
    spec, infos = head.spec, list(head.checkpoint.tensors.values())
    parameters = sum(prod(i.shape) for i in infos if i.dtype not in ("I64", "I32", "BOOL"))
    if as_json:
        tensors = [{"name": i.name, "dtype": i.dtype, "shape": i.shape, "bytes": i.size} for i in infos]
        print_json(
            {
                "source": head.checkpoint.source,
                "layout": head.layout.name,
                "spec": asdict(spec) | {"kind": spec.kind},
                "captured_by": head.read.captured.how,
                "parameters": parameters,
                "tensors": tensors,
            }
        )
        return
    facts = {
        "layout": f"{head.layout.name} ({head.layout.engine})",
        "attention": f"{spec.kind.upper()} {_dims(spec.attention)}",
        "hidden": f"{spec.hidden} (target {spec.target_hidden}), MLP {spec.intermediate}, {spec.layers} layer(s)",
        "vocabulary": f"{spec.draft_vocab} of {spec.vocab}",
        "rope": f"theta {spec.rope.theta:g}, {_dims(spec.rope.scaling) if spec.rope.scaling else 'no scaling'}",
        "captured": f"outputs of layers {list(spec.captured)} ({head.read.captured.how})",
        "norms": ", ".join(name for name, on in asdict(spec.norms).items() if on) or "plain",
        "weights": f"{len(infos)} tensors, {parameters:,} parameters, {spec.dtype}",
    }
    grid = Table.grid(padding=(0, 2))
    for name, fact in facts.items():
        grid.add_row(f"[bold]{name}", fact)
    tensors = Table("tensor", "dtype", "shape", "bytes", box=None, header_style="bold")
    for info in infos:
        tensors.add_row(info.name, info.dtype, " x ".join(map(str, info.shape)), f"{info.size:,}")
    Console().print(grid, "", tensors)


def print_plan(plan: Plan, *, as_json: bool) -> None:
    """Print what a conversion would do."""
    if as_json:
        steps = [{"tensor": s.name, "action": s.action, "from": [x.info.name for x in s.sources]} for s in plan.steps]
        print_json({"layout": plan.layout.name, "steps": steps, "dropped": plan.dropped, "config": plan.config})
        return
    table = Table("from", "to", "action", box=None, header_style="bold")
    for step in plan.steps:
        table.add_row(", ".join(s.info.name for s in step.sources), step.name, step.action)
    for name, why in plan.dropped.items():
        table.add_row(name, "", f"dropped: {why}")
    Console().print(table)


def print_manifest(manifest: Manifest, out: Path, *, as_json: bool) -> None:
    """Print what a conversion did."""
    if as_json:
        click.echo(manifest.model_dump_json(indent=2, by_alias=True))
        return
    actions = [step.action for step in manifest.tensors]
    counts = ", ".join(f"{actions.count(action)} {action}" for action in dict.fromkeys(actions))
    click.echo(f"{out}: {manifest.source_layout} -> {manifest.layout}, {len(actions)} tensors ({counts})")
    click.echo(f"captured layers: {manifest.captured_by}")
    click.echo(f"next: kconv validate {out} --source {manifest.source}")


def _dims(value: Any) -> str:
    return " ".join(f"{name}={v}" for name, v in vars(value).items() if v is not None)


@contextmanager
def status(title: str) -> Iterator[Callable[[str], None]]:
    """Show what is going on, on stderr; the yielded function says it."""
    with Console(stderr=True).status(title) as shown:
        yield lambda text: shown.update(f"{title}: {text}")


def print_report(report: Report, *, as_json: bool) -> None:
    """Print a validation report."""
    if as_json:
        click.echo(report.to_json(), nl=False)
        return
    console, figures = Console(), report.figures
    for finding in report.findings:
        console.print(f"[bold]{finding.severity} {finding.rule}[/] {finding.where}: {finding.message}", highlight=False)
        console.print(f"  fix: {finding.fix}", highlight=False)
    if figures.acceptance:
        console.print(acceptance_table(report), "")
    for parity in figures.parity:
        console.print(
            f"{parity.text}: logits {parity.rms_error:.1e} from the source's (worst {parity.relative_error:.1e}), "
            f"KL {parity.kl:.1e}, "
            f"top-1 agreement {parity.top1:.2%}, acceptance {parity.length_difference:+.4f}",
            highlight=False,
        )
    if figures.identical is not None:
        console.print("weights: " + ("identical to the source's" if figures.identical else "NOT the source's"))
    errors = sum(finding.severity == "error" for finding in report.findings)
    console.print(f"{report.subject}: " + ("no errors" if report.clean else f"{errors} error(s)"), highlight=False)


def acceptance_table(report: Report, title: str = "") -> Table:
    """Return acceptance lengths by drafter and text, with standard errors where there are any."""
    rows = report.figures.acceptance
    kinds = list(dict.fromkeys(row.text for row in rows))
    steps = rows[0].steps
    caption = f"acceptance length, K={steps}, bonus token included"
    table = Table(title=f"{title}: {caption}" if title else caption, box=None, header_style="bold")
    table.add_column("drafter")
    for kind in kinds:
        distinct = next(text.distinct_4grams for text in report.figures.texts if text.kind == kind)
        table.add_column(f"{kind}\n({distinct:.0%} distinct 4-grams)", justify="right")
    for drafter in dict.fromkeys(row.drafter for row in rows):
        own = {row.text: row for row in rows if row.drafter == drafter}
        table.add_row(drafter, *(_length(own[kind]) for kind in kinds))
    return table


def _length(row: AcceptanceFigures) -> str:
    error = f" ± {row.standard_error:.3f}" if row.standard_error is not None else ""
    return f"{row.length:.3f}{error}"


def print_demo(out: Path, made: Sequence[Made]) -> None:
    """Print what the demo made, and what it proved."""
    console = Console()
    for head in made:
        console.print(acceptance_table(head.report, title=f"{head.name} head"), "")
    table = Table(f"in {out}", "size", "parity with ModelOpt's module", "weights", "there and back", box=None)
    table.add_row("target", _size(out / "target"), "", "", "")
    for head in made:
        parity = head.report.figures.parity
        apart = max(p.rms_error for p in parity)
        agreed = min(p.top1 for p in parity)
        table.add_row(
            f"{head.name}/vllm",
            _size(out / head.name / "vllm"),
            f"logits {apart:.0e}, top-1 {agreed:.1%}",
            "identical" if head.report.figures.identical else "[red]NOT identical",
            "identical" if head.round_trip else "[red]NOT identical",
        )
    console.print(table)
    console.print(f"\nnext: kconv inspect {out / made[0].name / 'vllm'}", highlight=False)


def _size(folder: Path) -> str:
    return f"{sum(file.stat().st_size for file in folder.rglob('*') if file.is_file()) / 1e6:.1f} MB"
