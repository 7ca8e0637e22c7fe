"""Which prompts a head was trained on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..convert.provenance import read_provenance
from ..convert.read import Head
from ..targets.prompts import KEPT, Prompt


def prompt_digest(turns: Sequence[str]) -> str:
    """Return the digest of what a user said, as held-out prompts have it."""
    return Prompt("", "", tuple(turns)).digest


def record_prompts(digests: Iterable[str], start: Head | None) -> list[str]:
    """Return the beginnings of prompts' digests, for the manifest.

    Args:
        digests: of the prompts that are trained on; "" where a prompt's text is not known.
        start: a head that training goes on from; what it was trained on counts too.
    """
    told = read_provenance(start.checkpoint.folder).training if start else None
    before = told.get("data", {}).get("prompts", ()) if told else ()
    return sorted({*before, *(digest[:KEPT] for digest in digests if digest)})
