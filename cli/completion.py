"""`kconv completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command(short_help="Print what makes a shell complete kconv's commands and options.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script for SHELL that completes kconv's commands, options and paths.

    \b
    Example:
      kconv completion bash >> ~/.bashrc
      kconv completion zsh >> ~/.zshrc
      kconv completion fish > ~/.config/fish/completions/kconv.fish
    """
    made = get_completion_class(shell)
    root = ctx.find_root().command
    if made is None:
        raise click.UsageError(f"click has no completion for {shell}")
    click.echo(made(root, {}, "kconv", "_KCONV_COMPLETE").source())
