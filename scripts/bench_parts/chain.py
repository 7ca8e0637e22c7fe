"""The whole chain through a real vLLM: prompts to a converted head by one recipe, killed within each of its steps.

The recipe is run whole, and then twice more: in one of them SIGKILL ends it within each step, in the other SIGTERM, and
the same command goes on. Every file that comes out is compared with the whole run's. The target is
SmolLM2-135M-Instruct of the package index, unless --target names its folder; vLLM serves it in fp32 on a CPU.

    .venv/bin/python scripts/bench chain [--target FOLDER] [--work FOLDER] [--markdown]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from bench_parts.machine import KCONV
from bench_parts.page import spread, write_section
from bench_parts.serving import ROOT, StatesServer, serve_states
from real_parts.prompts import draw_prompts
from real_parts.smollm import make_target

SIGNALS = (signal.SIGKILL, signal.SIGTERM)
PROMPTS, ANSWER_TOKENS, CAPTURED = 12, 24, (1, 14, 28)
# What a server runs side by side it sums in another order.
SAME_EACH_TIME = {"--max-num-seqs": "1"}
SETTINGS = {
    "attention": {"heads": 9, "kv_heads": 3, "head_dim": 64}, "draft_vocab": 64, "batch": 2, "seq": 64, "steps": 8,
    "warmup": 2, "dtype": "F32", "compute": None,
}  # fmt: skip
# What a run records of itself, and no output.
OWN = ("run.json", "run.jsonl")
# What a training measures of its own time.
RATE = re.compile(rb'"tokens_per_second": [0-9.]+')
# Of each step, what it leaves before it is done.
WITHIN: Mapping[str, Callable[[Path], bool]] = {
    "dialogues": lambda root: lines(root / "dialogues" / "dialogues.jsonl") > 2,
    "states": lambda root: any(root.glob(".*states-states/states-*.safetensors")),
    "head": lambda root: any(root.glob(".head.training/checkpoint-*/trainer_state.json")),
    "vllm": lambda root: any(root.glob(".kconv-partial-vllm-*/*")),
    "report": lambda root: begun(root, "report"),
}


def recipe(server: StatesServer, target: Path, prompts: Path) -> dict[str, Any]:
    """Return the chain's recipe."""
    served = {"url": server.url, "concurrency": 1}
    steps = {
        "dialogues": {"do": "generate", "model": server.model, "prompts": str(prompts), "max_tokens": ANSWER_TOKENS,
                      "temperature": 0, **served},
        "states": {"do": "states", "target": str(target), "data": "$dialogues/dialogues.jsonl", "dtype": "F32",
                   "captured": CAPTURED, "shared": str(server.shared), "shard_mib": 2, **served},
        "head": {"do": "train", "target": str(target), "states": "$states", "recipe": "eagle3-gqa", "set": SETTINGS,
                 "save_every": 2, "eval_every": 8},
        "vllm": {"do": "convert", "head": "$head", "to": "vllm"},
        "report": {"do": "validate", "head": "$vllm", "source": "$head"},
    }  # fmt: skip
    return {"name": "chain", "steps": steps}


def lines(file: Path) -> int:
    """Return how many lines a file has; none where it is not there."""
    return file.read_bytes().count(b"\n") if file.exists() else 0


def begun(root: Path, step: str) -> bool:
    """Say whether the last thing that a run noted is that it began a step."""
    noted = (root / "run.jsonl").read_text().splitlines() if (root / "run.jsonl").exists() else []
    last = json.loads(noted[-1]) if noted else {}
    return (last.get("event"), last.get("step")) == ("begin", step)


def start(file: Path, root: Path) -> subprocess.Popen[bytes]:
    """Start the recipe."""
    return subprocess.Popen([KCONV, "run", file, "--out", root], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run_whole(file: Path, root: Path) -> float:
    """Run the recipe to its end, and return its seconds."""
    begin = time.perf_counter()
    if code := start(file, root).wait():
        sys.exit(f"error: kconv run ended with {code}")
    return time.perf_counter() - begin


def end_within(file: Path, root: Path, step: str, number: signal.Signals) -> dict[str, Any]:
    """Start the recipe, end it within a step, and return how it ended and how many seconds that took."""
    process = start(file, root)
    while process.poll() is None and not WITHIN[step](root):
        time.sleep(0.001)
    ended = process.poll() is None
    process.send_signal(number)
    begin = time.perf_counter()
    code = process.wait()
    within = ended and code != 0 and not done(root, step)
    found = {"step": step, "within": within, "code": code, "seconds": time.perf_counter() - begin}
    print(number.name, found, flush=True)
    return found


def done(root: Path, step: str) -> bool:
    """Say whether a run takes a step for done."""
    return json.loads((root / "run.json").read_text())["steps"].get(step, {}).get("status") == "done"


def digests(root: Path) -> dict[str, str]:
    """Return a digest of each file that a run made, but for its rate."""
    files = (file for file in root.rglob("*") if file.is_file() and file.name not in OWN)

    def bytes_of(file: Path) -> bytes:
        return RATE.sub(b"", file.read_bytes()) if file.name == "training.json" else file.read_bytes()

    return {str(f.relative_to(root)): hashlib.sha256(bytes_of(f)).hexdigest() for f in sorted(files)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, help="SmolLM2's folder (build/real/target, made if it is not there)")
    parser.add_argument("--work", type=Path, help="keep what is made in this folder")
    parser.add_argument("--markdown", action="store_true", help="write the result into docs/evidence/benchmarks.md")
    wish = parser.parse_args()
    target = (wish.target or ROOT / "build" / "real" / "target").absolute()
    if not target.exists():
        make_target(target.with_name("packages"), target)
    with tempfile.TemporaryDirectory(prefix="bench-chain-") as name:
        work = (wish.work or Path(name)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        with serve_states(target, CAPTURED, 512, SAME_EACH_TIME) as server:
            found = run_all(server, target, work)
    report = describe(found)
    print("\n".join(report))
    if wish.markdown:
        write_section("chain", report)


def run_all(server: StatesServer, target: Path, work: Path) -> dict[str, Any]:
    """Run the recipe whole, and ended by each signal, and return what came of it."""
    prompts, file = work / "prompts.jsonl", work / "chain.yaml"
    drawn = draw_prompts()
    some = [next(drawn) for _ in range(PROMPTS)]
    prompts.write_text("".join(json.dumps({"id": p.id, "prompt": p.turns[0]}) + "\n" for p in some))
    file.write_text(json.dumps(recipe(server, target, prompts)))
    # Each of the same name, which stands in reports and manifests.
    roots = {name: work / name / "run" for name in ("whole", *(number.name for number in SIGNALS))}
    for root in roots.values():
        shutil.rmtree(root.parent, ignore_errors=True)
        root.parent.mkdir()
    found: dict[str, Any] = {"seconds": run_whole(file, roots["whole"]), "ended": {}}
    whole = digests(roots["whole"])
    for number in SIGNALS:
        root = roots[number.name]
        rows = [end_within(file, root, step, number) for step in WITHIN]
        run_whole(file, root)
        own = digests(root)
        other = sorted(name for name in whole.keys() | own.keys() if whole.get(name) != own.get(name))
        print(number.name, "differ:", other, flush=True)
        found["ended"][number.name] = {"rows": rows, "other": other}
    return found | {"files": list(whole), "bytes": sum((roots["whole"] / name).stat().st_size for name in whole)}


def describe(found: dict[str, Any]) -> list[str]:
    """Return the result as Markdown."""
    apart = {name: ended["other"] for name, ended in found["ended"].items()}
    told = "all are the same byte for byte in both" if not any(apart.values()) else f"these differ: {apart}"
    return [
        "## The chain, ended within each step",
        "",
        f"`kconv run` over one recipe: {PROMPTS} prompts, answers of at most {ANSWER_TOKENS} tokens by a real vLLM, "
        f"their states from the same server, {SETTINGS['steps']} steps of training, conversion for vLLM and "
        f"validation. The target is SmolLM2-135M-Instruct in fp32 on a CPU. The whole takes {found['seconds']:.0f} "
        f"s. Two more runs are ended within each step and go on. Of the {len(found['files'])} files "
        f"({found['bytes'] / 1e6:,.0f} MB), {told}, but for `tokens_per_second` in training.json.",
        "",
        "| signal | ended within its step | exit code | seconds to the end |",
        "|---|---|---|---|",
        *(
            f"| {name} | {sum(row['within'] for row in ended['rows'])} of {len(ended['rows'])}: "
            f"{', '.join(row['step'] for row in ended['rows'])} | "
            f"{', '.join(sorted({str(row['code']) for row in ended['rows']}))} | "
            f"{spread([row['seconds'] for row in ended['rows']], 1)} |"
            for name, ended in found["ended"].items()
        ),
        "",
        "The server answers one request at a time (`--max-num-seqs 1`), because side by side it sums in another order.",
        "",
        "`scripts/bench chain`.",
    ]


if __name__ == "__main__":
    main()
