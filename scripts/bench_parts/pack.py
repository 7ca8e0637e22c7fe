"""Time kconv's NVFP4 packer against ModelOpt's NVFP4QTensor on one core, on a weight of Kimi-K2's expert shape.

    .venv/bin/python scripts/bench pack [--pairs 5] [--markdown]

Both sides alternate in one run, after a warm-up of each, and their bits are compared.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

os.environ["OMP_NUM_THREADS"] = "1"
import torch
from bench_parts.page import closing, write_section

ROWS, COLUMNS = 2048, 7168


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each side (default 5)")
    parser.add_argument("--markdown", action="store_true", help="put the result into docs/evidence/benchmarks.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = report([(str(dtype).removeprefix("torch."), *compare(dtype, options.pairs)) for dtype in DTYPES])
    print("\n".join(lines))
    if options.markdown:
        write_section("pack", lines)


DTYPES = (torch.bfloat16, torch.float32)


def compare(dtype: torch.dtype, pairs: int) -> tuple[list[float], list[float], list[float]]:
    """Return million elements a second in each pair: ModelOpt's, kconv's, and kconv's without a compiler."""
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    from kconv.quantize.pack import NativePacker, amax, fastest, pack, pack_plain, scale_2

    if not isinstance(fastest(), NativePacker):
        sys.exit("error: the compiled packer is not there: is there a C compiler?")
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).mul(0.02).to(dtype)
    shared = scale_2(amax(weight))

    def modelopt() -> tuple[torch.Tensor, torch.Tensor]:
        made, scale, _ = NVFP4QTensor.quantize(weight, 16, None, shared, try_tensorrt=False)
        return made._quantized_data, scale

    sides: list[Callable[[], object]] = [
        modelopt,
        # The amax too, which ModelOpt is given here.
        lambda: (amax(weight), pack(weight, float(shared))),
        lambda: pack_plain(weight, float(shared)),
    ]
    (nibbles, scale), ours = modelopt(), pack(weight, float(shared))
    if not torch.equal(nibbles, ours.weight) or not torch.equal(
        scale.view(torch.uint8), ours.weight_scale.view(torch.uint8)
    ):
        sys.exit("error: the bits are not ModelOpt's")
    rates: tuple[list[float], list[float], list[float]] = ([], [], [])
    for pair in range(pairs + 1):
        for rate, side in zip(rates, sides, strict=True):
            begin = time.perf_counter()
            side()
            if pair:
                rate.append(ROWS * COLUMNS / (time.perf_counter() - begin) / 1e6)
    return rates


def report(rows: list[tuple[str, list[float], list[float], list[float]]]) -> list[str]:
    """Return the result as Markdown."""
    lines = [
        "## NVFP4 packing",
        "",
        f"A weight of {ROWS} x {COLUMNS}, one core, medians; equal bits. kconv also computes the weight's amax, which "
        "ModelOpt is given.",
        "",
        "| from | ModelOpt, M elements/s | kconv | ratio, median of pairs | lowest pair | kconv without a compiler |",
        "|---|---|---|---|---|---|",
    ]
    for dtype, theirs, ours, plain in rows:
        ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
        figures = [statistics.median(side) for side in (theirs, ours, plain)]
        lines.append(
            f"| {dtype} | {figures[0]:.0f} | {figures[1]:.0f} | **{statistics.median(ratios):.0f}** "
            f"| {min(ratios):.0f} | {figures[2]:.0f} |"
        )
    return [*lines, "", closing("bench pack")]


if __name__ == "__main__":
    main()
