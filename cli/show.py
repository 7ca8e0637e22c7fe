"""The printer: what results say of themselves, on stdout, or as one JSON object. It knows none of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from ..lines import Facts, Line, Part, Result, Styled, Table, Words
from .terminal import echo, make_console, margin

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

# Line width for files and pipes; longer than any of kconv's lines.
UNFOLDED = 400


def show(result: Result, *, as_json: bool, **how: bool) -> None:
    """Print a result.

    Args:
        result: of an operation, or of its preview.
        as_json: whether as one JSON object.
        how: what its `lines` may be asked.
    """
    if as_json:
        print_json(result.to_json())
    else:
        show_lines(result.lines(**how), folds=result.FOLDS)


def show_lines(lines: Iterable[Part], *, folds: bool = False) -> None:
    """Print lines; without a terminal they are not folded, so that grep finds names, except if `folds`."""

    @cache
    def console() -> Console:
        found = make_console()
        return found if folds or found.is_terminal else make_console(width=UNFOLDED)

    for row in lines:
        if isinstance(row, str):
            echo(row, wraps=True)
        elif isinstance(row, Line) and row.err:
            echo(_text(row.words).plain, err=True, wraps=row.wraps)
        elif isinstance(row, Line):
            text = _text(row.words, console().encoding)
            for line in _folded(text, console()) if row.wraps and console().is_terminal else (text,):
                console().print(line, soft_wrap=not row.wraps)
        else:
            shown = _grid(row) if isinstance(row, Facts) else _table(row, console().width, folds=folds)
            if console().is_terminal:
                console().print(shown)
                continue
            with console().capture() as captured:
                console().print(shown)
            # In a file nobody needs the blanks that fill a terminal's row.
            echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def print_json(value: Any) -> None:
    """Print one JSON object on stdout."""
    echo(value if isinstance(value, str) else json.dumps(value, indent=2), nl=not str(value).endswith("\n"))


def _text(words: Words, encoding: str = "utf-8") -> Text:
    from rich.text import Text

    found = Text()
    for part in (words,) if isinstance(words, str) else words:
        text, style = part if isinstance(part, Styled) else (part, "")
        # A dot between words, where the terminal has one.
        found.append(text if encoding.startswith("utf") else text.replace(" · ", " | "), style)
    return found


def _folded(text: Text, console: Console) -> Iterator[Text]:
    """Yield a text's lines, folded between words, with what continues one indented as its beginning."""
    for line in text.split("\n", allow_blank=True):
        indent = margin(line.plain)
        head, rest = line[:indent], line[indent:]
        for number, part in enumerate(rest.wrap(console, max(console.width - indent, 1))):
            yield part if not indent else (head + part if not number else part.__class__(" " * indent) + part)


def _grid(row: Facts) -> RichTable:
    from rich.table import Column, Table

    grid = Table.grid(Column(), Column(overflow="fold"), padding=(0, 2))
    for name, fact in row.facts.items():
        grid.add_row(_text((Styled(name, "bold"),)), _text(fact))
    return grid


def _table(row: Table, width: int, *, folds: bool) -> RichTable:
    """Return a table; where pipes do not fold it, a narrow terminal folds names but never cuts them."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(row.title) or None, show_header=bool(row.columns), box=None, header_style="bold")
    # What a row is of stays whole if there is room; what is said of it folds.
    longest = max((len(_text(cells[0]).plain) for cells in row.rows if cells), default=0)
    for place, name in enumerate(row.columns or ("", "")):
        table.add_column(
            escape(name),
            justify="right" if row.right and place else "left",
            overflow="ellipsis" if folds else "fold",
            min_width=None if place else min(longest, width // 2),
        )
    for cells in row.rows:
        table.add_row(*map(_text, cells))
    return table
