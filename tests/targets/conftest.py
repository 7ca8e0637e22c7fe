"""The trained tiny target, loaded, and states of it on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from kconv.checkpoint.folder import open_checkpoint
from kconv.targets.config import read_target_config
from kconv.targets.forward import LocalRunner
from kconv.targets.model import load_target
from kconv.targets.options import StatesOptions
from kconv.targets.tokenizer import load_tokenizer
from kconv.targets.write_states import write_states

TEXTS = (
    ("docs", "Return the number of items in a container, or raise TypeError."),
    ("docs", "A context manager that suppresses any of the given exceptions if they occur in its body."),
    ("help", "The statement raises an exception where nothing else is said, and does so again."),
    ("help", "Names refer to objects. Names are introduced by name binding operations of many kinds."),
)


@pytest.fixture(scope="session")
def model(tiny_target):
    """Return the TEST target in fp32; tests must not change it."""
    return load_target(tiny_target, torch.float32)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "held-out.jsonl"
    file.write_text("".join(json.dumps({"category": c, "prompt": text}) + "\n" for c, text in TEXTS))
    return file


@pytest.fixture(scope="session")
def wanted(prompts) -> StatesOptions:
    return StatesOptions(
        prompts=str(prompts), captured=(1, 3, 5), prompt_tokens=8, text_tokens=24, sampled=12, greedy=6, seed=3
    )


@pytest.fixture(scope="session")
def write(model, tiny_target):
    """Return a function that writes states of the tiny target."""

    def write(wanted: StatesOptions, out: Path, shard_bytes: int = 30_000):
        checkpoint, config = open_checkpoint(tiny_target), read_target_config(tiny_target)
        tokenizer = load_tokenizer(tiny_target)
        return write_states(LocalRunner(model), checkpoint, config, tokenizer, wanted, out, shard_bytes=shard_bytes)

    return write


@pytest.fixture(scope="session")
def stored(write, wanted, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("states") / "out"
    write(wanted, out)
    return out


@pytest.fixture
def copy(stored, tmp_path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "copy"))
