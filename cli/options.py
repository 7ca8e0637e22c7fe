"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

FOLDER = click.Path(path_type=Path)


class LayerIds(click.ParamType):
    """Comma-separated, ascending layer ids, e.g. 1,29,57."""

    name = "IDS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            ids = tuple(int(part) for part in value.split(","))
        except ValueError:
            ids = ()
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0:
            self.fail(f"{value!r} is no ascending list like 1,29,57", param, ctx)
        return ids


def reading(command: Callable) -> Callable:
    """Add the options that say what a head's config leaves open."""
    for option in (
        click.option("--from", "layout", metavar="LAYOUT", help="The layout HEAD is in, if its marks do not tell."),
        click.option("--captured", type=LayerIds(), help="Captured layers, if the config does not list them."),
        click.option(
            "--captured-are",
            type=click.Choice(["outputs", "inputs"]),
            help="Whether the listed layers are outputs or inputs of 0-based decoder layers.",
        ),
        click.option("--max-positions", type=click.IntRange(min=1), help="Longest context that will be served."),
        click.option("--target", type=FOLDER, help="The target model; its depth decides default captures."),
    ):
        command = option(command)
    return command


def open_head(
    folder: Path,
    *,
    layout: str | None = None,
    captured: tuple[int, ...] | None = None,
    captured_are: str | None = None,
    max_positions: int | None = None,
    target: Path | None = None,
):
    """Open a head as the options of `reading` say."""
    from ..checkpoint.folder import open_checkpoint
    from ..convert.captured import Hints
    from ..convert.layouts import by_name
    from ..convert.read import read_head
    from ..target.config import read_target_config

    layers = read_target_config(target).layers if target else None
    return read_head(
        open_checkpoint(folder),
        layout=by_name(layout) if layout else None,
        hints=Hints(captured, captured_are, layers, max_positions),
    )
