"""An environment with vLLM in it; a target of random weights; a target and heads that were really trained."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kconv.pipeline.demo import RECIPE, run_demo
from kconv.tiny.recipe import cache_root

ROOT = Path(__file__).parent.parent.parent
# The demo's own target and heads, on few prompts: a smaller target's greedy text runs in circles at once, which
# any head drafts well, whichever layers it reads.
SERVED = dataclasses.replace(RECIPE, prompts=4)


@pytest.fixture(scope="session")
def engine_python() -> Path:
    """Return the interpreter that vLLM is started with: $KCONV_ENGINE_PYTHON, else what scripts/engine-env makes."""
    given = os.environ.get("KCONV_ENGINE_PYTHON")
    if given:
        return Path(given)
    made = subprocess.run([ROOT / "scripts" / "engine-env"], stdout=subprocess.PIPE, text=True, check=True)
    return Path(made.stdout.strip())


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """Return the interpreter that SGLang is started with: $KCONV_SGLANG_PYTHON, else what scripts/engine-env makes."""
    given = os.environ.get("KCONV_SGLANG_PYTHON")
    if given:
        return Path(given)
    made = subprocess.run([ROOT / "scripts" / "engine-env", "sglang"], stdout=subprocess.PIPE, text=True, check=True)
    return Path(made.stdout.strip())


@pytest.fixture(scope="session")
def lm_eval() -> Path:
    """Return lm_eval's program: $KCONV_LM_EVAL, else what scripts/engine-env makes."""
    given = os.environ.get("KCONV_LM_EVAL")
    if given:
        return Path(given)
    made = subprocess.run([ROOT / "scripts" / "engine-env", "lm-eval"], stdout=subprocess.PIPE, text=True, check=True)
    return Path(made.stdout.strip()).with_name("lm_eval")


@pytest.fixture(scope="session")
def random_target(tiny_target, tmp_path_factory) -> Path:
    """Return the tiny target with random weights in the trained ones' place.

    Each layer changes the stream as much as it carries on, so that which one is captured matters, and greedy
    decoding wanders among many tokens.
    """
    folder = tmp_path_factory.mktemp("random") / "target"
    shutil.copytree(tiny_target, folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=generator)
        if "embed_tokens" in name:
            weights[name] = noise
        elif weight.ndim == 2:
            weights[name] = 1.5 * noise / weight.shape[1] ** 0.5
        else:
            weights[name] = weight + 0.1 * noise
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def demo(once, demo_lock) -> Path:
    """Return the demo's folder: target, mla/vllm and gqa/vllm; trained once, then found in the cache."""
    with demo_lock:
        return once("demo", lambda out: run_demo(out, cache_root(), _quiet, SERVED))


@contextmanager
def _quiet(_: str) -> Iterator:
    yield lambda *_: None
