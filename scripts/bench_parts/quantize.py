"""Time `kconv quantize` on a synthetic INT4 checkpoint with Kimi-K2's expert shapes, and measure its memory.

Run it with the interpreter in which kconv is installed:

    .venv/bin/python scripts/bench quantize [--gb 20] [--pairs 3] [--dir /big/disk] [--markdown] [--save figures.json]

It makes a checkpoint of the whole size, and reads and writes as many bytes for comparison; quantizes it with two ranks
from a cold cache; and again with all ranks killed at random moments and restarted, comparing the bytes. Then it
quantizes one of half the size from a warm cache, with one rank and with two in turn: this half and a
gigabyte per rank must fit into memory. The temporary folder takes twice the size, and is removed at the end.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench_parts.experts import EXPERT_BYTES, make_source, packing_rates
from bench_parts.machine import KCONV, apart, cool, warm
from bench_parts.page import closing, spread, write_section

# Kimi-K2.5 on its publisher's disk; 60 of its layers have experts.
KIMI_BYTES = 595e9
KILLS = 3


@dataclass(frozen=True)
class Run:
    """One quantization: bytes of the source, ranks, cache, wall seconds, processor seconds and peak MiB of a rank."""

    gb: float
    ranks: int
    cache: str
    wall: float
    cpu: float
    peak: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=20, help="size of the larger checkpoint (20)")
    parser.add_argument("--pairs", type=int, default=3, help="comparisons of one rank with two (3)")
    parser.add_argument("--dir", type=Path, default=None, help="where the temporary folder goes: the disk to measure")
    parser.add_argument("--markdown", action="store_true", help="write the result into docs/evidence/benchmarks.md")
    parser.add_argument("--save", type=Path, help="write the figures into this file, as JSON")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    wish = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: ended by a signal"))  # so that what was made is removed
    free, needed = shutil.disk_usage(wish.dir or tempfile.gettempdir()).free, 2.1e9 * wish.gb
    if free < needed:
        sys.exit(f"error: {needed / 1e9:.0f} GB of disk are needed, and {free / 1e9:.0f} GB are free: give --dir")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="bench-quantize-", dir=wish.dir) as name:
        folder = Path(name)
        count = max(int(wish.gb * 1e9 / EXPERT_BYTES), 4)
        rates = apart(packing_rates)
        apart(make_source, folder / "whole", count)
        read, write = time_disk(folder / "whole", folder)
        cold, digests = quantize(folder / "whole", folder, 2, "cold")
        killed = restart(folder / "whole", folder, cold.wall, digests)
        shutil.rmtree(folder / "whole")
        apart(make_source, folder / "half", count // 2)
        pairs = [[quantize(folder / "half", folder, ranks, "warm")[0] for ranks in (1, 2)] for _ in range(wish.pairs)]
        facts = {
            "pairs": [[asdict(run) for run in pair] for pair in pairs],
            "cold": asdict(cold),
            "killed": killed,
            "read": read,
            "write": write,
            "rates": rates,
            "load": load,
        }
        lines = report(pairs, cold, killed, read, write, rates, load)
    if wish.save:
        wish.save.write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts) if wish.json else "\n".join(lines))
    if wish.markdown:
        write_section("quantize", lines)


def time_disk(source: Path, folder: Path) -> tuple[float, float]:
    """Return the seconds that reading the source from a cold cache takes, and writing and flushing as many bytes."""
    cool(*weights(source))
    begin = time.perf_counter()
    subprocess.run("cat model-*.safetensors > /dev/null", shell=True, cwd=source, check=True)
    read = time.perf_counter() - begin
    begin = time.perf_counter()
    subprocess.run(f"cat model-*.safetensors > {folder}/copy && sync {folder}/copy", shell=True, cwd=source, check=True)
    write = time.perf_counter() - begin
    (folder / "copy").unlink()
    return read, write


def start(source: Path, out: Path, ranks: int) -> list[subprocess.Popen]:
    """Start the ranks of a quantization, each on a core of its own: it hashes files in a second thread."""
    cores = sorted(os.sched_getaffinity(0))
    words = [str(KCONV), "quantize", str(source), str(out), "--recipe", "nvfp4-experts", "--input-scale", "data-free"]
    return [
        subprocess.Popen(
            [*words, "--jobs", "1"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(ranks)},
            preexec_fn=partial(os.sched_setaffinity, 0, {cores[rank % len(cores)]}),
        )
        for rank in range(ranks)
    ]


def kill(started: list[subprocess.Popen]) -> None:
    """Kill ranks, and wait until they are gone."""
    for process in started:
        if process.returncode is None:
            process.kill()
            process.wait()


def quantize(source: Path, folder: Path, ranks: int, cache: str) -> tuple[Run, dict[str, str]]:
    """Quantize with so many ranks to the end of the last, and return what it took and the sha256 of each file."""
    (warm if cache == "warm" else cool)(*weights(source))
    out = folder / "out"
    begin = time.perf_counter()
    started = start(source, out, ranks)
    usages = []
    try:
        for process in started:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            usages.append(usage)
    finally:
        kill(started)
    wall = time.perf_counter() - begin
    if any(process.returncode for process in started):
        sys.exit(f"error: kconv quantize ended with {[process.returncode for process in started]}")
    digests = weight_digests(out)
    shutil.rmtree(out)
    os.sync()
    size = sum(file.stat().st_size for file in weights(source)) / 1e9
    cpu = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return Run(size, ranks, cache, wall, cpu, max(usage.ru_maxrss for usage in usages) / 1024), digests


def weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def weight_digests(out: Path) -> dict[str, str]:
    """Return the sha256 of each file of weights, hashed anew."""
    from kconv.checkpoint.bytes import file_digest

    return {file.name: file_digest(file) for file in weights(out)}


def restart(source: Path, folder: Path, wall: float, digests: dict[str, str]) -> int:
    """Quantize with two ranks that are killed at random moments, and return how often; the bytes must be the same."""
    moments = random.Random()
    out, killed = folder / "out", 0
    while not out.exists():
        started = start(source, out, 2)
        try:
            # Each of the first ones ends before half of the work is done; after these it may go to its end.
            until = time.monotonic() + (moments.uniform(0.1, 0.5) * wall if killed < KILLS else 100 * wall + 60)
            while time.monotonic() < until and any(process.poll() is None for process in started):
                time.sleep(0.05)
            done = [process.poll() for process in started]
            if None not in done and any(done):
                sys.exit(f"error: kconv quantize ended with {done}, started anew after {killed} kills")
            killed += None in done
        finally:
            kill(started)
    if weight_digests(out) != digests:
        sys.exit(f"error: killed {killed} times and started anew, it made other bytes")
    shutil.rmtree(out)
    return killed


def report(
    pairs: list[list[Run]],
    cold: Run,
    killed: int,
    read: float,
    write: float,
    rates: dict[str, float],
    load: float,
) -> list[str]:
    """Return the result as Markdown."""
    ratio = spread([one.wall / two.wall for one, two in pairs])
    two = min((two for _, two in pairs), key=lambda run: run.wall)
    rate = two.gb / two.ranks / two.wall
    hours = {ranks: KIMI_BYTES / 1e9 / rate / ranks / 3600 for ranks in (2, 16)}
    floor = (read + write) * KIMI_BYTES / 1e9 / cold.gb / 3600
    peak = max(run.peak for run in [cold, *(run for pair in pairs for run in pair)])
    return [
        "## `kconv quantize`: INT4 to NVFP4",
        "",
        f"A synthetic compressed-tensors checkpoint with Kimi-K2's expert shapes, {cold.gb:.1f} GB, and half of it; "
        "each rank has one core. Hashes, flushing and the manifest are included.",
        "",
        "| source | ranks | cache | wall | processor time | peak memory of a rank |",
        "|---|---|---|---|---|---|",
        *(
            f"| {run.gb:.1f} GB | {run.ranks} | {run.cache} | {run.wall:.1f} s | {run.cpu:.1f} s | {run.peak:.0f} MiB |"
            for run in [*(run for pair in pairs for run in pair), cold]
        ),
        "",
        f"On the same disk, reading the whole from a cold cache takes {read:.1f} s, and writing and flushing as much "
        f"{write:.1f} s; two ranks from a cold cache take **{cold.wall / (read + write):.2f}** times the sum. "
        f"From a warm cache, two ranks are **{ratio.split()[0]}** {ratio.split()[1]} times as fast as one. Killed "
        f"{killed} times and started anew, they write the same bytes.",
        "",
        f"Packing alone, on one core: ModelOpt {rates['modelopt']:.0f} M elements/s from bf16, kconv "
        f"{rates['int4']:.0f} M elements/s from INT4, **{rates['int4'] / rates['modelopt']:.0f}** times.",
        "",
        f"**A projection:** at {rate * 1000:.0f} MB/s a rank from a warm cache, the "
        f"{KIMI_BYTES / 1e9:.0f} GB of Kimi-K2.5 take {hours[2]:.2f} h with 2 ranks and "
        f"{hours[16]:.2f} h with 16, on this disk {floor:.2f} h or more; {peak / 1024:.1f} GiB a rank.",
        "",
        closing(f"bench quantize --gb {cold.gb:.1f}", load),
    ]


if __name__ == "__main__":
    main()
