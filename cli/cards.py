"""`kconv card`."""

import click


@click.command()
def card() -> None:
    """Not yet."""
