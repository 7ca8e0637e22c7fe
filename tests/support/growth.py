"""How time grows with the size of an input: a ratio within one run, which holds on a machine of any speed and load."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from support.fuzzing import Hung, bounded

Value = TypeVar("Value")
# Times that twice the input may take: 2 where time is linear, 4 where it is quadratic.
LINEAR = 3.0
TRIES, ATTEMPTS = 3, 5


def growth(run: Callable[[Value], object], make: Callable[[int], Value], size: int) -> float:
    """Return how many times as long an input of twice the size takes, from `size` to four times that.

    Args:
        run: what is measured.
        make: returns its input of a size; not measured.
        size: the smallest.
    """
    small, large = make(size), make(4 * size)
    found = float("inf")
    # Of this thread's own time, and the best of several: what else runs can only slow it down.
    for _ in range(ATTEMPTS):
        try:
            with bounded(cpu=3):
                found = min(found, (_least(run, large) / _least(run, small)) ** 0.5)
        except Hung:
            return float("inf")
        if found < LINEAR:
            break
    return found


def _least(run: Callable[[Value], object], value: Value) -> float:
    seconds = []
    for _ in range(TRIES):
        begun = time.thread_time()
        run(value)
        seconds.append(time.thread_time() - begun)
        # What takes this long is no noise.
        if seconds[-1] > 0.2:
            break
    return min(seconds)
