"""What `inspect` and the conversions print: a head, a plan, a manifest."""

from __future__ import annotations

from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape
from rich.table import Column, Table

from ..checkpoint.manifest import Manifest
from ..convert.plan import Plan
from ..convert.read import Head
from .output import print_json, print_next, wide_console

if TYPE_CHECKING:
    from ..calibrate.retention import Retention


def print_kept(figures: Retention) -> None:
    """Print what an approximation keeps of the acceptance length."""
    click.echo(
        f"approximate: keeps {figures.kept:.2%} ± {figures.kept_error:.2%} of the acceptance length "
        f"({figures.before:.3f} to {figures.after:.3f}, K={figures.steps}, sampled, bonus included) on "
        f"{figures.sequences} held-out sequences of up to {figures.context} tokens"
    )


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
        "source": head.checkpoint.source,
        "layout": f"{head.layout.name} ({head.layout.engine})",
        "attention": f"{spec.kind.upper()} {_dims(spec.attention)}",
        "hidden": f"{spec.hidden} (target {spec.target_hidden}), MLP {spec.intermediate}, {spec.layers} layer(s)",
        "vocabulary": f"{spec.draft_vocab} of {spec.vocab}",
        "rope": f"theta {spec.rope.theta:g}, {_dims(spec.rope.scaling) if spec.rope.scaling else 'no scaling'}",
        "captured": f"outputs of layers {list(spec.captured)}: {head.read.captured.how}",
        "norms": ", ".join(name for name, on in asdict(spec.norms).items() if on) or "plain",
        "weights": f"{len(infos)} tensors, {parameters:,} parameters, {spec.dtype}",
    }
    grid = Table.grid(padding=(0, 2))
    for name, fact in facts.items():
        grid.add_row(f"[bold]{name}", escape(fact))
    tensors = Table(_name("tensor"), "dtype", "shape", "bytes", box=None, header_style="bold")
    for info in infos:
        tensors.add_row(escape(info.name), info.dtype, " x ".join(map(str, info.shape)), f"{info.size:,}")
    wide_console().print(grid, "", tensors)


def print_plan(plan: Plan, *, as_json: bool) -> None:
    """Print what a conversion would do."""
    if as_json:
        steps = [{"tensor": s.name, "action": s.action, "from": [x.info.name for x in s.sources]} for s in plan.steps]
        print_json({"layout": plan.layout.name, "steps": steps, "dropped": plan.dropped, "config": plan.config})
        return
    table = Table(_name("from"), _name("to"), "action", box=None, header_style="bold")
    for step in plan.steps:
        made = f": {step.computed.reason}" if step.computed else ""
        table.add_row(escape(", ".join(s.info.name for s in step.sources)), step.name, escape(step.action + made))
    for name, why in plan.dropped.items():
        table.add_row(escape(name), "", escape(f"dropped: {why}"))
    wide_console().print(table)
    click.echo(f"captured layers: {plan.source.read.captured.how}")
    click.echo("nothing was written; leave --dry-run out to write it")


def print_manifest(manifest: Manifest, out: Path, *, as_json: bool) -> None:
    """Print what a conversion did."""
    if as_json:
        click.echo(manifest.model_dump_json(indent=2, by_alias=True))
        return
    actions = [step.action for step in manifest.tensors]
    counts = ", ".join(f"{actions.count(action)} {action}" for action in dict.fromkeys(actions))
    shown = click.format_filename(out)
    click.echo(f"{shown}: {manifest.source_layout} -> {manifest.layout}, {len(actions)} tensors ({counts})")
    for step in manifest.tensors:
        if step.reason:
            click.echo(f"{step.output.name} {step.action}: {step.reason}")
    for record in manifest.dropped:
        click.echo(f"{record.name} dropped: {record.reason}")
    if manifest.config_copied:
        click.echo(f"config keys carried as they are: {', '.join(manifest.config_copied)}")
    click.echo(f"captured layers: {manifest.captured_by}")
    owners = "the source's" + (" and, where added, the target's" if "added" in actions else "")
    click.echo("weights: " + (f"{owners}, byte for byte" if manifest.exact else "not all the source's, see above"))
    print_next("validate", out, "--source", manifest.source)


def _name(title: str) -> Column:
    """Return a column of names, which a narrow terminal folds and never cuts."""
    return Column(title, overflow="fold")


def _dims(value: Any) -> str:
    return " ".join(f"{name}={v}" for name, v in vars(value).items() if v is not None)
