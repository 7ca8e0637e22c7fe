"""Heads served by SGLang one after the other, each in a process forked from one that has imported it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kconv.drafters.base import Spec
from kconv.engines import start_server
from kconv.engines.base import Serving
from kconv.engines.counters import Counts
from kconv.engines.sglang import speculation

RECORDER = Path(__file__).parent / "sglang_drafts.py"


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
            for name, value in speculation(serving).items()
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


def record(
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
        [python, RECORDER, folder / "request.json", folder / "answer.json", start_server.__file__],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
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
