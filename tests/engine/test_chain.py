"""Prompts to a head by one recipe, through a real vLLM: killed at each stage and run again, it leaves equal bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kconv.engines.base import Serving
from kconv.engines.serving import serve
from kconv.engines.vllm import ENGINE
from kconv.engines.vllm_states import states_options
from kconv.tiny.recipe import DEMO
from kconv.tiny.target import make_target
from kconv.tiny.text import read_corpus

pytestmark = [pytest.mark.slow, pytest.mark.engine]

SUPPORT = Path(__file__).parent.parent / "support"
SETTINGS = {
    "attention": {"heads": 4, "kv_heads": 2, "head_dim": 16},
    "intermediate": 64,
    "rope": {"theta": 10000.0},
    "batch": 2,
    "seq": 32,
    "steps": 16,
    "warmup": 2,
    "lr": 3e-3,
    "rest_lr": 3e-3,
    "dtype": "F32",
    "compute": None,
}
# Of each step, what it leaves before it is done.
STAGES: dict[str, Callable[[Path], bool]] = {
    "dialogues": lambda root: len(lines(root / "dialogues" / "dialogues.jsonl")) > 2,
    "states": lambda root: any(root.glob(".*states-states/states-*.safetensors")),
    "head": lambda root: any(root.glob(".head.training/checkpoint-*/trainer_state.json")),
}


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def recipe(target: Path, prompts: Path, url: str, shared: Path) -> str:
    steps = {
        "dialogues": {"do": "generate", "url": url, "model": str(target), "prompts": str(prompts), "max_tokens": 24,
                      "temperature": 0, "concurrency": 1},
        # One at a time: what a server runs side by side it sums in another order.
        "states": {"do": "states", "target": str(target), "data": "$dialogues/dialogues.jsonl", "captured": [1, 3, 5],
                   "dtype": "F32", "url": url, "shared": str(shared), "concurrency": 1, "shard_mib": 1},
        "head": {"do": "train", "target": str(target), "states": "$states", "recipe": "eagle3-gqa", "set": SETTINGS,
                 "save_every": 3, "eval_every": 16},
        "vllm": {"do": "convert", "head": "$head", "to": "vllm"},
    }  # fmt: skip
    return json.dumps({"name": "chain", "steps": steps})


def start(file: Path, root: Path) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-c", "from kconv.cli import main; main()", "run", str(file), "--out", str(root)]
    return subprocess.Popen(program, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)


def made(root: Path) -> dict[str, bytes]:
    """Return what the chain made: dialogues, states and weights. Its records say when and where."""
    kept = [root / "dialogues" / "dialogues.jsonl", *(root / "states").iterdir(), *root.glob("*/*.safetensors")]
    return {str(file.relative_to(root)): file.read_bytes() for file in kept}


@pytest.fixture
def target(cache, demo_lock) -> Path:
    """Return the demo's target: the MoE of the tests' own is too narrow for vLLM's CPU kernels in fp32."""
    with demo_lock:
        return make_target(DEMO, cache)


def test_a_chain_that_is_killed_at_each_stage_leaves_the_same_bytes(engine_python, target, tmp_path, monkeypatch):
    shared, prompts, file = tmp_path / "shared", tmp_path / "prompts.jsonl", tmp_path / "chain.yaml"
    shared.mkdir()
    texts = [text for text in read_corpus().train if len(text) > 200][:24]
    prompts.write_text("".join(json.dumps({"prompt": text[:80]}) + "\n" for text in texts))
    options = states_options((1, 3, 5), 7, shared)
    # The CPU build has neither CUDA streams nor pinned memory; all else of the connector is vLLM's.
    connect = json.loads(options["--kv-transfer-config"])
    connect |= {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "vllm_states_connector"}
    options["--kv-transfer-config"] = json.dumps(connect)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
    with serve(Serving(engine_python, target, options=options), ENGINE) as served:
        # What the server needs is no path of kconv's own.
        monkeypatch.undo()
        file.write_text(recipe(target, prompts, served.client.url, shared))
        assert start(file, tmp_path / "whole").wait() == 0
        root, killed = tmp_path / "killed", []
        for stage, begun in STAGES.items():
            process = start(file, root)
            while process.poll() is None and not begun(root):
                time.sleep(0.005)
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                killed.append(stage)
            process.wait()
            assert not (root / stage / "kconv.json").exists()
        asked = lines(root / "dialogues" / "dialogues.jsonl")
        assert start(file, root).wait() == 0
    assert killed == list(STAGES)
    one, other = made(tmp_path / "whole"), made(root)
    assert one.keys() == other.keys() and {"head/model.safetensors", "vllm/model.safetensors"} < one.keys()
    assert [name for name in one if one[name] != other[name]] == []
    assert len(asked) == 24
