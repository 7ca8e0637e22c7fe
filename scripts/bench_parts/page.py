"""docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "benchmarks.md"
ORDER = (
    "machine", "start", "demo", "convert", "memory", "speculators", "verify", "validate", "pack", "rates", "quantize",
    "quantize-head", "train", "train-memory", "capture", "chain", "reads", "gpu",
)  # fmt: skip


def put(text: str, name: str, lines: Sequence[str]) -> str:
    """Return the page with a section in its place: behind the one that comes before it in `ORDER`."""
    begin, end = f"<!-- bench-{name}: begin -->", f"<!-- bench-{name}: end -->"
    section = "\n".join([begin, *lines, end])
    if begin in text:
        before, _, rest = text.partition(begin)
        return before + section + rest.partition(end)[2]
    # Before the first section that comes later, as the first of all follows the page's own words.
    later = [f"<!-- bench-{one}: begin -->" for one in ORDER[ORDER.index(name) + 1 :]]
    places = [text.index(marker) for marker in later if marker in text]
    if not places:
        return f"{text.rstrip()}\n\n{section}\n"
    return f"{text[: min(places)]}{section}\n\n{text[min(places) :]}"


def write_section(name: str, lines: Sequence[str]) -> None:
    """Write a section into its place, and leave the others alone."""
    PAGE.write_text(put(PAGE.read_text(), name, lines))


def read_section(name: str) -> str:
    """Return a section as it stands in the page; empty where it has none."""
    return PAGE.read_text().partition(f"<!-- bench-{name}: begin -->")[2].partition(f"<!-- bench-{name}: end -->")[0]
