"""`kconv demo`."""

import click


@click.command()
def demo() -> None:
    """Not yet."""
