"""Files of the output made side by side."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from ..errors import WorkerFailed
from .record import Workplace
from .stream import Advance, make_unit
from .units import Unit

POLL = 0.2  # seconds between two looks at what was done


def make_units(units: Sequence[Unit], place: Workplace, *, inputs: str, jobs: int, advance: Advance) -> None:
    """Make some files of the output, in this process or in several.

    Args:
        units: what is to be made.
        place: where.
        inputs: where the input scales come from, for the manifest.
        jobs: processes; with 1 it is this one.
        advance: called in this process with the number of source bytes dealt with since the last call.

    Raises:
        WorkerFailed: a process was killed.
        TensorValue, CorruptHeader, NotACheckpoint, OSError: see `make_unit`.
    """
    for unit in units:
        place.clear(unit.file)
    if jobs == 1 or len(units) < 2:
        for unit in units:
            make_unit(unit, place, inputs=inputs, advance=advance)
        return
    context = get_context("spawn")  # a fork of a process with threads may hang
    done = context.Value("Q", 0)
    try:
        with ProcessPoolExecutor(
            min(jobs, len(units)), mp_context=context, initializer=_start, initargs=(done, os.getpid())
        ) as pool:
            futures = [pool.submit(_make, unit, place, inputs) for unit in units]
            try:
                _follow(futures, done, advance)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    except BrokenProcessPool as fault:
        raise WorkerFailed(
            "a process that packed one of the files was killed",
            fix="It may have been out of memory: give fewer --jobs. Run the same command again to go on.",
        ) from fault


def _follow(futures: list[Future[None]], done: Any, advance: Advance) -> None:
    seen, left = 0, set(futures)
    while left:
        ended, left = wait(left, timeout=POLL, return_when=FIRST_COMPLETED)
        now = done.value
        advance(now - seen)
        seen = now
        for future in ended:
            future.result()


_done: Any = None


def _start(done: Any, parent: int) -> None:
    """Prepare a worker: one thread, and no life beyond its parent's."""
    import torch

    global _done
    _done = done
    torch.set_num_threads(1)
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()


def _die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL)
    os._exit(1)


def _make(unit: Unit, place: Workplace, inputs: str) -> None:
    def advance(count: int) -> None:
        with _done.get_lock():
            _done.value += count

    make_unit(unit, place, inputs=inputs, advance=advance)
