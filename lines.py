"""What a result says, as values: lines and tables, free of a terminal's width and of its control codes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from .escape import command


class Styled(NamedTuple):
    """A part of a line in a style, e.g. "bold red"."""

    text: str
    style: str


Words = str | tuple[str | Styled, ...]
"""A text, or its parts."""


@dataclass(frozen=True)
class Line:
    """A line: a terminal folds it between words if it `wraps`; on stderr (`err`) if it is not the result."""

    words: Words
    wraps: bool = True
    err: bool = False


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        columns: their headings; empty for two columns without any.
        right: whether all columns but the first are aligned right.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Words]]
    title: str = ""
    right: bool = False


@dataclass(frozen=True)
class Facts:
    """Names in bold, each followed by its fact."""

    facts: Mapping[str, Words]


Part = str | Line | Table | Facts
"""A part of what a result says; a text is a line without a style, which a pipe never folds."""


class Result:
    """What an operation returns: it shows itself. With `FOLDS` a pipe folds its tables and lines too, at 80 columns."""

    FOLDS: ClassVar[bool] = False

    def lines(self) -> Iterable[Part]:
        """Return what the command line prints."""
        raise NotImplementedError

    def to_json(self) -> Any:
        """Return it as plain values, or as the text of its JSON."""
        raise NotImplementedError

    def __repr__(self) -> str:
        plain = {name: value for name, value in vars(self).items() if isinstance(value, (str, os.PathLike, int, float))}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in plain.items())})"


def filename(name: str | os.PathLike[str]) -> str:
    """Return a file's name as a text, whatever its bytes."""
    return os.fspath(name).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def next_command(*words: str | os.PathLike[str]) -> Line:
    """Return a line with the next kconv command, quoted for a shell, and whole so that it can be copied."""
    return Line(f"next: kconv {command(map(filename, words))}", wraps=False)


def counted(count: int, what: str) -> str:
    """Return a number of things in words, e.g. "2 errors"."""
    return f"{count} {what}{'s' * (count != 1 and what != 'undecided')}"


def duration(seconds: float) -> str:
    if seconds != seconds:
        return "unknown"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def megabytes(count: int) -> str:
    """Return a number of bytes in readable form."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
