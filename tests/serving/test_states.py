"""States through a server: what it must hand out, and what is not taken for it."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from kconv.errors import ConnectionBroken, EngineFailed, StatesInvalid
from kconv.serving import ask
from kconv.serving.client import Client
from kconv.serving.states import ServedRunner, states_options
from kconv.targets.config import read_target_config
from kconv.targets.forward import capture, generate_greedy
from kconv.targets.model import load_target

IDS = [5, 9, 17, 33, 2, 8, 90]
CAPTURED = (1, 3, 5)


@pytest.fixture(scope="module")
def model(tiny_target):
    return load_target(tiny_target, torch.float32)


@pytest.fixture
def runner(stand_in, tiny_target, tmp_path) -> ServedRunner:
    weights = load_file(tiny_target / "model.safetensors")
    return ServedRunner(
        Client(stand_in.url, "tiny"),
        tmp_path,
        read_target_config(tiny_target),
        weights["model.norm.weight"],
        weights["lm_head.weight"],
        "F32",
        patience=1.0,
    )


@pytest.fixture
def hand_out(stand_in, model, tmp_path):
    """Return a function that has the stand-in write what enters the given layers, as vLLM's connector does."""

    def hand_out(layers=(2, 4, 6, 7), *, late: bool = False, off: float = 0.0, **tensors) -> None:
        def complete(body):
            prompt = body["prompt"]
            streams, _ = capture(model, torch.tensor([prompt]), [layer - 1 for layer in layers])
            states = streams[0].unflatten(1, (len(layers), -1))
            new = generate_greedy(model, [prompt], body["max_tokens"])[0]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
            logprob = float(logits.log_softmax(-1)[new[0]]) + off
            held = {"token_ids": torch.tensor(prompt), "hidden_states": states.contiguous()} | tensors
            lock = (tmp_path / "0-a.safetensors.lock").open("w")
            if late:
                fcntl.flock(lock, fcntl.LOCK_EX)

            def write():
                time.sleep(0.2 * late)
                save_file(held, tmp_path / "0-a.safetensors")
                lock.close()

            threading.Thread(target=write).start() if late else write()
            answer = {
                "choices": [{"token_ids": new, "logprobs": {"token_logprobs": [logprob]}}],
                "kv_transfer_params": {"hidden_states_path": "/elsewhere/0-a.safetensors"},
            }
            return 200, json.dumps(answer)

        stand_in.answers["/v1/completions"] = complete

    return hand_out


@pytest.mark.parametrize("late", [False, True])
def test_inputs_of_layers_become_outputs_and_the_last_is_normed(runner, hand_out, model, tmp_path, late):
    hand_out(late=late)
    captured, hidden = runner.capture(torch.tensor([IDS]), CAPTURED)
    expected, normed = capture(model, torch.tensor([IDS]), CAPTURED)
    assert torch.equal(captured, expected)
    assert torch.allclose(hidden, normed, atol=1e-6)
    assert not list(tmp_path.iterdir())


def test_the_last_layer_may_itself_be_captured(runner, hand_out, model):
    hand_out((2, 7))
    captured, hidden = runner.capture(torch.tensor([IDS]), (1, 6))
    expected, normed = capture(model, torch.tensor([IDS]), (1, 6))
    assert torch.equal(captured, expected)
    assert torch.allclose(hidden, normed, atol=1e-6)


def test_greedy_continuations_come_from_the_server_and_leave_no_file(runner, hand_out, model, tmp_path):
    hand_out()
    assert runner.extend("greedy", [IDS, IDS[:3]], 4, 0) == generate_greedy(model, [IDS, IDS[:3]], 4)
    assert not list(tmp_path.iterdir())
    with pytest.raises(EngineFailed, match="sampling on a server with speculation"):
        runner.extend("sampled", [IDS], 4, 0)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"layers": (2, 4, 6)}, r"returned \[7, 3, 64\] states .* instead of \[7, 4, 64\]"),
        ({"token_ids": torch.tensor([1, 2, 3, 4, 5, 6, 7])}, "the server returned"),
        ({"hidden_states": torch.zeros(7, 4, 64, dtype=torch.bfloat16)}, "computes in BF16, but F32"),
        # Started with another layer as its last.
        ({"layers": (2, 4, 5, 6)}, "has logprob .* its states give"),
        ({"off": 0.01}, "has logprob"),
        ({"off": float("nan")}, "has logprob nan"),
    ],
)
def test_states_of_something_else_are_refused(runner, hand_out, how, what):
    hand_out(**how)
    with pytest.raises(StatesInvalid, match=what):
        runner.capture(torch.tensor([IDS]), CAPTURED)


@pytest.mark.parametrize("scale", [0.02, 0.3])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_logprob_of_bf16_states_is_that_of_float32(runner, tmp_path, scale, dtypes):
    """For flat logits and for one that has nearly all of the probability, which bfloat16 would round by up to 0.5."""
    generator, hidden = torch.Generator().manual_seed(0), runner.config.hidden
    states = torch.randn(3, hidden, generator=generator).to(dtypes[0])
    lm_head = (torch.randn(20_000, hidden, generator=generator) * scale).to(dtypes[1])
    lm_head[7] = 1.5 * states[2]
    expected = torch.nn.functional.linear(states.double(), lm_head.double()).log_softmax(-1)
    told = replace(runner, lm_head=lm_head, dtype="F32")
    for row, token in [(0, 3), (2, 7), (2, 11)]:
        logprob = float(expected[row, token])
        told._hold(states, [(row, token, logprob, {"F32": 5e-3})])
        with pytest.raises(StatesInvalid, match="has logprob"):
            told._hold(states, [(row, token, logprob - 0.02, {"F32": 5e-3})])


def streams(model, layers=(2, 4, 6, 7)) -> torch.Tensor:
    """What enters the given layers, [T, layers, H]."""
    captured, _ = capture(model, torch.tensor([IDS]), [layer - 1 for layer in layers])
    return captured[0].unflatten(1, (len(layers), -1)).contiguous()


def test_states_of_another_row_than_the_last_are_compared_too(runner, hand_out, model):
    """The last row is right, and the one before it stands in place of all others."""
    states = streams(model)
    hand_out(hidden_states=torch.cat([states[-2:-1].expand(len(IDS) - 1, -1, -1), states[-1:]]).contiguous())
    with pytest.raises(StatesInvalid, match=r"after 3 of 7 tokens, .* has logprob"):
        runner.capture(torch.tensor([IDS]), CAPTURED)


def broken(states: torch.Tensor, row: int, layer: int, value: float) -> torch.Tensor:
    states[row, layer] = value
    return states


@pytest.mark.parametrize(
    ("value", "what"), [(0.0, "nothing but zeros"), (float("nan"), "NaN or Inf"), (float("-inf"), "NaN or Inf")]
)
@pytest.mark.parametrize(("row", "layer"), [(4, 3), (1, 0)])
def test_a_row_that_no_target_has_is_named(runner, hand_out, model, row, layer, value, what):
    """In no row that is compared, and in a captured layer, which no logprob depends on."""
    hand_out(hidden_states=broken(streams(model), row, layer, value))
    with pytest.raises(StatesInvalid, match=f"of 1 of 7 tokens hold {what}"):
        runner.capture(torch.tensor([IDS]), CAPTURED)


def answer(path="/there/x.safetensors", tokens=(3,), logprob=-1.0) -> tuple[int, str]:
    choice = {"token_ids": list(tokens), "logprobs": {"token_logprobs": [logprob]}}
    return 200, json.dumps({"choices": [choice], "kv_transfer_params": {"hidden_states_path": path}})


@pytest.mark.parametrize(
    "how",
    [
        {"tokens": ()},
        {"tokens": (3, 4)},
        {"tokens": (10**6,)},
        {"path": "a\0b"},
        {"path": "/"},
        {"path": 5},
        {"logprob": 10**400},
    ],
    ids=str,
)
def test_an_answer_that_no_target_gives_is_told(runner, stand_in, how):
    stand_in.answers["/v1/completions"] = answer(**how)
    with pytest.raises(EngineFailed, match=r"returns no hidden states|instead of 1 of a vocabulary of"):
        runner.capture(torch.tensor([IDS]), CAPTURED)


@pytest.mark.parametrize("where", ["x.safetensors", "x.safetensors.lock"])
def test_a_folder_in_place_of_the_states_is_told(runner, stand_in, tmp_path, where):
    (tmp_path / "x.safetensors.lock").touch()
    (tmp_path / where).unlink(missing_ok=True)
    (tmp_path / where).mkdir()
    stand_in.answers["/v1/completions"] = answer()
    with pytest.raises(StatesInvalid, match=r"x\.safetensors was not written in 1 s"):
        runner.capture(torch.tensor([IDS]), CAPTURED)


def test_a_pipe_in_place_of_a_lock_is_not_waited_for(runner, stand_in, tmp_path):
    os.mkfifo(tmp_path / "x.safetensors.lock")
    stand_in.answers["/v1/completions"] = answer()
    ended = []

    def capture_one():
        try:
            runner.capture(torch.tensor([IDS]), CAPTURED)
        except StatesInvalid as fault:
            ended.append(fault)

    thread = threading.Thread(target=capture_one, daemon=True)
    thread.start()
    thread.join(30)
    assert len(ended) == 1


FAILS = """
import sys
from pathlib import Path
from kconv.serving.states import swept
with swept(Path(sys.argv[1])):
    sys.exit("failed")
"""


def test_whoever_reads_what_a_failed_run_says_does_not_wait_for_its_guard(tmp_path):
    """A pipe is at its end once nobody has it open for writing; before that, nothing can be read of it yet."""
    with subprocess.Popen([sys.executable, "-c", FAILS, str(tmp_path)], stderr=subprocess.PIPE) as process:
        process.wait()
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        assert [os.read(process.stderr.fileno(), 100) for _ in range(2)] == [b"failed\n", b""]


def test_how_to_start_the_server_is_told(runner, hand_out):
    hand_out((2, 4, 6))
    with pytest.raises(StatesInvalid) as fault:
        runner.capture(torch.tensor([IDS]), CAPTURED)
    assert '"eagle_aux_hidden_state_layer_ids": [2, 4, 6, 7]' in fault.value.fix


def test_a_server_that_hands_out_nothing_is_told(runner, stand_in):
    stand_in.answers["/v1/completions"] = (200, json.dumps({"choices": [{"token_ids": [3]}]}))
    with pytest.raises(EngineFailed, match="returns no hidden states"):
        runner.capture(torch.tensor([IDS]), CAPTURED)


def test_a_server_that_dies_before_it_writes_is_told(runner, stand_in, monkeypatch):
    monkeypatch.setattr("kconv.serving.states.HEALTH_SECONDS", 0.1)
    stand_in.answers["/v1/completions"] = answer()
    stand_in.answers["/health"] = (503, "")
    with pytest.raises(EngineFailed, match="the server died"):
        runner.capture(torch.tensor([IDS]), CAPTURED)


def breaks(stand_in, times):
    """Have the stand-in end so many connections without an answer, before it answers as it did."""
    answers, left = stand_in.answers["/v1/completions"], iter(range(times))

    def complete(body):
        if next(left, None) is not None:
            raise ConnectionAbortedError
        return answers(body)

    stand_in.answers["/v1/completions"] = complete


def test_a_connection_that_breaks_is_tried_again(runner, hand_out, stand_in, model, monkeypatch):
    monkeypatch.setattr(ask, "PAUSE_SECONDS", 0.0)
    hand_out()
    breaks(stand_in, 2)
    captured, _ = runner.capture(torch.tensor([IDS]), CAPTURED)
    assert torch.equal(captured, capture(model, torch.tensor([IDS]), CAPTURED)[0])
    # Two requests of one name would be two of one file.
    assert len({body["request_id"] for _, body in stand_in.asked}) == len(stand_in.asked) == 2 + 2


def test_a_connection_that_breaks_each_time_is_told(runner, hand_out, stand_in, monkeypatch):
    monkeypatch.setattr(ask, "PAUSE_SECONDS", 0.0)
    hand_out()
    breaks(stand_in, ask.ATTEMPTS)
    with pytest.raises(ConnectionBroken, match="the server does not answer"):
        runner.capture(torch.tensor([IDS]), CAPTURED)
    assert len(stand_in.asked) == ask.ATTEMPTS


def test_a_folder_that_is_not_the_servers_is_told(runner, stand_in):
    stand_in.answers["/v1/completions"] = answer()
    with pytest.raises(StatesInvalid, match=r"x\.safetensors was not written in 1 s"):
        runner.capture(torch.tensor([IDS]), CAPTURED)


def test_no_layer_is_asked_for_twice(tmp_path):
    for captured, ids in (((1, 3, 5), [2, 4, 6, 7]), ((1, 6), [2, 7])):
        config = json.loads(states_options(captured, 7, tmp_path)["--speculative-config"])
        assert config["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == ids
