"""`kconv demo`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from .options import FOLDER


@click.command(short_help="A tiny Kimi-K2, two trained heads, and proof that converting them loses nothing.")
@click.argument("out", type=FOLDER, default="demo")
def demo(out: Path) -> None:
    """Make a tiny Kimi-K2 and two Eagle3 heads in the new folder OUT, convert them, and prove it.

    Trains the target on Python's own documentation and the heads with ModelOpt (some minutes on two cores, once;
    they are kept in $KCONV_CACHE, else ~/.cache/kconv), converts them from TensorRT-LLM's layout to vLLM's and
    back, and compares ModelOpt's own module before with kconv's forward after.

    \b
    Example:
      kconv demo my-demo
    """
    from ..checkpoint.staging import refuse_existing

    refuse_existing(out)
    from ..pipeline.demo import run_demo
    from ..tiny.recipe import cache_root
    from .output import print_demo

    _quiet_transformers()
    with _bars() as stage:
        made = run_demo(out, cache_root(), stage)
    print_demo(out, made)


def _quiet_transformers() -> None:
    """Keep transformers' own bars out of the demo's."""
    from transformers.utils import logging

    logging.disable_progress_bar()


@contextmanager
def _bars() -> Iterator[Callable]:
    """Show one bar for each stage on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<36}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:

        @contextmanager
        def stage(title: str) -> Iterator[Callable[[int, int, float], None]]:
            if not bars.console.is_terminal:
                # A bar that is written to a log is seen when all is over.
                click.echo(title, err=True)
            task = bars.add_task(title, total=None, note="")

            def advance(done: int, steps: int, loss: float) -> None:
                bars.update(task, completed=done, total=steps, note=f"loss {loss:.2f}")

            yield advance
            total = bars.tasks[task].total or 1
            bars.update(task, total=total, completed=total)

        yield stage
