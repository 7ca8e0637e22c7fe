"""What `kconv quantize` prints: its plan, its progress, what was done."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from ..checkpoint.header import byte_size
from ..checkpoint.staging import free_bytes
from ..quantize.output import copied_files
from ..quantize.plan import QuantizePlan
from ..quantize.run import bytes_needed
from ..quantize.stream import estimate
from .output import print_json, print_next

# Seconds between two lines where there is no terminal to draw a bar on.
EVERY = 30.0


class Meter(Protocol):
    """Shows how far a long job is."""

    def advance(self, count: int) -> None:
        """Count bytes."""
        ...

    def say(self, text: str) -> None:
        """Say what is going on."""
        ...


@contextmanager
def meter(title: str, total: int) -> Iterator[Meter]:
    """Show bytes, rate and time left on stderr: a bar on a terminal, a line now and then in a log."""
    if not sys.stderr.isatty():
        lines = _Lines(title, total)
        yield lines
        lines.show()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        yield _Bar(bar, title, total)


class _Bar:
    def __init__(self, bar: Progress, title: str, total: int) -> None:
        self._bar, self._title = bar, title
        self._task = bar.add_task(title, total=total)

    def advance(self, count: int) -> None:
        self._bar.update(self._task, advance=count)

    def say(self, text: str) -> None:
        self._bar.update(self._task, description=f"{self._title}: {text}")


class _Lines:
    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, total, 0
        self._begin = self._shown = time.monotonic()

    def advance(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._shown >= EVERY:
            self.show()

    def say(self, text: str) -> None:
        click.echo(f"{self._title}: {text}", err=True)

    def show(self) -> None:
        self._shown = time.monotonic()
        rate = self._done / max(self._shown - self._begin, 1e-9)
        left = (self._total - self._done) / rate if rate else float("nan")
        click.echo(
            f"{self._title}: {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, "
            f"{rate / 1e6:.0f} MB/s, {_duration(left)} left",
            err=True,
        )


def print_quantize_plan(plan: QuantizePlan, out: Path, processes: int | None, *, as_json: bool) -> None:
    """Print what a quantization would do: what becomes what, sizes, disk and time.

    Args:
        plan: what would be done.
        out: where.
        processes: that would share it; None where ModelOpt does it, whose files and time are not known before.
        as_json: as one JSON object.
    """
    rows, needed, free = _rows(plan), bytes_needed(plan), free_bytes(out)
    taken = None if plan.source.headers_only or processes is None else estimate(plan, processes)
    files = None if processes is None else len(plan.units)
    if as_json:
        print_json(
            _facts(plan, files)
            | {
                "becomes": [
                    {"part": part, "action": action, "tensors": count, "bytes_in": before, "bytes_out": after}
                    for (part, action), (count, before, after) in rows.items()
                ],
                "disk": {"needed": needed, "free": free},
                "estimate": {"processes": processes, "bytes_per_second": taken.rate, "seconds": taken.seconds}
                if taken
                else None,
            }
        )
        return
    table = Table("part", "becomes", "modules", "before", "after", box=None, header_style="bold")
    for (part, action), (count, before, after) in rows.items():
        table.add_row(part, action, f"{count:,}", f"{before / 1e9:.3f} GB", f"{after / 1e9:.3f} GB")
    table.add_row("all", "", "", f"{plan.bytes_in / 1e9:.3f} GB", f"{plan.bytes_out / 1e9:.3f} GB")
    console = Console()
    console.print(table)
    console.print(f"input_scale: {_inputs(plan)}; KV cache: {plan.recipe.kv_cache}", highlight=False)
    weights = "ModelOpt's" if files is None else files
    console.print(f"files: {weights}, beside {len(copied_files(plan.source.folder))} copied", highlight=False)
    enough = "" if free >= needed else " [red]NOT enough[/]"
    console.print(f"disk: {needed / 1e9:.3f} GB needed, {free / 1e9:.1f} GB free{enough}", highlight=False)
    if taken:
        console.print(
            f"time: about {_duration(taken.seconds)} on {processes} processes, by a packed sample "
            f"({taken.rate / 1e6:.0f} MB/s each); a slow disk takes longer",
            highlight=False,
        )


def print_done(plan: QuantizePlan, out: Path, *, as_json: bool) -> None:
    """Print what was done."""
    files = len(list(out.glob("*.safetensors")))
    if as_json:
        print_json(_facts(plan, files) | {"out": str(out)})
        return
    click.echo(
        f"{out}: {len(plan.modules):,} modules in NVFP4 ({plan.recipe.name}), "
        f"{plan.bytes_in / 1e9:.3f} GB -> {plan.bytes_out / 1e9:.3f} GB in {files} files"
    )
    click.echo(f"input_scale: {_inputs(plan)}; KV cache: {plan.recipe.kv_cache}")
    print_next("validate", out, "--source", plan.source.source)


def _facts(plan: QuantizePlan, files: int | None) -> dict[str, Any]:
    return {
        "source": plan.source.source,
        "form": plan.form,
        "recipe": plan.recipe.model_dump(mode="json"),
        "input_scale": _inputs(plan),
        "modules": len(plan.modules),
        "files": files,
        "bytes_in": plan.bytes_in,
        "bytes_out": plan.bytes_out,
    }


def _inputs(plan: QuantizePlan) -> str:
    return "none, activations stay as they are" if plan.recipe.weight_only else plan.inputs.description


def _rows(plan: QuantizePlan) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Return, by part of the model and what becomes of it: its tensors, bytes before, bytes after."""
    count: Counter[tuple[str, str]] = Counter()
    before: Counter[tuple[str, str]] = Counter()
    after: Counter[tuple[str, str]] = Counter()

    def add(name: str, action: str, size_in: int, size_out: int) -> None:
        key = (_part(name), action)
        count[key] += 1
        before[key] += size_in
        after[key] += size_out

    for unit in plan.units:
        for module in unit.modules:
            size = sum(byte_size(*kind) for kind in module.outputs.values())
            add(module.name, f"NVFP4 from {module.weight.form}", sum(i.size for i in module.weight.infos), size)
        for weight in unit.dequantized:
            add(
                weight.name,
                f"{weight.dtype} from {weight.form}",
                sum(i.size for i in weight.infos),
                byte_size(weight.dtype, weight.shape),
            )
        for info in unit.carried:
            add(info.name, "as it is", info.size, info.size)
    return {key: (count[key], before[key], after[key]) for key in sorted(count)}


PARTS = {
    ".mlp.experts.": "routed experts",
    ".mlp.shared_experts.": "shared experts",
    ".mlp.gate.": "routers",
    ".mlp.": "dense MLP",
    ".self_attn.": "attention",
    "norm": "norms",
    "embed_tokens": "embedding",
    "lm_head": "lm_head",
    "vision_tower": "vision",
    "mm_projector": "vision",
}


def _part(name: str) -> str:
    return next((part for mark, part in PARTS.items() if mark in name), "other")


def _duration(seconds: float) -> str:
    if seconds != seconds:
        return "unknown"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
