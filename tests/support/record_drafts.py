"""Heads served by vLLM one after the other, in one process of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kconv.engines import start_server
from kconv.engines.base import Serving
from kconv.engines.vllm import environment, speculation

RECORDER = Path(__file__).parent / "vllm_drafts.py"


@dataclass(frozen=True)
class Recorded:
    """What vLLM answered, by the head's name ("" for none; see `vllm_drafts.py`), and what it logged about each."""

    answers: dict[str, dict]
    logs: dict[str, str]


def record(
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
        "heads": {"": None} | {name: speculation(head) for name, head in served.items()},
    }
    (folder / "request.json").write_text(json.dumps(request))
    done = subprocess.run(
        [python, RECORDER, folder / "request.json", folder / "answer.json", start_server.__file__],
        env=os.environ | environment(next(iter(served.values()))) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    logs = dict(part.split("\n", 1) for part in done.stdout.split("== HEAD ")[1:])
    return Recorded(json.loads((folder / "answer.json").read_text()), logs)
