"""docs/attention.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kconv.tiny.recipe import cache_root

from .attention_beds import BEDS
from .attention_healing import describe_healing
from .attention_memory import describe_memory
from .attention_rounding import describe_rounding
from .attention_rows import ROWS_OF_TABLE, cell, errors
from .attention_size import describe_size
from .attention_store import load, measured_on, store
from .page import DOCS

PAGE = DOCS / "attention.md"


def write_page() -> None:
    """Write each part that was measured between its markers; the others stay as they are."""
    text, done = PAGE.read_text(), 0
    for name, (stores, describe) in PARTS.items():
        if all(store(one).exists() for one in stores):
            text, done = fill(text, name, describe()), done + 1
    if not done:
        raise SystemExit(f"error: {cache_root()} has no figures; set KCONV_CACHE to where they were measured")
    PAGE.write_text(text)


def fill(text: str, name: str, lines: list[str]) -> str:
    """Return the page with other lines between the markers of that name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, begun, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        raise SystemExit(f"error: {PAGE} has no {begin} with {end} behind it")
    return "\n".join([before + begin, "", *lines, "", end + after])


def describe_bed(bed: str) -> list[str]:
    """Return a bed's table, and what was tried instead."""
    found = load(bed)
    steps = sorted({int(s) for row in found.values() for s in row})
    rows = {name: row for name, row in ROWS_OF_TABLE.items() if name in found}
    sizes = [BEDS[bed].parameters(row.head) / 1e6 for row in rows.values()]
    every = [figures for name in rows for one in found[name].values() for figures in one["figures"].values()]
    lines = [
        f"### On {BEDS[bed].says}",
        "",
        f"Heads of {min(sizes):.1f} to {max(sizes):.1f} million parameters; {errors(every)}.",
        f"Measured on {measured_on(bed)}.",
        "",
        "| conversion | original | " + " | ".join(f"{s:,} steps" for s in steps) + " | longer | code |",
        "| --- | --- | " + " | ".join("---" for _ in steps) + " | --- | --- |",
    ]
    # Beside each conversion, what was tried in its place.
    instead: dict[str, list[str]] = {}
    for name, row in rows.items():
        if row.choices or row.slots != "all":
            last = [f"{one} after {s:,}" for s in steps[1:] if (one := _cell(found[name].get(str(s)), "held-out"))]
            kept = ", ".join([_cell(found[name]["0"], "held-out"), *last])
            same = (one.says for one in ROWS_OF_TABLE.values() if (one.head, one.ratio) == (row.head, row.ratio))
            instead.setdefault(next(same), []).append(f"{row.says} {kept}")
            continue
        cells = [_cell(found[name].get(str(s)), "held-out") for s in steps]
        last = found[name][max(found[name], key=int)]
        before = last["figures"]["held-out"]["before"]
        away = [_cell(last, text) for text in ("1,024 tokens", "source code")]
        lines.append(f"| {row.says} | {before:.3f} | " + " | ".join([*cells, *away]) + " |")
    others = [f"- {says}: {'; '.join(tried)}." for says, tried in instead.items()]
    return [*lines, *(["", "What was tried instead:", "", *others] if others else [])]


def _cell(figures: dict | None, text: str) -> str:
    return cell(figures["figures"][text]) if figures and text in figures["figures"] else ""


# What stands between the markers of each name, and what it needs.
PARTS: dict[str, tuple[tuple[str, ...], Callable[[], list[str]]]] = {
    **{f"bed-{bed}": ((bed,), partial(describe_bed, bed)) for bed in BEDS},
    "healing": (("healing", "bytes"), describe_healing),
    "bf16": (("bf16",), describe_rounding),
    "size": (("size",), describe_size),
    "memory": (("memory",), describe_memory),
}
