"""Time `kconv to-vllm` on a synthetic Kimi-K2 MLA head against `cp` of the same file, both flushed to the disk.

Run it with the interpreter in which kconv is installed:

    .venv/bin/python scripts/bench convert [--size small] [--pairs 5] [--cold 3] [--markdown]

Both sides alternate in one run, after a warm-up of each. Before each side of a cold pair the head is dropped from the
page cache, so that both read it from disk. The head and the copies are in a temporary folder, which is removed at
the end.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bench_parts.heads import SIZES, Head, make_head
from bench_parts.machine import KCONV, Run, apart, cool, timed, warm
from bench_parts.page import closing, spread, write_section


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="full", help="full: 6.03 GB; small: 0.2 GB, a quick check")
    parser.add_argument("--pairs", type=int, default=5, help="timed pairs with the head in the page cache (5)")
    parser.add_argument("--cold", type=int, default=3, help="timed pairs with the head on the disk alone (3)")
    parser.add_argument("--dir", type=Path, default=None, help="where the temporary folder goes: the disk to measure")
    parser.add_argument("--markdown", action="store_true", help="write the result into docs/evidence/benchmarks.md")
    wish = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-convert-", dir=wish.dir) as name:
        folder = Path(name)
        head: Head = apart(make_head, folder / "head", SIZES[wish.size])
        print(f"{head.tensors} tensors, {head.parameters:,} parameters, {head.size / 1e9:.2f} GB", flush=True)
        time_cp(head, folder), time_kconv(head, folder)
        tables = {
            "warm": time_pairs(head, folder, wish.pairs, lambda: warm(head.file)),
            "cold": time_pairs(head, folder, wish.cold, lambda: cool(head.file)),
        }
        lines = report(head, {title: pairs for title, pairs in tables.items() if pairs})
    print("\n".join(lines))
    if wish.markdown:
        write_section("convert", lines)


def time_pairs(head: Head, folder: Path, count: int, prepare: Callable[[], None]) -> list[tuple[Run, Run]]:
    """Time pairs, each side after the head was prepared for it."""
    pairs = []
    for _ in range(count):
        prepare()
        cp = time_cp(head, folder)
        prepare()
        pairs.append((cp, time_kconv(head, folder)))
        print(line(*pairs[-1]), flush=True)
    return pairs


def time_cp(head: Head, folder: Path) -> Run:
    """Time `cp` and the flush of what it wrote."""
    out = folder / "copy.safetensors"
    begin = time.perf_counter()
    run = timed(["cp", str(head.file), str(out)])
    descriptor = os.open(out, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    wall = time.perf_counter() - begin
    out.unlink()
    os.sync()
    return replace(run, wall=wall)


def time_kconv(head: Head, folder: Path) -> Run:
    """Time `kconv to-vllm` from its start to its end; it flushes its output itself."""
    out = folder / "converted"
    run = timed([str(KCONV), "to-vllm", str(head.folder), str(out)])
    shutil.rmtree(out)
    os.sync()
    return run


def line(cp: Run, kconv: Run) -> str:
    """Say how a pair went."""
    return (
        f"cp + flush {cp.wall:.2f} s ({cp.cpu:.1f} s of processor), "
        f"kconv {kconv.wall:.2f} s ({kconv.cpu:.1f} s), ratio {kconv.wall / cp.wall:.2f}, "
        f"peak {kconv.peak:.0f} MiB, load {os.getloadavg()[0]:.1f}"
    )


def report(head: Head, tables: dict[str, list[tuple[Run, Run]]]) -> list[str]:
    """Return the result as Markdown, a row for each state of the page cache."""
    return [
        "## `kconv to-vllm` against `cp`",
        "",
        f"A synthetic MLA head of {head.tensors} tensors, {head.parameters:,} parameters, {head.size / 1e9:.2f} GB. "
        "Both sides flush their output; kconv also hashes, looks for NaN and Inf, and writes the manifest. Medians "
        "over pairs, with their range.",
        "",
        "| page cache | pairs | cp | kconv | ratio | processor time cp / kconv | kconv's peak memory |",
        "|---|---|---|---|---|---|---|",
        *(row(title, pairs) for title, pairs in tables.items()),
        "",
        closing("bench convert"),
    ]


def row(title: str, pairs: list[tuple[Run, Run]]) -> str:
    """Return the pairs of one kind as a row."""
    cp, kconv = ([pair[side] for pair in pairs] for side in (0, 1))
    ratio = spread([ours.wall / theirs.wall for theirs, ours in pairs])
    cells = [
        title,
        str(len(pairs)),
        *(spread([one.wall for one in side], unit=" s") for side in (cp, kconv)),
        f"**{ratio.split()[0]}** {ratio.split()[1]}",
        " / ".join(f"{statistics.median(one.cpu for one in side):.1f} s" for side in (cp, kconv)),
        f"{max(one.peak for one in kconv):.0f} MiB",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
