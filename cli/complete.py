"""Values that a shell offers for options that take more than a few words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from ..engines import registry


def complete_value(context: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Return the values that a shell offers for an option whose type does not know them."""
    known = sorted(VALUES[param.opts[0]](str(context.info_name)))
    found = [CompletionItem(value) for value in known if value.lower().startswith(begun.lower())]
    return found or [CompletionItem(begun, type="file")]


def _recipes(command: str) -> Iterable[str]:
    folder = Path(__file__).parents[1] / command / "recipes"
    return (file.stem for file in folder.glob("*.yaml"))


def _rules(_: str) -> Iterable[str]:
    from ..validate.rules.table import all_rules

    return ("all", *all_rules())


def _licenses(_: str) -> Iterable[str]:
    from ..cards.licenses import LICENSES

    return LICENSES


# What a shell offers for an option, given its command.
VALUES: dict[str, Callable[[str], Iterable[str]]] = {
    "--for": lambda _: registry.asked(),
    "--engine": lambda _: registry.startable(),
    "--from": lambda _: (one.name for one in registry.layouts()),
    "--recipe": _recipes,
    "--explain": _rules,
    "--license": _licenses,
}
