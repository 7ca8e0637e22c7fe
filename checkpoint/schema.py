"""A file that is not of its schema."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


def first_wrong(fault: ValidationError) -> str:
    """Return the first thing that is wrong and its place, e.g. "draft_tokens: Field required"."""
    first = fault.errors()[0]
    place = ".".join(map(str, first["loc"]))
    # What pydantic puts before the words of a validator of kconv's.
    what = first["msg"].removeprefix("Value error, ")
    return f"{place}: {what}" if place else what
