"""Time `kconv to-vllm` against `speculators convert` on the same head, and count what each of them copied.

    .venv/bin/python scripts/bench speculators [--size small] [--pairs 3] [--markdown]

speculators is installed into a temporary folder and uses kconv's torch and transformers; torchvision and
torchaudio, which its convert does not load, are omitted. Both sides alternate in one run, after a warm-up of each, and
both outputs are flushed to disk.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from bench_parts.heads import Head, make_head
from bench_parts.machine import KCONV, Run, apart, timed, warm
from bench_parts.page import closing, write_section

from kconv.drafters.spec import Gqa, HeadSpec, Rope

LEFT_OUT = ("torch", "torchvision", "torchaudio")
PATIENCE = 300  # seconds for pip
# A Llama's head, as speculators' own examples have it: it knows no MLA.
GQA = HeadSpec(
    attention=Gqa(32, kv_heads=8, head_dim=128), hidden=4096, target_hidden=4096, intermediate=14336, layers=1,
    vocab=32768, draft_vocab=32768, rope=Rope(500000.0), captured=(1, 15, 28), eps=1e-5, dtype="BF16",
    max_positions=131072,
)  # fmt: skip
SMALL = replace(GQA, hidden=512, target_hidden=512, intermediate=1024, vocab=4096, draft_vocab=4096)
VERIFIER = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 32}
Command = Callable[[Path, Path], list[str]]


@dataclass(frozen=True)
class Side:
    """One converter: its command for a head and an output, and the variables that it needs."""

    name: str
    command: Command
    variables: dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("full", "small"), default="full", help="full: 1.1 GB; small: a quick check")
    parser.add_argument("--pairs", type=int, default=3, help="timed pairs, with the head in the page cache (3)")
    parser.add_argument("--markdown", action="store_true", help="write the result into docs/evidence/benchmarks.md")
    wish = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-speculators-") as name:
        folder = Path(name)
        lines = compare(folder, GQA if wish.size == "full" else SMALL, wish.pairs)
    print("\n".join(lines))
    if wish.markdown:
        write_section("speculators", lines)


def compare(folder: Path, spec: HeadSpec, pairs: int) -> list[str]:
    title = ["## Against `speculators convert`", ""]
    installed = install(folder / "site")
    if not installed:
        return [*title, "Not compared: `speculators` cannot be installed here beside this torch."]
    verifier = folder / "verifier"
    verifier.mkdir()
    dims = {"hidden_size": spec.hidden, "vocab_size": spec.vocab, "max_position_embeddings": spec.max_positions}
    (verifier / "config.json").write_text(json.dumps(VERIFIER | dims))
    convert = [sys.executable, "-m", "speculators", "convert"]
    sides = (
        Side(f"speculators {installed}", lambda head, out: [
            *convert, str(head), "--verifier", str(verifier), "--algorithm", "eagle3", "--output-path", str(out),
        ], {"PYTHONPATH": str(folder / "site"), "HF_HUB_OFFLINE": "1"}),
        Side(f"kconv {version('kconv')}", lambda head, out: [
            str(KCONV), "to-vllm", str(head), str(out), "--captured-are", "outputs",
        ], {}),
    )  # fmt: skip
    head: Head = apart(make_head, folder / "head", spec, "safeailab")
    carried = {side.name: share(side, head, folder) for side in sides}
    found: dict[str, list[Run]] = {side.name: [] for side in sides}
    for _ in range(pairs):
        for side in sides:
            warm(head.file)
            found[side.name].append(convert_flushed(side, head.folder, folder / "out"))
            print(side.name, found[side.name][-1], flush=True)
    middle = {name: statistics.median(run.wall for run in runs) for name, runs in found.items()}
    theirs, ours = (found[side.name] for side in sides)
    ratio = statistics.median(one.wall / other.wall for one, other in zip(theirs, ours, strict=True))
    return [
        *title,
        f"A synthetic GQA head of {head.tensors} tensors, {head.size / 1e9:.2f} GB, under SafeAILab's names; medians "
        f"of {pairs} turns; both outputs flushed.",
        "",
        "| converter | wall clock | processor time | peak memory | source tensors with the same bytes |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {middle[name]:.1f} s | {statistics.median(run.cpu for run in runs):.1f} s "
            f"| {max(run.peak for run in runs):,.0f} MiB | {carried[name]} |"
            for name, runs in found.items()
        ),
        "",
        f"kconv is **{ratio:.1f}** times as fast (median of the pairs), hashes and checks included.",
        "",
        closing("bench speculators"),
    ]


def install(site: Path) -> str:
    """Install speculators into a folder, with what kconv's environment lacks of its needs, and return its version."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    site.mkdir()
    held, report = site / "held.txt", site / "report.json"
    held.write_text("".join(f"{name}=={version(name)}\n" for name in ("torch", "transformers")))
    asked = subprocess.run(
        [*pip, "--dry-run", "--report", str(report), "-c", str(held), "speculators"], timeout=PATIENCE
    )
    if asked.returncode:
        return ""
    wanted = {one["metadata"]["name"]: one["metadata"]["version"] for one in json.loads(report.read_text())["install"]}
    names = [f"{name}=={number}" for name, number in wanted.items() if name not in LEFT_OUT]
    done = subprocess.run([*pip, "--no-deps", "--target", str(site), *names], timeout=PATIENCE)
    return "" if done.returncode else wanted["speculators"]


def convert_flushed(side: Side, head: Path, out: Path) -> Run:
    """Time a conversion and the flush of what it wrote."""
    begin = time.perf_counter()
    run = timed(side.command(head, out), side.variables)
    for file in out.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    wall = time.perf_counter() - begin
    shutil.rmtree(out)
    os.sync()
    return replace(run, wall=wall)


def share(side: Side, head: Head, folder: Path) -> str:
    """Convert a head, as a warm-up, and say how many of its tensors' bytes are in the output."""
    out = folder / "carried"
    timed(side.command(head.folder, out), side.variables)
    ours, theirs = (apart(digests, folder) for folder in (head.folder, out))
    shutil.rmtree(out)
    return f"{sum(digest in set(theirs) for digest in ours)} of {len(ours)}"


def digests(folder: Path) -> list[str]:
    """Return a digest of each tensor's shape and bytes, by the safetensors library."""
    from hashlib import sha256

    import torch
    from safetensors import safe_open

    found = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                tensor = opened.get_tensor(name)
                data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                found.append(sha256(f"{tuple(tensor.shape)}".encode() + data).hexdigest())
    return found


if __name__ == "__main__":
    main()
