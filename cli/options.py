"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from ..checkpoint.source import Source, resolve

if TYPE_CHECKING:
    from ..checkpoint.folder import Checkpoint
    from ..convert.captured import Hints
    from ..convert.layout import Layout
    from ..convert.read import Head
    from ..head.spec import HeadSpec
    from ..target.config import TargetConfig

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


def open_head(source: Source, **options: Any) -> Head:
    """Open a head with its weights, downloaded if need be, as the options of `reading` say.

    Raises:
        TargetInvalid: the head reads other hidden states, or another vocabulary, than the target's.
    """
    return _open(source.name, source.open_weights(), **options)


def open_headers(source: Source, **options: Any) -> Head:
    """Open a head by its config and headers alone, as the options of `reading` say; see `open_head`."""
    return _open(source.name, source.open_headers(), **options)


def open_source(source: Source, output: Source, *, target: Source | None) -> Head:
    """Open the head that an output was made of, as it was read then: by its own marks, and by what was said of it."""
    from ..convert.told import how_source_was_read

    checkpoint = source.open_weights()
    layout, hints = how_source_was_read(output, checkpoint)
    layers = read_options(target=target)[1].target_layers
    return _read(source.name, checkpoint, layout, replace(hints, target_layers=layers or hints.target_layers))


def _open(name: str, checkpoint: Checkpoint, *, target: Source | None = None, **options: Any) -> Head:
    layout, hints, config = read_options(target=target, **options)
    head = _read(name, checkpoint, layout, hints)
    if target and config:
        _check_fit(head.spec, config, target.name)
    return head


def _check_fit(spec: HeadSpec, target: TargetConfig, name: str) -> None:
    from ..errors import TargetInvalid

    if (spec.target_hidden, spec.vocab) != (target.hidden, target.vocab):
        raise TargetInvalid(
            f"the head reads hidden states {spec.target_hidden} wide and a vocabulary of {spec.vocab:,}; the target's "
            f"are {target.hidden} wide and {target.vocab:,}",
            where=name,
            fix="Give the target that the head was trained on, or state target_hidden_size in the head's config.",
        )


def _read(name: str, checkpoint: Checkpoint, layout: Layout | None, hints: Hints) -> Head:
    from ..convert.read import claim_tensors, read_head
    from ..errors import KconvError

    read = claim_tensors if checkpoint.headers_only else read_head
    try:
        return read(checkpoint, layout=layout, hints=hints)
    except KconvError as fault:
        # What reads a config does not know whose it is, and a command may have two.
        if fault.where == "config.json":
            fault.where = f"{name}/config.json"
        raise


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
    from ..convert.layouts import by_name
    from ..target.config import read_target_config

    config = read_target_config(target.fetch_config()) if target else None
    layers = config.layers if config else None
    hints = Hints(captured, captured_are, layers, max_positions, norm_before_residual)
    return (by_name(layout) if layout else None), hints, config
