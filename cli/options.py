"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from ..calibrate.retention import MIN_RETENTION
from ..checkpoint.source import Source, resolve

if TYPE_CHECKING:
    from ..checkpoint.folder import Checkpoint
    from ..convert.captured import Hints
    from ..convert.read import Head
    from ..engines.layout import Layout
    from ..targets.config import TargetConfig

FOLDER = click.Path(path_type=Path)


class PathOrId(click.ParamType):
    """A path, or a hub id org/name[@revision]; resolved here, so that one command sees one commit."""

    name = "PATH_OR_ID"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete paths."""
        return [CompletionItem(incomplete, type="file")]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Source:
        return resolve(value) if isinstance(value, str) else value


PATH_OR_ID = PathOrId()


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


keeping = click.option(
    "--keep",
    metavar="SHARE",
    default=MIN_RETENTION,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Refuse what keeps less of the acceptance length on held-out text.",
)


def reading(command: Callable) -> Callable:
    """Add the options that say what a head's config leaves open."""
    for option in (
        click.option("--from", "layout", metavar="LAYOUT", help="The layout HEAD is in, if its marks do not tell."),
        click.option(
            "--captured",
            type=LayerIds(),
            help="Captured layers, if the config does not list them; where it does, a reading of that list.",
        ),
        click.option(
            "--captured-are",
            type=click.Choice(["outputs", "inputs"]),
            help="Whether the listed layers are outputs or inputs of 0-based decoder layers.",
        ),
        click.option("--max-positions", type=click.IntRange(min=1), help="Longest context that will be served."),
        click.option(
            "--norm-before-residual",
            type=click.BOOL,
            metavar="YES_OR_NO",
            help="Whether layer 0's residual is normed, if a config that readers disagree on does not state it.",
        ),
        click.option("--target", type=PATH_OR_ID, help="The target model; its depth decides default captures."),
    ):
        command = option(command)
    return command


def told(*names: str) -> list[str]:
    """Return which of the running command's options the user gave, by their names in the code; as they are written."""
    context = click.get_current_context()
    given = [param for param in context.command.params if param.name in names]
    return [p.opts[0] for p in given if context.get_parameter_source(str(p.name)) is ParameterSource.COMMANDLINE]


def check_trusted(trust_remote_code: bool, target: Source | None) -> None:
    """Refuse to run the code of a target's tokenizer unless the user named the commit that it is of.

    Raises:
        UsageError: --trust-remote-code is given, and the target may be another one tomorrow.
    """
    if trust_remote_code and target and not target.pinned:
        raise click.UsageError(f"--trust-remote-code runs code of one commit only; name it: {target.name}")


def open_head(source: Source, **options: Any) -> Head:
    """Open a head with its weights, downloaded if need be, as the options of `reading` say.

    Raises:
        TargetInvalid: the head reads other hidden states, or another vocabulary, than the target's.
    """
    return _open(source.open_weights(), **options)


def open_headers(source: Source, **options: Any) -> Head:
    """Open a head by its config and headers alone, as the options of `reading` say; see `open_head`."""
    return _open(source.open_headers(), **options)


def _open(checkpoint: Checkpoint, *, target: Source | None = None, **options: Any) -> Head:
    from ..convert.opening import open_head as open_beside

    layout, hints, _ = read_options(**options)
    return open_beside(checkpoint, layout, hints, target)


def read_options(
    *,
    layout: str | None = None,
    captured: tuple[int, ...] | None = None,
    captured_are: str | None = None,
    max_positions: int | None = None,
    norm_before_residual: bool | None = None,
    target: Source | None = None,
) -> tuple[Layout | None, Hints, TargetConfig | None]:
    """Return what the options of `reading` say: the layout, the hints, and the target's config where one was given."""
    from ..convert.captured import Hints
    from ..engines import by_name
    from ..targets.config import read_target_config

    config = read_target_config(target.fetch_config()) if target else None
    layers = config.layers if config else None
    hints = Hints(captured, captured_are, layers, max_positions, norm_before_residual)
    return (by_name(layout) if layout else None), hints, config
