"""Measure how much acceptance a head retains after an attention conversion, and write docs/attention.md's figures.

    .venv/bin/python scripts/bench attention [--bed words|manual|bytes|large] [--only PATTERN] [--seconds 540]
    .venv/bin/python scripts/bench attention --healing|--bf16 [--only PATTERN] [--seconds 540]
    .venv/bin/python scripts/bench attention --memory
    .venv/bin/python scripts/bench attention --real [--rows 2048]
    .venv/bin/python scripts/bench attention --markdown

Heads are trained once for a tiny target and cached, and so is each figure, so that an interrupted run
resumes. `--seconds` limits its time, `--markdown` writes the page from the figures so far.
`--real` measures time and memory of the steps from MHA to MLA at Kimi-K2's dims, on synthetic inputs.
"""

import argparse

from bench_parts.attention_beds import BEDS, HEADS, open_bed
from bench_parts.attention_healing import measure_healing
from bench_parts.attention_memory import measure_memory
from bench_parts.attention_page import write_page
from bench_parts.attention_rounding import measure_rounding
from bench_parts.attention_rows import measure_rows
from bench_parts.attention_size import measure_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bed", choices=list(BEDS), default="words")
    parser.add_argument("--only", default="*", help="rows whose name fits, e.g. mha-*")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--rows", type=int, default=2048, help="for --real")
    parser.add_argument("--divide", type=int, default=1, help="for --real: by how much to make it smaller")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--train", choices=["target", *HEADS], help="make this one, and measure nothing")
    what.add_argument("--healing", action="store_true", help="measure other forms of healing")
    what.add_argument("--bf16", action="store_true", help="measure what bf16 costs")
    what.add_argument("--memory", action="store_true", help="count the logits that the passes hold at once")
    what.add_argument("--real", action="store_true", help="time the steps at Kimi-K2's dims")
    what.add_argument("--markdown", action="store_true", help="write the page, and measure nothing")
    wish = parser.parse_args()
    if wish.train == "target":
        print(BEDS[wish.bed].folder)
    elif wish.train:
        open_bed(wish.bed).head(wish.train)
    elif wish.healing:
        measure_healing(wish.only, wish.seconds)
    elif wish.bf16:
        measure_rounding(wish.only, wish.seconds)
    elif wish.memory:
        measure_memory()
    elif wish.real:
        measure_size(wish.rows, wish.divide)
    elif wish.markdown:
        write_page()
    else:
        measure_rows(wish.bed, wish.only, wish.seconds)


if __name__ == "__main__":
    main()
