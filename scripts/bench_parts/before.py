"""Time kconv's commands against those of another checkout, e.g. a worktree of an older commit, in pairs.

    git worktree add /tmp/before b7451f2
    .venv/bin/python scripts/bench before /tmp/before [--size small] [--pairs 5]

Both sides run in this interpreter, in turn, after a warm-up of each, over the same head of `bench-convert`. For each
command it prints the median of the pairs' ratios, now over before, of wall clock and processor time.
NVFP4 packing has a row too: a weight of Kimi-K2's expert shape, packed twenty times by one thread of each side.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_parts.heads import SIZES, make_head
from bench_parts.machine import KCONV, Run, apart, timed, warm

HERE = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--size", choices=SIZES, default="full", help="full: 6.03 GB; small: 0.2 GB")
    parser.add_argument("--pairs", type=int, default=5, help="timed pairs (5)")
    parser.add_argument("--dir", type=Path, default=None, help="where the temporary folder goes")
    wish = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-before-", dir=wish.dir) as name:
        folder = Path(name)
        sides = {side: _link(folder / side, at) for side, at in (("now", HERE), ("before", wish.before.resolve()))}
        head = folder / "head"
        apart(make_head, head, SIZES[wish.size])
        # `{out}` is each side's own, as manifests of the one may not be of the other's schema.
        commands = {
            "start": ["--help"],
            "convert": ["to-vllm", str(head), "{out}"],
            "verify": ["verify", "{out}", str(head)],
            "validate": ["validate", "{out}", "--source", str(head)],
        }
        print("| command | wall clock, now / before | processor time, now / before | peak memory, now / before |")
        print("|---|---|---|---|")
        for title, command in commands.items():
            warm(*folder.glob("*/*.safetensors"))
            pairs = [[_run(command, path, folder / f"out-{side}") for side, path in sides.items()]
                     for _ in range(wish.pairs + 1)]  # fmt: skip
            print(_row(title, [(now, before) for now, before in pairs[1:]]), flush=True)
        packed = [(_packed(sides["now"]), _packed(sides["before"])) for _ in range(wish.pairs + 1)]
        print(_row("pack", packed[1:]), flush=True)


def _link(place: Path, checkout: Path) -> Path:
    """Return a folder in which `kconv` is a checkout."""
    place.mkdir()
    (place / "kconv").symlink_to(checkout)
    return place


def _run(command: list[str], path: Path, out: Path) -> Run:
    """Run a command of one side; what an earlier run converted is removed first."""
    if command[0] == "to-vllm" and out.exists():
        shutil.rmtree(out)
        os.sync()
    words = [word.format(out=out) for word in command]
    return timed([str(KCONV), *words], {"PYTHONPATH": str(path)})


# Both sides have these three functions. Only the packing is timed, not the imports, which the other rows time.
PACK = """
import resource, time, torch
from kconv.quantize.pack import amax, pack, scale_2
torch.set_num_threads(1)
weight = torch.randn(2048, 7168, generator=torch.Generator().manual_seed(0)).mul(0.02).to(torch.bfloat16)
pack(weight, float(scale_2(amax(weight))))
wall, cpu = time.perf_counter(), time.process_time()
for _ in range(20):
    pack(weight, float(scale_2(amax(weight))))
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
print(wall, cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def _packed(path: Path) -> Run:
    """Pack a weight by the code of one side."""
    command = [sys.executable, "-c", PACK]
    made = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(path)}, check=True, stdout=subprocess.PIPE)
    return Run(*map(float, made.stdout.split()))


def _row(title: str, pairs: list[tuple[Run, Run]]) -> str:
    wall, cpu = (
        statistics.median(getattr(now, key) / getattr(before, key) for now, before in pairs) for key in ("wall", "cpu")
    )
    now, before = (max(run.peak for run in side) for side in zip(*pairs, strict=True))
    return f"| {title} | {wall:.2f} | {cpu:.2f} | {now:.0f} / {before:.0f} MiB |"


if __name__ == "__main__":
    main()
