"""Times `kconv validate --source` and `kconv verify` of a head and its source against bare digests of both.

    .venv/bin/python scripts/bench verify [--size small] [--pairs 5] [--markdown]

The three alternate in one run, after a warm-up of each, with both folders in the page cache as far as there is room.
The bare digests are those that the manifest records: the blake3 of both weight files, by the library that b3sum is made
of and as b3sum uses it, and beside it in a process of its own the sha256 of the output: by `sha256sum`, and by OpenSSL,
which uses the processor's own instructions for it.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_parts.heads import SIZES, Head, make_head
from bench_parts.machine import KCONV, Run, apart, timed, warm
from bench_parts.page import closing, write_section

# As b3sum hashes: each file mapped, on all cores.
B3SUM = """
import sys, blake3
for file in sys.argv[1:]:
    print(blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(file).hexdigest())
"""
# A block at a time, as a pipe of files does, by the library that hashlib is made of.
OPENSSL = """
import hashlib, sys
with open(sys.argv[1], "rb", buffering=0) as file:
    print(hashlib.file_digest(file, "sha256").hexdigest())
"""
VALIDATE, VERIFY = "`kconv validate --source`", "`kconv verify` of both"
DIGESTS, FASTEST = "`b3sum` of both beside `sha256sum`", "`b3sum` of both beside OpenSSL's sha256"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="full", help="full: 6.03 GB; small: 0.2 GB, a quick check")
    parser.add_argument("--pairs", type=int, default=5, help="timed turns (5)")
    parser.add_argument("--dir", type=Path, default=None, help="where the temporary folder goes")
    parser.add_argument("--markdown", action="store_true", help="write the result into docs/evidence/benchmarks.md")
    wish = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-verify-", dir=wish.dir) as name:
        folder = Path(name)
        head: Head = apart(make_head, folder / "head", SIZES[wish.size])
        source, out = head.folder, folder / "converted"
        timed([str(KCONV), "to-vllm", str(source), str(out)])
        files = [head.file, out / head.file.name]
        sides = {
            VALIDATE: lambda: timed([str(KCONV), "validate", str(out), "--source", str(source)]),
            VERIFY: lambda: timed([str(KCONV), "verify", str(out), str(source)]),
            DIGESTS: lambda: time_digests(*files, ["sha256sum"]),
            FASTEST: lambda: time_digests(*files, [sys.executable, "-c", OPENSSL]),
        }
        turns: list[dict[str, Run]] = []
        for _ in range(wish.pairs + 1):
            warm(*files)
            turns.append({side: run() for side, run in sides.items()})
            print(", ".join(f"{side} {run.wall:.2f} s" for side, run in turns[-1].items()), flush=True)
        lines = report(head, turns[1:])
    print("\n".join(lines))
    if wish.markdown:
        write_section("verify", lines)


def time_digests(source: Path, output: Path, sha256: list[str]) -> Run:
    """Time the digests that a manifest records, one program beside the other; sha256 is the command of the second."""
    begin = time.perf_counter()
    commands = [sys.executable, "-c", B3SUM, str(source), str(output)], [*sha256, str(output)]
    started = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    used = [os.wait4(process.pid, 0) for process in started]
    for process, (_, status, _) in zip(started, used, strict=True):
        process.returncode = os.waitstatus_to_exitcode(status)
    if any(process.returncode for process in started):
        sys.exit("error: a digest could not be taken")
    wall = time.perf_counter() - begin
    return Run(wall, sum(u.ru_utime + u.ru_stime for *_, u in used), max(u.ru_maxrss for *_, u in used) / 1024)


def report(head: Head, turns: list[dict[str, Run]]) -> list[str]:
    """Return the result as Markdown."""

    def ratio(side: str, other: str) -> float:
        return statistics.median(turn[side].wall / turn[other].wall for turn in turns)

    return [
        "## `kconv validate` and `kconv verify` against bare digests",
        "",
        f"A synthetic MLA head of {head.tensors} tensors, {head.size / 1e9:.2f} GB, and what `kconv to-vllm` made of "
        f"it, both in the page cache; medians of {len(turns)} turns. *Validate* applies every rule and compares every "
        "tensor with the source; *verify* holds both against the manifest.",
        "",
        "| command | wall clock | processor time | peak memory |",
        "|---|---|---|---|",
        *(
            f"| {side} | {statistics.median(turn[side].wall for turn in turns):.2f} s "
            f"| {statistics.median(turn[side].cpu for turn in turns):.2f} s "
            f"| {max(turn[side].peak for turn in turns):.0f} MiB |"
            for side in turns[0]
        ),
        "",
        f"Validate takes **{ratio(VALIDATE, VERIFY):.2f}** times as long as verify, and verify "
        f"**{ratio(VERIFY, DIGESTS):.2f}** times as long as the digests, **{ratio(VERIFY, FASTEST):.2f}** times with "
        "OpenSSL's sha256 (medians of the turns' ratios). The peak of the digests counts the mapped file.",
        "",
        closing("bench verify"),
    ]


if __name__ == "__main__":
    main()
