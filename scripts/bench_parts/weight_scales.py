"""Compare the ways of choosing NVFP4 block scales on SmolLM2-135M-Instruct: noise, perplexity and time.

    .venv/bin/python scripts/bench weight-scales [--pairs 5] [--texts 40] [--target FOLDER] [--markdown]

Each is the recipe nvfp4 with unquantized activations, so that only the weights differ. The times alternate in one
process on one core, and include reading, hashing and writing. The texts are topics of Python's own documentation.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

os.environ["OMP_NUM_THREADS"] = "1"
from pydoc_data.topics import topics

import torch
from bench_parts.experts import make_source
from bench_parts.page import closing, spread, write_section
from real_parts.smollm import make_target

import kconv
from kconv.checkpoint.source import Folder
from kconv.quantize.pack import NativePacker, fastest
from kconv.quantize.recipe import Recipe, WeightScales, load_recipe
from kconv.quantize.run import plan_target, quantize

ROOT = Path(__file__).resolve().parents[2]
METHODS = get_args(WeightScales)
TOKENS, EXPERTS = 512, 6
RECIPE = load_recipe("nvfp4").model_copy(update={"weight_only": True})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="how often each is timed (5)")
    parser.add_argument("--texts", type=int, default=40, help=f"texts of at most {TOKENS} tokens (40)")
    parser.add_argument("--target", type=Path, help="SmolLM2's folder (build/real/target, made if it is not there)")
    parser.add_argument("--markdown", action="store_true", help="write the result into docs/evidence/benchmarks.md")
    wish = parser.parse_args()
    torch.set_num_threads(1)
    if not isinstance(fastest(), NativePacker):
        sys.exit("error: the compiled packer is not there: is there a C compiler?")
    target = (wish.target or ROOT / "build" / "real" / "target").absolute()
    if not target.exists():
        make_target(target.with_name("packages"), target)
    with tempfile.TemporaryDirectory(prefix="bench-weight-scales-") as name:
        folder, load = Path(name), os.getloadavg()[0]
        make_source(folder / "int4", EXPERTS)
        from_int4 = time_all(folder / "int4", load_recipe("nvfp4-experts"), folder, wish.pairs)
        seconds = time_all(target, RECIPE, folder, wish.pairs)
        texts = folder / "texts.jsonl"
        chosen = sorted(topics, key=lambda topic: len(topics[topic]))[-wish.texts :]
        texts.write_text("".join(json.dumps({"id": topic, "prompt": topics[topic]}) + "\n" for topic in chosen))
        found = {method: measure(folder / method, target, texts) for method in METHODS}
    lines = report(found, seconds, from_int4, load)
    print("\n".join(lines))
    if wish.markdown:
        write_section("weight-scales", lines)


def time_all(target: Path, recipe: Recipe, folder: Path, pairs: int) -> dict[str, list[float]]:
    """Return the seconds of each method's quantizations, whose last outputs stay; one warms up."""
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for pair in range(pairs + 1):
        for method in METHODS:
            shutil.rmtree(folder / method, ignore_errors=True)
            plan = plan_target(Folder(target), recipe.model_copy(update={"weight_scales": method}))
            begin = time.perf_counter()
            quantize(plan, folder / method)
            if pair:
                seconds[method].append(time.perf_counter() - begin)
    return seconds


def measure(out: Path, target: Path, texts: Path) -> Any:
    """Return the figures of `kconv validate`."""
    # Together as long as a text may be.
    lengths = {"prompt_tokens": 1, "new_tokens": TOKENS - 1}
    return kconv.validate(str(out), source=str(target), prompts=str(texts), **lengths).figures


def ratios(seconds: dict[str, list[float]], method: str) -> str:
    """Return a method's times as multiples of max's, pair by pair."""
    return spread([one / other for one, other in zip(seconds[method], seconds["max"], strict=True)])


def report(
    found: dict[str, Any], seconds: dict[str, list[float]], from_int4: dict[str, list[float]], load: float
) -> list[str]:
    """Return the result as Markdown."""
    text = found["max"].perplexity
    rows = []
    for method, figures in found.items():
        noise, after = figures.noise, figures.perplexity
        rows.append(
            f"| {method} | {10 ** (-noise.median / 20):.2%} | {noise.median:.2f} dB | {noise.worst:.2f} dB "
            f"| {after.output:.3f} | {math.expm1(after.log_ratio):+.2%} ± {after.log_ratio_se:.2%} | {after.top1:.1%} "
            f"| {statistics.median(seconds[method]):.2f} s "
            f"| {ratios(seconds, method)} | {ratios(from_int4, method)} |"
        )
    return [
        "## Searching for block scales",
        "",
        f"SmolLM2-135M-Instruct (bf16, from a GGUF file of mostly Q4_1), every linear layer in NVFP4, activations as "
        f"they are. Perplexity of {text.tokens:,} tokens of {text.prompts} texts; the source's is {text.source:.3f}. "
        "Noise and signal over noise are those of the median tensor. Times of whole quantizations on one core, "
        "alternating, with their ratio to max and its range; the last column is that of INT4 with Kimi-K2's expert "
        f"shapes, {EXPERTS} experts, of which max is looked up in tables.",
        "",
        "| weight_scales | noise | signal over noise | at worst | perplexity | difference | same likeliest token "
        "| time | times max | from INT4 |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        closing("bench weight-scales", load),
    ]


if __name__ == "__main__":
    main()
