"""`kconv validate`."""

import click


@click.command()
def validate() -> None:
    """Not yet."""
