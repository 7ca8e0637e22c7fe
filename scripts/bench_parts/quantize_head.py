"""Measure how much acceptance length heads retain in FP8 and NVFP4, and write it into docs/evidence/benchmarks.md.

    .venv/bin/python scripts/bench quantize-head [--markdown]

Small heads, trained once for tiny targets and cached, are quantized as by `kconv quantize-head`, with
scales from text that they were trained on, and measured on documents outside all training. Each figure is also
cached and not measured again. All of it takes two minutes on one core once the heads exist.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_parts.attention_beds import BEDS as ATTENTION_BEDS
from bench_parts.attention_beds import ROWS, SEQ, Bed, Bench
from bench_parts.page import write_section

from kconv.measure.batches import Calibration, Part
from kconv.measure.retention import MIN_RETENTION
from kconv.quantize.head.formats import FORMATS
from kconv.quantize.head.plan import quantize_head
from kconv.tiny.recipe import DEMO, cache_root
from kconv.train.recipe import TINY_GQA, TINY_MLA

# Raise it with each change that alters a figure.
VERSION = "1"
CALIBRATED = 20  # batches of ROWS texts that the scales are of
KINDS = ("gqa", "mla")
DEMOS = Bed(DEMO, {}, "the demo's heads", {"gqa": TINY_GQA.attention, "mla": TINY_MLA.attention})
BEDS = {"demo": DEMOS, "bytes": ATTENTION_BEDS["bytes"], "large": ATTENTION_BEDS["large"]}
Figures = dict[str, Any]


def store() -> Path:
    """Return the file that figures are kept in, by head and format."""
    return cache_root() / f"bench-quantize-head-{VERSION}.json"


def gather() -> dict[str, dict[str, Figures]]:
    """Return all figures, those measured first that are not in the store."""
    file = store()
    found = json.loads(file.read_text()) if file.exists() else {}
    for bed in BEDS:
        names = {f"{kind.upper()}, {bed}": kind for kind in KINDS}
        if names.keys() <= found.keys():
            continue
        bench = Bench(BEDS[bed])
        for name, kind in names.items():
            found[name] = dict(measure(bench, kind))
            file.write_text(json.dumps(found, indent=1) + "\n")
    return found


def measure(bench: Bench, kind: str) -> Iterator[tuple[str, Figures]]:
    """Yield what a head keeps in each format: `HeldOut`, the rows that the scales are of, and what head it is."""
    head = bench.head(kind)
    read, held = bench.states(bench.text, SEQ, CALIBRATED, ROWS, "text of the training"), bench.held_out
    parts: list[Part] = ["fit"] * len(read.batches) + ["held-out"] * len(held)
    calibration = Calibration([*read.batches, *held], read.lm_head, read.name, parts=parts)
    own = [weight.numel() for slot, weight in head.weights.items() if slot not in ("embed_tokens", "lm_head")]
    about = {"hidden": head.spec.hidden, "parameters": sum(own)}
    for name, format_ in FORMATS.items():
        made = quantize_head(head.spec, head.weights, format_, calibration, keep=0)
        yield name, asdict(made.held_out) | about | {"rows": made.rows}


def report(found: dict[str, dict[str, Figures]]) -> list[str]:
    """Lay out the section of the page."""
    one = next(iter(next(iter(found.values())).values()))
    refused = [
        f"{name} in {FORMATS[format_].name}"
        for name, figures in found.items()
        for format_, each in figures.items()
        if each["kept"] < MIN_RETENTION
    ]
    return [
        "## What a quantized draft head keeps",
        "",
        f"Share of the acceptance length that is kept, in %, with weights and inputs rounded as in engines. "
        f"K={one['steps']}, sampled; scales of {one['rows']:,} rows of training text, figures of "
        f"{one['positions']:,} positions of {one['sequences']} held-out texts of {one['context']} tokens, with the "
        "paired standard error. *demo*: the demo's heads; *bytes* and *large*: those of [Attention](attention.md). "
        "Parameters without embedding and `lm_head`.",
        "",
        "| head | hidden size | parameters | acceptance length | "
        + " | ".join(f.name for f in FORMATS.values())
        + " |",
        "|---|---|---|---|" + "---|" * len(FORMATS),
        *(row(name, figures) for name, figures in found.items()),
        "",
        f"`kconv quantize-head` refuses less than {MIN_RETENTION:.0%} (`--min-retention`); of these: "
        f"{'; '.join(refused) or 'none'}.",
        "",
        "`scripts/bench quantize-head`.",
    ]


def row(name: str, figures: dict[str, Figures]) -> str:
    """Lay out a head's row of the table."""
    head = next(iter(figures.values()))
    kept = [f"{100 * figures[format_]['kept']:.2f} ± {100 * figures[format_]['kept_error']:.2f}" for format_ in FORMATS]
    cells = [name, head["hidden"], f"{head['parameters']:,}", f"{head['before']:.3f}", *kept]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="write the result into docs/evidence/benchmarks.md")
    wish = parser.parse_args()
    lines = report(gather())
    print("\n".join(lines))
    if wish.markdown:
        write_section("quantize-head", lines)


if __name__ == "__main__":
    main()
