"""What commands print: results on stdout, progress on stderr. What belongs here: tables, and nothing decided."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from ..checkpoint.manifest import Manifest
from ..convert.plan import Plan
from ..convert.read import Head


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
