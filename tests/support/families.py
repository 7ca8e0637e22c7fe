"""Tiny targets of other families than Kimi-K2's, each with a head that `kconv train` made for it.

An engine serves them, and what it accepts of each place of a draft is what kconv's own chain of the head says.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from filelock import FileLock

import kconv
from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.execute import execute
from kconv.convert.plan import WriteOptions, plan
from kconv.convert.read import read_head
from kconv.convert.shared import SharedTensors
from kconv.engines import by_name
from kconv.tiny.text import read_corpus

from . import tiny_targets
from .normed import NORMS_OF_QK, write_normed
from .tiny_targets import write_target

# SGLang's attention on a CPU is a stand-in of kconv's, which has no sinks.
KINDS = {"vllm": ("llama", "qwen3", "gpt_oss"), "sglang": ("llama", "qwen3")}
QK = "norms of queries and keys"
RECIPE = """
attention: {heads: 4, kv_heads: 2, head_dim: 32}
rope: {theta: 10000}
intermediate: 128
captured: [1, 3, 5]
batches: 40
batch: 4
steps: 120
seq: 64
warmup: 5
"""


def train_families(cache: Path, tokenizer: Path) -> dict[str, Path]:
    """Return the folder of each kind, with target/ and head/; trained once, then found in the cache."""
    made, recipe = {}, Path(tiny_targets.__file__).read_bytes() + RECIPE.encode()
    for kind in dict.fromkeys(kind for kinds in KINDS.values() for kind in kinds):
        key = hashlib.sha256(recipe + kind.encode()).hexdigest()[:16]
        made[kind] = cache / f"family-{kind}-{key}"
        with FileLock(cache / f".family-{kind}.lock"):
            if not made[kind].exists():
                shutil.rmtree(half := made[kind].with_suffix(".part"), ignore_errors=True)
                _train_both(kind, tokenizer, half)
                half.rename(made[kind])
    return made


def _train_both(kind: str, tokenizer: Path, out: Path) -> None:
    out.mkdir()
    write_target(out / "target", kind, tokenizer)
    (out / "recipe.yaml").write_text(RECIPE)
    (out / "train.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in read_corpus().train))
    kconv.train(out / "target", out / "head", recipe=out / "recipe.yaml", data=out / "train.jsonl")


def convert_families(trained: dict[str, Path], engine: str, root: Path) -> dict[str, dict[str, Path]]:
    """Convert each head for an engine, and for vLLM one with norms of queries and keys; by target's kind and name."""
    made: dict[str, dict[str, Path]] = {}
    for kind in KINDS[engine]:
        head = read_head(open_checkpoint(trained[kind] / "head"))
        options = WriteOptions(SharedTensors(kind, {}, layers=tiny_targets.LAYERS, model_type=kind))
        execute(plan(head, by_name(engine), options), root / kind)
        made[kind] = {f"{kind} target": root / kind}
        if (engine, kind) == ("vllm", "qwen3"):
            whole = trained[kind]
            made[kind][f"{kind} target, {QK}"] = root / "qk"
            write_normed(whole / "head", whole / "target", NORMS_OF_QK, "vllm", root / "qk")
    return made
