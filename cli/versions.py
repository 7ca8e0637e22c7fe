"""`kconv --version`: kconv's version, and those of the libraries that a result depends on.

Read from what is installed beside kconv; none of them is imported.
"""

from __future__ import annotations

from collections.abc import Callable

import click

from .terminal import echo

# The extra that brings a library; empty for those that are always there.
LIBRARIES = {
    "torch": "",
    "safetensors": "",
    "huggingface-hub": "",
    "nvidia-modelopt": "optimize",
    "transformers": "optimize",
    "matplotlib": "plots",
}


def version_lines() -> list[str]:
    """Return kconv's version, Python's, and one line for each library."""
    import platform
    from importlib.metadata import version

    return [
        f"kconv, version {version('kconv')}",
        f"Python {platform.python_version()} on {platform.system()} {platform.machine()}",
        *(f"{name} {_installed(name, extra)}" for name, extra in LIBRARIES.items()),
    ]


def _installed(name: str, extra: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return f"is not installed; pip install '.[{extra}]' in a clone of kconv" if extra else "is not installed"


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
