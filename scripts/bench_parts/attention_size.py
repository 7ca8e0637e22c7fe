"""The steps of MHA to MLA at Kimi-K2's size."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from kconv.convert.attention.latents import factorize, fit_gauge
from kconv.convert.attention.moments import DTYPE, Moments, factor, root
from kconv.measure.batches import ROWS_PER_DIM

from .attention_store import load, save
from .machine import Spent

T = TypeVar("T")
# 14,336 inputs, 64 heads of 128 + 128 and 64 rotary dims, latents of 512 and 1,536.
WIDTH, HEADS, DIM, ROTARY, LATENT, QUERIES = 14336, 64, 128, 64, 512, 1536
SAMPLE, UNSEEN, BLOCK = 7000, 1192, 512
SAYS = {
    "moments": "second moments of {rows:,} rows",
    "factor": "their factor",
    "metrics": f"square roots of {HEADS} metrics",
    "keys and values": "latent of the keys and values",
    "queries": "latent of the queries",
    "gauge": "a gauge",
}


class _Clock:
    """Wall clock and processor times of steps in seconds, by their names in `SAYS`; the peak of the memory in GiB."""

    def __init__(self) -> None:
        self.seconds: dict[str, tuple[float, float]] = {}
        self.peak = 0.0

    def time(self, step: str, work: Callable[[], T]) -> T:
        begun = Spent(time.perf_counter(), time.process_time())
        result = work()
        spent = Spent(time.perf_counter(), time.process_time()) - begun
        self.seconds[step] = round(spent.wall, 2), round(spent.processor, 2)
        self.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{step}: {spent.wall:.1f} s, {spent.processor:.1f} s of processor, peak {self.peak:.1f} GiB", flush=True)
        return result


def measure_size(rows: int, divide: int) -> None:
    """Time each step, and keep the times of a whole run at full size.

    Args:
        rows: of the second moments.
        divide: makes inputs, heads and latents fewer by so much: work is then less by its third power.
    """
    width, heads, latent, queries = (count // divide for count in (WIDTH, HEADS, LATENT, QUERIES))
    torch.set_default_dtype(DTYPE)
    generator, clock = torch.Generator().manual_seed(0), _Clock()
    scale = torch.linspace(1, 0.05, width)
    moments = Moments(width)

    def gather() -> None:
        for block in range(0, rows, BLOCK):
            moments.add(torch.randn(min(BLOCK, rows - block), width, generator=generator) * scale)

    clock.time("moments", gather)
    # Fewer rows than inputs make no full rank; the floor of `factor` is what a real run has too.
    mean = moments.mean() + torch.diag(scale.square())
    cholesky = clock.time("factor", lambda: factor(mean))
    weights = torch.randn(heads, 2 * DIM, width, generator=generator) * width**-0.5
    spread = torch.randn(heads, 2 * DIM, 2 * DIM, generator=generator) / DIM
    square, inverse = clock.time("metrics", lambda: root(spread @ spread.mT))
    found = clock.time("keys and values", lambda: factorize(weights, square, inverse, cholesky, latent))
    asked = torch.randn(heads, DIM + ROTARY, width, generator=generator) * width**-0.5
    eye = torch.eye(DIM + ROTARY).expand(heads, -1, -1)
    clock.time("queries", lambda: factorize(asked, eye, eye, cholesky, queries))
    sample = (torch.randn(SAMPLE + UNSEEN, width, generator=generator) * scale) @ found.down.T
    gauge = clock.time("gauge", lambda: fit_gauge(sample[:SAMPLE], sample[SAMPLE:]))
    print(f"lengths of the latent vary by {gauge.before:.3f}, in the gauge by {gauge.variation:.3f}")
    if divide == 1:
        threads = torch.get_num_threads()
        save("size", {"rows": rows, "threads": threads, "seconds": clock.seconds, "peak_gib": round(clock.peak, 1)})


def describe_size() -> list[str]:
    """Return the times as Markdown."""
    found = load("size")
    if not found:
        return ["Not measured yet: `scripts/bench attention --real` takes a quarter of an hour, and 12 GiB."]
    seconds, rows, wanted = found["seconds"], found["rows"], ROWS_PER_DIM * WIDTH
    each = seconds["moments"][0] / rows
    sums = [sum(column) for column in zip(*seconds.values(), strict=True)]
    return [
        f"{WIDTH:,} synthetic inputs, {HEADS} heads of {DIM} + {DIM}, latents of {LATENT} and {QUERIES:,}; threads: "
        f"{found['threads']}.",
        "",
        "| step | wall clock | processor time |",
        "| --- | --- | --- |",
        *(f"| {SAYS[step].format(rows=rows)} | {' | '.join(map(_time, spent))} |" for step, spent in seconds.items()),
        f"| sum | {' | '.join(map(_time, sums))} |",
        "",
        f"Peak memory: {found['peak_gib']} GiB. A row more costs {1000 * each:.0f} ms, so the least number, "
        f"{wanted:,}, cost {_time(each * wanted)}.",
    ]


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s" if seconds < 10 else f"{rest} s"
