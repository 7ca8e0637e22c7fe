"""Progress on stderr: bars on a terminal, occasional lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..lines import duration
from ..operations.base import Context
from .terminal import echo, make_console

# Seconds between two lines without a terminal for a bar.
EVERY = 30.0


class Terminal(Context):
    """An operation's context on the command line."""

    def log(self, text: str) -> None:
        """Print a line."""
        echo(text, err=True)

    @contextmanager
    def status(self, title: str) -> Iterator[Callable[[str], None]]:
        """Show a spinner with a message."""
        from rich.markup import escape

        with make_console(stderr=True).status(title) as shown:
            yield lambda text: shown.update(escape(f"{title}: {text}"))

    @contextmanager
    def bytes(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show bytes, rate and time left."""
        if not sys.stderr.isatty():
            yield _Lines(title, total).advance
            return
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=make_console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda count: bar.update(task, advance=count)

    @contextmanager
    def steps(self, title: str) -> Iterator[Callable[[int, int, float], None]]:
        """Show steps done, steps in all, and the loss."""
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=make_console(stderr=True)) as bars:
            task = bars.add_task(title, total=None, note="")
            yield lambda done, total, loss: bars.update(task, completed=done, total=total, note=f"loss {loss:.3f}")


class _Lines:
    """Counts bytes, and prints the progress now and then."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, total, 0
        self._begin = self._shown = time.monotonic()

    def advance(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._shown >= EVERY:
            self._show()

    def _show(self) -> None:
        self._shown = time.monotonic()
        rate = self._done / max(self._shown - self._begin, 1e-9)
        left = (self._total - self._done) / rate if rate else float("nan")
        echo(
            f"{self._title}: {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, "
            f"{rate / 1e6:.0f} MB/s, {duration(left)} left",
            err=True,
        )
