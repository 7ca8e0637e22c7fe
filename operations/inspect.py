"""`kconv inspect`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Context, Name, argument
from .reading import Reading

if TYPE_CHECKING:
    from ..convert.read import Head


class Inspect(Reading):
    """Say what HEAD is: its layout, attention, dims, RoPE, captured layers, tensors and parameters.

    Reads the config and the headers, no weights; those of a hub id are read where they are.
    """

    EXAMPLES = ("kconv inspect my-head", "kconv inspect nvidia/Kimi-K2.6-Eagle3")

    head: Name = argument("The head: a folder or a hub id.", kind="checkpoint")

    def run(self, context: Context) -> Head:
        """Return the head, read by its headers."""
        return self.open_headers(context, self.head)
