"""What a figure is about.

A line holds figures of the same prompts: one data set at one revision. What a source leaves unsaid of its prompts is
the same within that source, and equals nothing of another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Self

from ..bench.acceptance import LINE, MAY_BE_UNSAID, Row
from .evidence import NOT_STATED

# What tells lines apart that read alike, in this order.
FURTHER = {"prompts": "N = {}", "revision": "revision {}", "prompts_sha256": "prompts' sha256 {}", "source": "of {}"}


@dataclass(frozen=True)
class Spot:
    """What figures of one line are about.

    Attributes:
        dataset, category, revision, prompts, prompts_sha256, domain: as of `Row`.
        source: URL and date of the figures, where their source leaves the revision or the number of prompts unsaid;
            None where it says both.
    """

    dataset: str
    category: str
    revision: str | None = None
    prompts: int | None = None
    prompts_sha256: str | None = None
    domain: str = ""
    source: str | None = None

    @classmethod
    def of(cls, row: Row) -> Self:
        """Return what a figure is about."""
        unsaid = any(row[name] is None for name in LINE if name not in MAY_BE_UNSAID)
        source = ", ".join(filter(None, (row.url, row.date))) if unsaid else None
        return cls(**row.line, domain=row.domain, source=source)

    @property
    def name(self) -> str:
        """Data set and category, e.g. "MT-Bench (math)"."""
        return f"{self.dataset} ({self.category})" if self.category else self.dataset


def tell_apart(names: Sequence[Hashable], spots: Sequence[Spot]) -> list[str]:
    """Return what to add to names of lines, so that no two read alike.

    Args:
        names: what is shown of each line.
        spots: what each is about; no two are equal.

    Returns:
        For each line e.g. ", revision main", and "" where its name is its own.
    """
    told = [""] * len(names)
    for field, words in FURTHER.items():
        values = [getattr(spot, field) for spot in spots]
        held: dict[tuple[Hashable, str], set[object]] = defaultdict(set)
        for name, before, value in zip(names, told, values, strict=True):
            held[name, before].add(value)
        told = [
            f"{before}, {words.format(NOT_STATED if value is None else value)}"
            if len(held[name, before]) > 1
            else before
            for name, before, value in zip(names, told, values, strict=True)
        ]
    return told
