"""What each of two processes reads that train from stored states, as the kernel counts it, page cache or not.

The tiny target gets another shard that training has no use for, small and large, and its states are of few and of many
dialogues. What is read should be the target's ends and a process's own rows, whatever lies beside.

    .venv/bin/python scripts/bench reads [--quick] [--markdown]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from bench_parts.page import write_section

import kconv
from kconv.checkpoint.header import read_header
from kconv.checkpoint.source import Folder
from kconv.targets.model import find_ends
from kconv.targets.rows import PIECE, ROW
from kconv.targets.states import read_record
from kconv.tiny.recipe import TEST, cache_root
from kconv.tiny.target import make_target
from kconv.tiny.text import read_corpus
from kconv.train.run import EVAL_BATCHES

COUNT = Path(__file__).resolve().parents[2] / "tests" / "support" / "count_reads.py"
CAPTURED, HIDDEN = (1, 3, 5), 64
ROWS, SEQ, STEPS = 4, 96, 24
VALUES = {
    "attention": {"heads": 4, "kv_heads": 2, "head_dim": 16}, "rope": {"theta": 10000.0}, "intermediate": 64,
    "captured": CAPTURED, "batch": ROWS, "seq": SEQ, "batches": STEPS, "steps": STEPS, "dtype": "F32",
}  # fmt: skip
MIB = 1 << 20
FULL, QUICK = ((64, 1024), (120, 1200)), ((1, 2), (110, 120))


def grow(target: Path, extra: int, out: Path) -> Path:
    """Copy a target, and add a shard of `extra` MiB: a hole on the disk, which counts as bytes where it is read."""
    shutil.copytree(target, out)
    own, other = "model.safetensors", "model-vision.safetensors"
    header = json.dumps({"vision_tower.pad": {"dtype": "U8", "shape": [extra * MIB], "data_offsets": [0, extra * MIB]}})
    with (out / other).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + extra * MIB)
    index = dict.fromkeys(read_header(out / own), own) | {"vision_tower.pad": other}
    (out / f"{own}.index.json").write_text(json.dumps({"weight_map": index}))
    return out


def store(target: Path, count: int, folder: Path) -> Path:
    """Store the states of so many dialogues."""
    texts = itertools.islice((text for text in read_corpus().train if len(text) > 400), count)
    rows = [[("user", text[:40]), ("assistant", text[40:400])] for text in texts]
    data = folder / f"{count}.jsonl"
    said = ({"messages": [{"role": role, "content": text} for role, text in row]} for row in rows)
    data.write_text("".join(json.dumps(row) + "\n" for row in said))
    out = folder / f"states-{count}"
    kconv.states(target, out, data=data, captured=CAPTURED, dtype="F32", text_tokens=SEQ, seq=SEQ)
    return out


def count(target: Path, states: Path, work: Path) -> list[list[int]]:
    """Return what each of two processes has read after its job was made and after each step."""
    work.mkdir()
    (work / "values.json").write_text(json.dumps(VALUES))
    words = [COUNT, target, states, work / "values.json", work]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", *map(str, words)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"})
    return [json.loads((work / f"{rank}.json").read_text())[1:] for rank in (0, 1)]


def size(folder: Path, pattern: str = "*.safetensors") -> int:
    """Return the bytes of a folder's files."""
    return sum(file.stat().st_size for file in folder.glob(pattern))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller targets and states")
    parser.add_argument("--markdown", action="store_true", help="write the result into docs/evidence/benchmarks.md")
    wish = parser.parse_args()
    extras, counts = QUICK if wish.quick else FULL
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-reads-") as name:
        folder, plain = Path(name), make_target(TEST, cache_root())
        ends = sum(info.size for info in find_ends(Folder(plain)).tensors.values())
        targets = [grow(plain, extra, folder / f"target-{extra}") for extra in extras]
        stored = [store(plain, number, folder) for number in counts]
        for target, states in itertools.product(targets, stored):
            found = count(target, states, folder / f"{target.name}-{states.name}")
            held_out = read_record(states).rows.held_out
            # Each text is a row of its own, and a process evaluates on whole batches, so many at most.
            evaluated = min(held_out // ROWS, EVAL_BATCHES) * (ROWS // 2)
            for rank, (start, first, *later) in enumerate(found):
                # From the fourth step, as batches are read ahead, to the last but these.
                steps = [after - before for before, after in itertools.pairwise([first, *later])][3:-3]
                rows.append({
                    "target": size(target), "states": size(states), "rank": rank, "start": start, "first": first,
                    "evaluated": evaluated, "step": statistics.median(steps), "most": max(steps),
                })  # fmt: skip
                print(rows[-1], flush=True)
    lines = report(rows, ends)
    print("\n".join(lines))
    if wish.markdown:
        write_section("reads", lines)


def report(rows: list[dict[str, Any]], ends: int) -> list[str]:
    """Return the result as Markdown."""
    token = (len(CAPTURED) + 1) * HIDDEN * 4
    own = ROWS // 2 * SEQ * token
    # Token ids and mask are read too, and the entries that say where they are.
    row = SEQ * (token + 5) + 8 * (ROW + PIECE)
    besides = {(one["rank"], one["target"], one["states"]): one["first"] - one["evaluated"] * row for one in rows}
    few, many = min(one["states"] for one in rows), max(one["states"] for one in rows)
    more = max(besides[rank, target, many] - besides[rank, target, few] for rank, target, _ in besides)
    targets = sorted({one["target"] for one in rows})
    # One row for each size of states and process: where targets differ, a cell has both figures.
    alike: dict[tuple[int, int], list[list[str]]] = {}
    for one in rows:
        read = (one["start"], one["first"] - one["start"], one["evaluated"] * row, one["step"])
        cells = [f"{one['states'] / 1e6:,.1f} MB", str(one["rank"]), *(f"{size / 1000:,.0f} kB" for size in read)]
        alike.setdefault((one["states"], one["rank"]), []).append(cells)
    merged = (map(", ".join, (dict.fromkeys(cells) for cells in zip(*same, strict=True))) for same in alike.values())
    return [
        "## What training reads",
        "",
        "Two processes train from stored states (`train --states`), for a target of "
        f"{' and one of '.join(f'{size / 1e6:,.0f} MB' for size in targets)}; the kernel counts what each asks for "
        "(rchar). The first step has an evaluation (own rows, sixteen batches at most) and batches that are read "
        "ahead. *a step*: the median of the others. The target's embedding, norm and output matrix have "
        f"{ends / 1000:,.0f} kB, a process's rows of a step {own / 1000:,.0f} kB.",
        "",
        "| states | process | start | first step | evaluation | a step |",
        "|---|---|---|---|---|---|",
        *(f"| {' | '.join(cells)} |" for cells in merged),
        "",
        f"Of {many / few:.1f} times the states a process reads {more:,} bytes more until its first step ends, besides "
        "its evaluation rows. At another row length than that of `kconv states --seq` each process first reads the "
        "whole index.",
        "",
        "`scripts/bench reads`.",
    ]


if __name__ == "__main__":
    main()
