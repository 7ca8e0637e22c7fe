"""docs/evidence/benchmarks.md."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from .machine import processor

DOCS = Path(__file__).resolve().parents[2] / "docs"
EVIDENCE = DOCS / "evidence"
PAGE = EVIDENCE / "benchmarks.md"
ORDER = (
    "machine", "start", "demo", "convert", "memory", "speculators", "verify", "validate", "pack", "rates", "quantize",
    "weight-scales", "quantize-head", "train", "train-step", "train-memory", "capture", "chain", "reads", "gpu",
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


def closing(program: str, load: float | None = None) -> str:
    """Return a section's last line: its script, the load average, and the machine, if the page's own is another one."""
    machine = f"{os.cpu_count()} cores of {processor()}"
    other = "" if machine in read_section("machine") else f", {machine}"
    return f"`scripts/{program}`, load {os.getloadavg()[0] if load is None else load:.1f}{other}."


def spread(values: Sequence[float], digits: int = 2, unit: str = "") -> str:
    """Return the median of figures, and their range in brackets."""
    low, high = (f"{one:.{digits}f}" for one in (min(values), max(values)))
    return f"{statistics.median(values):.{digits}f}{unit} ({low}–{high})"
