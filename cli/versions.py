"""`kconv --version`: kconv's version, and those of the libraries that a result depends on."""

from __future__ import annotations

from collections.abc import Callable

import click

from .terminal import echo


def version_lines() -> list[str]:
    """Return kconv's version, Python's, and one line for each library."""
    import platform

    from ..installed import LIBRARIES, install_command, version_of

    lines = [
        f"kconv, version {version_of('kconv')}",
        f"Python {platform.python_version()} on {platform.system()} {platform.machine()}",
    ]
    for name, extra in LIBRARIES.items():
        lines.append(
            f"{name} {version_of(name) or 'is not installed' + (f'; {install_command(extra)}' if extra else '')}"
        )
    return lines


def version_option(command: Callable) -> Callable:
    """Add `--version`."""

    def show(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            echo("\n".join(version_lines()))
            ctx.exit()

    return click.option(
        "--version",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show the versions that matter, and exit.",
    )(command)
