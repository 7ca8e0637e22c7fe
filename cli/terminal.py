"""What is printed: the one place where text goes to a terminal, and where what it would obey is taken out."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import click

from ..escape import terminal

if TYPE_CHECKING:
    from rich.console import Console

# Where click keeps whether -v was given.
VERBOSE = "kconv.verbose"


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text, on stderr if `err`."""
    click.echo(terminal(text), err=err, nl=nl)


def make_console(**how: Any) -> Console:
    """Return a rich console that prints no control character of a text; arguments as of rich's own."""
    return _console_class()(**how)


@cache
def _console_class() -> type[Console]:
    # Here, as rich takes a tenth of a second that help must not wait for.
    from rich.console import Console

    class Printed(Console):
        """Rich's console, of which every piece of text is shown and none obeyed."""

        def render(self, *arguments: Any, **more: Any) -> Any:
            for segment in super().render(*arguments, **more):
                # What moves the cursor is rich's own; so is a style, which is no part of the text.
                yield segment if segment.control else segment._replace(text=terminal(segment.text))

    return Printed
