"""Measure the memory of `kconv to-vllm` as the checkpoint grows, next to the checkpoint's own size.

    .venv/bin/python scripts/bench memory [--size small] [--markdown]

Synthetic MLA heads of Kimi-K2's shape, from 0.2 to 6 GB, are written one after the other and removed again.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from bench_parts.heads import KIMI_MLA, make_head
from bench_parts.machine import KCONV, apart, timed
from bench_parts.page import EVIDENCE, closing, write_section

from kconv.charts import INK, chart

WIDTHS = {"full": (512, 1024, 2048, 4096, 7168), "small": (256, 512)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=WIDTHS, default="full", help="full: up to 6 GB; small: a quick check")
    parser.add_argument(
        "--markdown", action="store_true", help="write the result into docs/evidence/benchmarks.md, and the plot"
    )
    wish = parser.parse_args()
    points = []
    for width in WIDTHS[wish.size]:
        points.append(measure(width))
        print(f"{points[-1][0]:.2f} GB: {points[-1][1]:.0f} MiB", flush=True)
    lines = report(points)
    print("\n".join(lines))
    if wish.markdown:
        draw(points)
        write_section("memory", lines)


def measure(width: int) -> tuple[float, float]:
    """Return the size of a head in GB, and the peak resident memory of its conversion in MiB."""
    spec = replace(KIMI_MLA, hidden=width, target_hidden=width, intermediate=width * 18432 // 7168)
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as name:
        size = apart(make_head, Path(name) / "head", spec).size
        run = timed([str(KCONV), "to-vllm", f"{name}/head", f"{name}/out"])
    return size / 1e9, run.peak


def report(points: list[tuple[float, float]]) -> list[str]:
    """Return the result as Markdown."""
    return [
        "## Memory against the checkpoint's size",
        "",
        "Peak resident memory of `kconv to-vllm` on synthetic MLA heads.",
        "",
        "| head | peak memory | memory over size |",
        "|---|---|---|",
        *(f"| {size:.2f} GB | {peak:.0f} MiB | {peak * 2**20 / size / 1e9:.3f} |" for size, peak in points),
        "",
        "![Peak memory against the size of the head](memory.png)",
        "",
        closing("bench memory"),
    ]


def draw(points: list[tuple[float, float]]) -> None:
    """Plot the peak beside a line of the checkpoint's own size, which is what reading it whole would take."""
    sizes = [size for size, _ in points]
    with chart(EVIDENCE / "memory.png") as (_, [axes]):
        axes.plot(sizes, [peak for _, peak in points], marker="o", label="kconv to-vllm")
        axes.plot(sizes, [size * 1e9 / 2**20 for size in sizes], linestyle="--", color=INK, label="the head itself")
        axes.set(xlabel="size of the head, GB", ylabel="peak resident memory, MiB", yscale="log")
        axes.legend()


if __name__ == "__main__":
    main()
