"""Heads that engines serve one after the other: vLLM in one process, SGLang each in a fork of what imported it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from kconv.drafters.base import Spec
from kconv.engines import sglang, start_server, vllm
from kconv.engines.base import Serving
from kconv.engines.counters import Counts

VLLM = Path(__file__).parent / "vllm_drafts.py"
TRITON = "3.9.0"
SGLANG = Path(__file__).parent / "sglang_drafts.py"


@dataclass(frozen=True)
class Recorded:
    """What vLLM answered, by the head's name ("" for none; see `vllm_drafts.py`), and what it logged about each."""

    answers: dict[str, dict]
    logs: dict[str, str]


def record_vllm(
    python: Path,
    target: Path,
    heads: Mapping[str, Path | Serving],
    prompts: list[list[int]],
    folder: Path,
    *,
    steps: int,
    new_tokens: int,
    look_ahead: int = 0,
    together: bool = False,
    dtype: str = "float32",
    triton: Path | None = None,
) -> Recorded:
    """Have heads of one kind of attention served with a target, and once none.

    Args:
        python: of an environment with vLLM in it.
        target: the target's folder.
        heads: folders by name; what else vLLM is told about a head, where it is no Eagle3 head.
        prompts: token ids.
        folder: to work in.
        steps: K.
        new_tokens: tokens that each prompt is continued by.
        look_ahead: tokens more that it is continued by without a head.
        together: whether prompts are continued side by side, which is faster; whose a draft is, is not told then.
        dtype: of the weights in memory.
        triton: where Triton is, for the V2 runner under its interpreter; None for the V1 runner.
    """
    served = {
        name: head if isinstance(head, Serving) else Serving(python, target, head, draft_tokens=steps)
        for name, head in heads.items()
    }
    request = {
        "llm": {
            "model": str(target),
            "dtype": dtype,
            "enforce_eager": True,
            "max_model_len": 256,
            "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
        },
        "new_tokens": new_tokens,
        "look_ahead": look_ahead,
        "prompts": prompts,
        "together": together,
        "heads": {"": None} | {name: vllm.speculation(head) for name, head in served.items()},
    }
    (folder / "request.json").write_text(json.dumps(request))
    more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if triton:
        more |= {"PYTHONPATH": str(triton), "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    done = subprocess.run(
        [python, VLLM, folder / "request.json", folder / "answer.json", start_server.__file__],
        env=os.environ | vllm.environment(next(iter(served.values()))) | more,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    logs = dict(part.split("\n", 1) for part in done.stdout.split("== HEAD ")[1:])
    return Recorded(json.loads((folder / "answer.json").read_text()), logs)


def fetch_triton(python: Path, cache: Path) -> Path:
    """Return a folder with Triton in it, beside the environment, whose V1 runner it must not reach."""
    folder = cache / f"triton-{TRITON}"
    with FileLock(cache / ".triton.lock"):
        if not folder.exists():
            shutil.rmtree(half := folder.with_suffix(".part"), ignore_errors=True)
            words = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", half, f"triton=={TRITON}"]
            subprocess.run([python, *words], check=True)
            half.rename(folder)
    return folder


@dataclass(frozen=True)
class Job:
    """A head that is served, None for none, what it is if it is no Eagle3 head, and arguments of sgl.Engine."""

    target: Path
    head: Path | None = None
    spec: Spec | None = None
    steps: int = 3
    look_ahead: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)

    def request(self) -> dict[str, Any]:
        serving = Serving(Path("python"), self.target, self.head, self.spec, self.steps)
        told = {
            name.removeprefix("--").replace("-", "_"): int(value) if value.isdigit() else value
            for name, value in sglang.speculation(serving).items()
        }
        engine = {"model_path": str(self.target), "dtype": "float32"} | told
        return {"engine": engine | dict(self.more), "look_ahead": self.look_ahead}


@dataclass(frozen=True)
class SglangAnswer:
    """What SGLang did with a head.

    Attributes:
        outputs: token ids, by prompt.
        counts: over all prompts, as its answers say; None without a head.
        captured: the layers whose inputs the target kept for the head.
        unreached: the head's parameters that no tensor reached.
        error: the traceback, where it failed; "" where it served.
        log: what it wrote.
    """

    outputs: list[list[int]]
    counts: Counts | None
    captured: tuple[int, ...]
    unreached: tuple[str, ...] | None
    error: str
    log: str


def record_sglang(
    python: Path, jobs: Mapping[str, Job], prompts: list[list[int]], folder: Path, *, new_tokens: int
) -> dict[str, SglangAnswer]:
    """Have SGLang serve each job on the same prompts.

    Args:
        python: of an environment with SGLang in it.
        jobs: by name.
        prompts: token ids.
        folder: to work in.
        new_tokens: tokens that each prompt is continued by.
    """
    request = {
        "prompts": prompts,
        "new_tokens": new_tokens,
        "jobs": {name: job.request() for name, job in jobs.items()},
    }
    (folder / "request.json").write_text(json.dumps(request))
    done = subprocess.run(
        [python, SGLANG, folder / "request.json", folder / "answer.json", start_server.__file__],
        # In each fork torch would compile the choice of experts anew, which takes half of a head's time.
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    found = json.loads((folder / "answer.json").read_text())
    return {name: _answer(found[name], jobs[name].steps) for name in jobs}


def _answer(found: dict[str, Any], steps: int) -> SglangAnswer:
    histograms = [meta.get("spec_correct_drafts_histogram") for meta in found.get("meta", ())]
    counts = [Counts.of_histogram(histogram, steps) for histogram in histograms if histogram]
    unreached = found.get("unreached")
    return SglangAnswer(
        found.get("outputs", []),
        Counts.pool(counts) if counts else None,
        tuple(found.get("captured") or ()),
        None if unreached is None else tuple(unreached),
        found.get("error", ""),
        found.get("log", ""),
    )
