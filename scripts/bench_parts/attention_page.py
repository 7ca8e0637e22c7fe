"""docs/attention.md."""

from __future__ import annotations

from collections.abc import Callable

from kconv.charts import COLOURS, chart
from kconv.tiny.recipe import cache_root

from .attention_beds import BEDS
from .attention_healing import describe_healing
from .attention_memory import describe_memory
from .attention_rounding import describe_rounding
from .attention_rows import HEALED, ROWS_OF_TABLE, cell, errors
from .attention_size import describe_size
from .attention_store import load, measured_on, store
from .page import DOCS

PAGE = DOCS / "attention.md"
PARTS_MEASURED = ("healing", "bf16", "size")


def write_page() -> None:
    """Write each part between its markers, and the plot."""
    if not any(store(bed).exists() for bed in BEDS):
        raise SystemExit(f"error: {cache_root()} has no figures; set KCONV_CACHE to where they were measured")
    text = PAGE.read_text()
    for name, describe in PARTS.items():
        text = fill(text, name, describe())
    PAGE.write_text(text)
    _plot()


def fill(text: str, name: str, lines: list[str]) -> str:
    """Return the page with other lines between the markers of that name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, begun, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        raise SystemExit(f"error: {PAGE} has no {begin} with {end} behind it")
    return "\n".join([before + begin, "", *lines, "", end + after])


def describe_beds() -> list[str]:
    """Return a table for each bed, and the plot."""
    beds = [bed for bed in BEDS if load(bed)]
    first = next(iter(next(iter(load(beds[0]).values())).values()))["figures"]["held-out"]
    return [
        f"Share of the original's acceptance length that is kept, in %, after healing steps. K={first['steps']}, "
        f"sampled; {first['positions']:,} positions of {first['sequences']} held-out texts of {first['context']} "
        f"tokens.",
        "",
        *(line for bed in beds for line in _describe_bed(bed)),
        "![Acceptance kept against healing steps](attention.png)",
        "",
        f"All of this page was measured on {measured_on(*beds, *PARTS_MEASURED)}.",
    ]


def _describe_bed(bed: str) -> list[str]:
    found = load(bed)
    steps = sorted({int(s) for row in found.values() for s in row})
    rows = {name: row for name, row in ROWS_OF_TABLE.items() if name in found}
    sizes = [BEDS[bed].parameters(row.head) / 1e6 for row in rows.values()]
    every = [figures for name in rows for one in found[name].values() for figures in one["figures"].values()]
    lines = [
        f"### On {BEDS[bed].says}",
        "",
        f"Heads of {min(sizes):.1f} to {max(sizes):.1f} million parameters; {errors(every)}.",
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
    return [*lines, "", *(["What was tried instead:", "", *others, ""] if others else [])]


def _cell(figures: dict | None, text: str) -> str:
    return cell(figures["figures"][text]) if figures and text in figures["figures"] else ""


def _plot() -> None:
    beds = [bed for bed in BEDS if load(bed)]
    with chart(PAGE.with_name("attention.png"), panels=len(beds), width=4.6 * len(beds), height=3.8) as (_, panels):
        for axis, bed in zip(panels, beds, strict=True):
            # A start and an end alone make no curve; they stand in the table.
            curves = {name: row for name, row in load(bed).items() if len(row) > 2}
            for place, (name, row) in enumerate(curves.items()):
                steps = sorted(map(int, row))
                kept = [100 * row[str(s)]["figures"]["held-out"]["kept"] for s in steps]
                axis.plot(
                    [HEALED.index(s) for s in steps],
                    kept,
                    "o-" if place < len(COLOURS) else "o--",
                    markersize=3,
                    label=name,
                )
            axis.set_xticks(range(len(HEALED)), [f"{s:,}" for s in HEALED])
            axis.set(xlabel="healing steps", ylabel="acceptance length kept, %", title=bed)
            axis.legend()


# What stands between the markers of each name.
PARTS: dict[str, Callable[[], list[str]]] = {
    "bench-attention": describe_beds,
    "healing": describe_healing,
    "bf16": describe_rounding,
    "size": describe_size,
    "memory": describe_memory,
}
