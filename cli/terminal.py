"""The one place where text is printed to a terminal, with control characters escaped."""

from __future__ import annotations

import re
import shutil
import sys
from functools import cache
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Any

import click

from ..escape import terminal

if TYPE_CHECKING:
    from rich.console import Console


# What a continued line is indented by: its own spaces, and the label of a part of an error.
MARGIN = re.compile(r" *(?:(?:where|fix|see): +)?")


def echo(text: object = "", *, err: bool = False, nl: bool = True, wraps: bool = False, behind: int = 0) -> None:
    """Print a text, on stderr if `err`.

    Args:
        wraps: whether a terminal folds it between words, as prose.
        behind: columns of its first line that are taken already.
    """
    shown = terminal(text)
    if wraps and (sys.stderr if err else sys.stdout).isatty():
        shown = folded(shown, shutil.get_terminal_size().columns, behind)
    click.echo(shown, err=err, nl=nl)


def folded(text: str, columns: int, behind: int = 0) -> str:
    """Fold a text's lines between words; a longer word, such as a path, stays whole, and behind its label if alone."""
    lines = []
    for number, line in enumerate(text.split("\n")):
        indent = margin(line)
        alone = " " not in line[indent:]
        start = " " * (0 if number else behind)
        wrapper = TextWrapper(
            columns,
            initial_indent=start,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines.append("\n".join(wrapper.wrap(line))[len(start) :] if len(start + line) > columns and not alone else line)
    return "\n".join(lines)


def margin(line: str) -> int:
    """Return by how many columns the continuation of a folded line is indented."""
    found = MARGIN.match(line)
    return found.end() if found else 0


def make_console(**how: Any) -> Console:
    """Return a rich console that prints no control character of a text; arguments as in rich."""
    return _console_class()(**how)


@cache
def _console_class() -> type[Console]:
    # Imported here: rich takes a tenth of a second, for which help should not wait.
    from rich.console import Console

    class Printed(Console):
        """A rich console that shows every character of a text and obeys none."""

        def render(self, *arguments: Any, **more: Any) -> Any:
            for segment in super().render(*arguments, **more):
                # Cursor movements and styles are rich's own, not part of the text.
                yield segment if segment.control else segment._replace(text=terminal(segment.text))

    return Printed
