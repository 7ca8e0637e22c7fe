"""Progress on stderr: bars on a terminal, occasional lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, Timer
from typing import TYPE_CHECKING

from ..lines import duration
from ..operations.base import Context
from .terminal import echo, make_console

if TYPE_CHECKING:
    from rich.console import Console

# Seconds between two lines without a terminal for a bar.
EVERY = 30.0
# Seconds that a terminal may stay still.
PATIENCE = 1.0


class Terminal(Context):
    """An operation's context on the command line."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: Console | None = None
        self._lock, self._timer, self._spinner = Lock(), None, None

    @contextmanager
    def waiting(self, title: str) -> Iterator[None]:
        """Show a spinner if the operation shows nothing for a while: libraries take seconds to load."""
        if sys.stderr.isatty():
            self._timer = Timer(PATIENCE, self._spin, [title])
            self._timer.daemon = True
            self._timer.start()
        try:
            yield
        finally:
            self._begin()

    def _spin(self, title: str) -> None:
        with self._lock:
            if self._timer is not None:
                self._spinner = make_console(stderr=True).status(title)
                self._spinner.start()

    def _begin(self) -> None:
        """End the waiting: the operation shows something itself, or is done."""
        with self._lock:
            timer, self._timer = self._timer, None
            spinner, self._spinner = self._spinner, None
        if timer is not None:
            timer.cancel()
        if spinner is not None:
            spinner.stop()

    def log(self, text: str) -> None:
        """Print a line, above what is shown."""
        self._begin()
        if self._shown is not None and self._shown.is_terminal:
            self._shown.print(text, markup=False, highlight=False)
        else:
            echo(text, err=True, wraps=True)

    @contextmanager
    def _showing(self) -> Iterator[Console]:
        """Give the console of a bar or spinner, above which lines are printed until it ends."""
        outer, self._shown = self._shown, make_console(stderr=True)
        try:
            yield self._shown
        finally:
            self._shown = outer

    @contextmanager
    def status(self, title: str) -> Iterator[Callable[[str], None]]:
        """Show a spinner with a message."""
        from rich.markup import escape

        self._begin()
        with self._showing() as console, console.status(title) as shown:
            yield lambda text: shown.update(escape(f"{title}: {text}"))

    @contextmanager
    def bytes(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show bytes, rate and time left."""
        self._begin()
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
        with self._showing() as console, Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda count: bar.update(task, advance=count)

    @contextmanager
    def steps(self, title: str) -> Iterator[Callable[[int, int, float], None]]:
        """Show steps done, steps in all, and the loss; a spinner until the first step says how many there are."""
        self._begin()
        if not sys.stderr.isatty():
            yield _Steps(title).advance
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
        task = None

        def advance(done: int, total: int, loss: float) -> None:
            nonlocal task
            if task is None:
                before.stop()
                task = bars.add_task(title, total=total, note="")
                bars.start()
            bars.update(task, completed=done, total=total, note=f"loss {loss:.3f}")

        with self._showing() as console:
            bars = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
            before = console.status(f"{title}: preparing")
            before.start()
            try:
                yield advance
            finally:
                before.stop()
                bars.stop()


class _Steps:
    """Prints steps, the loss and the time left now and then."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._begin = self._shown = time.monotonic()

    def advance(self, done: int, total: int, loss: float) -> None:
        now = time.monotonic()
        if now - self._shown >= EVERY or done == total:
            self._shown = now
            left = f", {duration((now - self._begin) * (total - done) / done)} left" if 0 < done < total else ""
            echo(f"{self._title}: step {done} of {total}, loss {loss:.3f}{left}", err=True)


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
