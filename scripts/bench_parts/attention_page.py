"""docs/attention.md, and its experiments in docs/evidence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kconv.tiny.recipe import cache_root

from .attention_beds import BEDS
from .attention_healing import describe_healing
from .attention_memory import describe_memory
from .attention_rounding import describe_rounding
from .attention_rows import ROWS_OF_TABLE, cell, share
from .attention_size import describe_size
from .attention_store import load, measured_on, store
from .page import DOCS, EVIDENCE

PAGES = DOCS / "attention.md", EVIDENCE / "attention.md"


def write_page() -> None:
    """Write each part that was measured between its markers; the others stay as they are."""
    found = {name: make() for name, (stores, make) in PARTS.items() if all(store(one).exists() for one in stores)}
    if not found:
        raise SystemExit(f"error: {cache_root()} has no figures; set KCONV_CACHE to where they were measured")
    for name, lines in found.items():
        page = next((one for one in PAGES if _mark(name) in one.read_text()), None)
        if page is None:
            raise SystemExit(f"error: no page has {_mark(name)}")
        page.write_text(fill(page.read_text(), name, lines))


def _mark(name: str, end: str = "begin") -> str:
    return f"<!-- {name}: {end} -->"


def fill(text: str, name: str, lines: list[str]) -> str:
    """Return the page with other lines between the markers of that name."""
    begin, end = _mark(name), _mark(name, "end")
    before, begun, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        raise SystemExit(f"error: no page has {begin} with {end} behind it")
    return "\n".join([before + begin, "", *lines, "", end + after])


def describe_bed(bed: str) -> list[str]:
    """Return a bed's table, what is kept on other texts, and what was tried instead."""
    found = load(bed)
    rows = {name: row for name, row in ROWS_OF_TABLE.items() if name in found}
    sizes = [BEDS[bed].parameters(row.head) / 1e6 for row in rows.values()]
    lines = [
        f"### On {BEDS[bed].says}",
        "",
        f"Heads of {min(sizes):.1f} to {max(sizes):.1f} million parameters. Measured on {measured_on(bed)}.",
        "",
        "| conversion | steps | original | converted | kept, sampled | kept, greedy |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    away: list[str] = []
    # Beside each conversion, what was tried in its place.
    instead: dict[str, list[str]] = {}
    for name, row in rows.items():
        by_steps = {int(steps): one["figures"] for steps, one in found[name].items()}
        steps, last = max(by_steps.items())
        if row.choices or row.slots != "all":
            kept = ", ".join(
                f"{cell(one['held-out'])} after {s:,}" if s else cell(one["held-out"]) for s, one in by_steps.items()
            )
            same = (one.says for one in ROWS_OF_TABLE.values() if (one.head, one.ratio) == (row.head, row.ratio))
            instead.setdefault(next(same), []).append(f"{row.says} {kept}")
            continue
        lines += [f"| {row.says} | {s:,} | {_cells(one['held-out'])} |" for s, one in sorted(by_steps.items())]
        others = [f"{share(one)} on {text}" for text, one in last.items() if text != "held-out"]
        away += [f"- {row.says}, after {steps:,} steps: {', '.join(others)}."] if others else []
    tried = [f"- {says}: {'; '.join(one)}." for says, one in instead.items()]
    for title, texts in (("Kept on other texts, sampled:", away), ("What was tried instead, sampled:", tried)):
        lines += ["", title, "", *texts] if texts else []
    return lines


def _cells(figures: dict) -> str:
    """Return a row's cells: both acceptance lengths, and the shares that are kept."""
    lengths = figures["before"] if figures["trained"] is None else figures["trained"], figures["after"]
    return " | ".join([*(f"{one:.3f}" for one in lengths), share(figures), share(figures, "greedy_kept")])


# What stands between the markers of each name, and what it needs.
PARTS: dict[str, tuple[tuple[str, ...], Callable[[], list[str]]]] = {
    **{f"bed-{bed}": ((bed,), partial(describe_bed, bed)) for bed in BEDS},
    "healing": (("healing", "bytes"), describe_healing),
    "bf16": (("bf16",), describe_rounding),
    "size": (("size",), describe_size),
    "memory": (("memory",), describe_memory),
}
