"""The one place where text is printed to a terminal, with control characters escaped."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import click

from ..escape import terminal

if TYPE_CHECKING:
    from rich.console import Console


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text, on stderr if `err`."""
    click.echo(terminal(text), err=err, nl=nl)


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
