"""A real vLLM hands out the states that transformers reports for the same tokens, layer by layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kconv.cli import main
from kconv.engines.base import Serving
from kconv.engines.vllm import ENGINE
from kconv.serving.start import serve
from kconv.serving.states import CONNECTOR, states_options
from kconv.targets.forward import capture, generate_greedy
from kconv.targets.model import load_target
from kconv.targets.states import open_states

pytestmark = [pytest.mark.slow, pytest.mark.engine]

SUPPORT = Path(__file__).parent.parent / "support"
CAPTURED = (1, 3, 5)
SAID = [
    {
        "id": f"q{number}",
        "messages": [
            {"role": "user", "content": f"Count to {number}."},
            {"role": "assistant", "content": " ".join(map(str, range(number + 1)))},
        ],
    }
    for number in range(12)
]


def test_served_states_are_those_of_transformers(engine_python, demo, tmp_path, monkeypatch):
    target, shared, out = demo / "target", tmp_path / "shared", tmp_path / "states"
    shared.mkdir()
    options = states_options(CAPTURED, 7, shared)
    # The CPU build has neither CUDA streams nor pinned memory; all else of the connector is vLLM's.
    connect = json.loads(options["--kv-transfer-config"])
    assert connect["kv_connector"] == CONNECTOR
    connect |= {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "vllm_states_connector"}
    options["--kv-transfer-config"] = json.dumps(connect)
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    with serve(Serving(engine_python, target, options=options), ENGINE) as served:
        words = ["states", target, out, "--prompts", demo / "held-out.jsonl", "--captured", "1,3,5"]
        words += ["--text-tokens", 40, "--prompt-tokens", 24, "--greedy", 12, "--dtype", "F32"]
        words += ["--url", served.client.url, "--shared", shared]
        done = CliRunner().invoke(main, [str(word) for word in words])
        dialogues, said = tmp_path / "dialogues.jsonl", tmp_path / "said"
        dialogues.write_text("".join(json.dumps(row) + "\n" for row in SAID))
        words = ["states", target, said, "--data", dialogues, "--captured", "1,3,5", "--dtype", "F32"]
        words += ["--url", served.client.url, "--shared", shared, "--concurrency", 6]
        answered = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    assert answered.exit_code == 0, answered.output
    assert "12 sequences (12 dialogue)" in answered.stdout
    # What was read is cleared away.
    assert not list(shared.glob("*.safetensors*"))

    model, states = load_target(target, torch.float32), open_states(out, captured=CAPTURED)
    dialogue = open_states(said, captured=CAPTURED)
    for index in range(len(dialogue.sequences)):
        found = dialogue.read(index)
        captured, hidden = capture(model, found.tokens[None], CAPTURED)
        assert torch.allclose(found.captured, captured[0], atol=1e-5 * float(captured.abs().max()))
        assert torch.allclose(found.hidden, hidden[0], atol=1e-5 * float(hidden.abs().max()))
    assert [s.kind for s in states.sequences] == ["held-out", "greedy"] * 4
    for index, sequence in enumerate(states.sequences):
        found = states.read(index)
        captured, hidden = capture(model, found.tokens[None], CAPTURED)
        # fp32 on both sides, and another order of additions.
        assert torch.allclose(found.captured, captured[0], atol=1e-5 * float(captured.abs().max()))
        assert torch.allclose(found.hidden, hidden[0], atol=1e-5 * float(hidden.abs().max()))
        if sequence.kind == "greedy":
            [own] = generate_greedy(model, [found.tokens[:24].tolist()], 12)
            assert found.tokens[24:].tolist() == own
