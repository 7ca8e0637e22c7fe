"""Ask for many things in parallel, and again where a connection broke."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

from ..errors import ConnectionBroken

# One broken connection must not end hours of measuring or training.
ATTEMPTS, PAUSE_SECONDS = 5, 1.0
One = TypeVar("One")
Found = TypeVar("Found")


def ask_all(
    ask: Callable[[One], Found], asked: Sequence[One], at_once: int
) -> Generator[tuple[int, Found], None, None]:
    """Call `ask` on each of `asked`, `at_once` in parallel; yield the place and result of each as it finishes.

    A caller that stops or fails does not wait for requests in flight. Python joins an executor's threads before it
    exits, and one answer of a large target takes minutes, so these threads are daemons. Their requests end with the
    process, and the server drops requests without a client.

    Raises:
        BaseException: the first one that `ask` raised.
    """
    waiting: SimpleQueue[tuple[int, One]] = SimpleQueue()
    ended: SimpleQueue[tuple[int, Found] | BaseException] = SimpleQueue()
    for pair in enumerate(asked):
        waiting.put(pair)

    def work() -> None:
        with suppress(Empty):
            while True:
                place, one = waiting.get_nowait()
                try:
                    ended.put((place, ask(one)))
                except BaseException as fault:
                    ended.put(fault)
                    return

    try:
        for _ in range(min(at_once, len(asked))):
            Thread(target=work, daemon=True).start()
        for _ in asked:
            found = ended.get()
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        with suppress(Empty):
            while True:
                waiting.get_nowait()


def ask_each(ask: Callable[[One], Found], asked: Sequence[One], at_once: int) -> list[Found]:
    """Like `ask_all`, but in the order of `asked`, and so that a caller may ask for all of them again.

    Raises:
        ConnectionBroken: a connection broke; raised once nothing is under way.
    """

    def ask_one(one: One) -> Found | ConnectionBroken:
        try:
            return ask(one)
        except ConnectionBroken as fault:
            return fault

    answers: list[Found] = []
    found = dict(ask_all(ask_one, asked, at_once))
    for place in range(len(asked)):
        if isinstance(one := found[place], ConnectionBroken):
            raise one
        answers.append(one)
    return answers


def again(ask: Callable[[], Found]) -> Found:
    """Call `ask`, and again after a pause if a connection broke.

    Raises:
        ConnectionBroken: it broke `ATTEMPTS` times.
    """
    for turn in range(1, ATTEMPTS):
        with suppress(ConnectionBroken):
            return ask()
        time.sleep(PAUSE_SECONDS * turn)
    return ask()
