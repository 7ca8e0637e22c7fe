"""Each command of three guides runs as it stands on the tiny target; where a guide serves, a stand-in answers.

What is changed: addresses, the folder that a server shares, how many processes torchrun starts, and the options of
`SHORT`, which make a run short. Names of heads, targets and texts are the guides' own.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from support.commands import command_lines
from support.hub import hub
from support.loopback import SpecServer, serving, speculating
from support.quantized_targets import make_form
from support.releases import TEXTS

from kconv.cli import main
from kconv.targets.forward import run_target
from kconv.targets.model import load_target
from kconv.targets.suites import SUITES
from kconv.tiny.text import read_corpus

__all__ = ["hub"]
pytestmark = pytest.mark.slow

GUIDES = Path(__file__).parent.parent.parent / "docs" / "guides"
KIMI = "moonshotai/Kimi-K2.5"
# Of a head that a guide takes as given, enough to learn: else validate says that other layers would serve it as well.
TRAINED = {
    "seq": 64,
    "batch": 8,
    "steps": 60,
    "warmup": 4,
    "optimizer": "muon",
    "lr": 0.07,
    "rest_lr": 3e-3,
    "captured": "1,3,5",
    # A CPU without instructions for bfloat16 would take most of an hour.
    "compute": "null",
}
LEARNED = [word for key, value in TRAINED.items() for word in ("--set", f"{key}={value}")]
SHORT = {
    "train": [*LEARNED, "--set", "steps=10"],
    # Far enough apart to be told from one another in a target of seven layers.
    "states": ["--captured", "1,3,5", "--dtype", "F32"],
}
# Of these the second operand is what they make.
MAKERS = ("train", "states", "quantize", "quantize-head", "to-vllm")


def lines_of(kind: str, count: int) -> str:
    texts = [text for text in getattr(read_corpus(), kind) if len(text) > 200]
    return "".join(json.dumps({"prompt": text[:160]}) + "\n" for text in texts[:count])


def kconv(*words: object) -> None:
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, f"kconv {' '.join(map(str, words))}\n{done.output}\n{done.exception!r}"


def results(name: str) -> None:
    """Put what lm_eval wrote where a guide has it, as the results of another model each."""
    written = json.loads((Path(__file__).parent.parent / "validate" / "lm_eval.json").read_text())
    Path(name).parent.mkdir(parents=True)
    Path(name).write_text(json.dumps(written | {"model_source": name}))


def a_head(name: str, recipe: str = "eagle3-mla") -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    data = Path("texts.jsonl")
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in read_corpus().train[:60]))
    if not Path(recipe).exists():
        kconv("train", "my-target", recipe, "--recipe", recipe, "--data", data, *LEARNED)
    kconv("to-vllm", recipe, name)


def other_states() -> None:
    Path("held-out.jsonl").write_text(lines_of("held_out", 4))
    kconv("states", KIMI, "other-states", "--prompts", "held-out.jsonl", *SHORT["states"])


# What a guide takes as given, made when a command names it.
GIVEN = {
    "prompts.jsonl": lambda: Path("prompts.jsonl").write_text(lines_of("train", 80)),
    "calibration.jsonl": lambda: Path("calibration.jsonl").write_text(lines_of("train", 6)),
    "held-out.jsonl": lambda: Path("held-out.jsonl").write_text(lines_of("held_out", 4)),
    "my-small-target": lambda: shutil.copytree("my-target", "my-small-target"),
    "nvidia/Kimi-K2.6-Eagle3": lambda: a_head("nvidia/Kimi-K2.6-Eagle3"),
    "my-head": lambda: a_head("my-head"),
    "my-head-vllm": lambda: a_head("my-head-vllm"),
    "my-mha-head": lambda: a_head("my-mha-head", "eagle3-gqa"),
    "my-gqa-head": lambda: a_head("my-gqa-head", "eagle3-gqa"),
    "other-states": other_states,
    **{
        name: partial(results, name) for name in ("results/nvfp4/results_DATE.json", "results/source/results_DATE.json")
    },
}


class Server:
    """Stands for a vLLM that serves the tiny target and hands out its states, as its connector does."""

    def __init__(self, target: Path, shared: Path) -> None:
        self.model, self.shared, self.written = load_target(target, torch.float32), shared, 0
        self.lock = threading.Lock()
        self.answers = [text[:120] for text in read_corpus().train if len(text) > 200]

    def __call__(self, path: str, body: dict | None) -> tuple[int, str]:
        if body is None:
            return 200, json.dumps({"data": [{"id": "my-target"}]})
        if path.endswith("/chat/completions"):
            said = self.answers[len(body["messages"][-1]["content"]) % len(self.answers)]
            choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
            return 200, json.dumps({"choices": [choice]})
        with self.lock:
            return 200, json.dumps(self.hand_out(body))

    def hand_out(self, body: dict) -> dict:
        ids = torch.tensor([body["prompt"]])
        layers = self.model.config.num_hidden_layers
        ran = run_target(self.model, ids, [1, 3, 5, layers - 1])
        logits = ran.logits[0, -1]
        token = int(logits.argmax())
        self.written += 1
        file = self.shared / f"{self.written}.safetensors"
        states = ran.captured[0].unflatten(1, (4, -1)).contiguous()
        save_file({"token_ids": ids[0], "hidden_states": states}, file)
        file.with_name(f"{file.name}.lock").touch()
        choice = {"token_ids": [token], "logprobs": {"token_logprobs": [float(logits.log_softmax(-1)[token])]}}
        return {"choices": [choice], "kv_transfer_params": {"hidden_states_path": f"/shared/{file.name}"}}


@pytest.fixture
def desk(tiny_target, tmp_path, monkeypatch, hub) -> Path:
    """Return a folder to work in, with the targets that the guides name in it."""
    monkeypatch.chdir(tmp_path)
    # A rougher fit of another attention and shorter steps of healing take seconds; what is kept is not looked at here.
    monkeypatch.setattr("kconv.convert.attention.latents.GAUGE_STEPS", 20)
    monkeypatch.setattr("kconv.convert.attention.heal.STEP_TOKENS", 1)
    shutil.copytree(tiny_target, "my-target", ignore=shutil.ignore_patterns("training.json"))
    make_form(tmp_path / "my-target", tmp_path / KIMI, "int4", wrapped=True)
    Path(KIMI, "LICENSE").write_text(TEXTS["modified-mit"])
    Path("shared").mkdir()
    suite = SUITES["mt-bench"]
    rows = [{"question_id": at, "category": name, "turns": ["Why?"]} for at, name in enumerate(suite.categories)]
    hub.commit(f"datasets/{suite.repo}", {suite.file: "".join(json.dumps(row) + "\n" for row in rows).encode()})
    return tmp_path


def by_torchrun(words: list[str], command: list[str]) -> None:
    """Run two processes: of one node, or of two that meet here."""
    nodes = int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
    given = {"--nproc-per-node": str(2 // nodes), "--rdzv-endpoint": f"127.0.0.1:{free_port()}"}
    words = [given.get(words[at - 1], word) if at else word for at, word in enumerate(words)]
    program = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    program += ["--no-python"] if "--no-python" not in words else []
    started = [
        subprocess.Popen(
            [*program, sys.executable, "-m", "kconv", *command],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(nodes)
    ]
    said = [process.communicate()[0] for process in started]
    assert not any(process.returncode for process in started), said


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def run_guide(page: str, url: str) -> int:
    """Run a guide's commands from top to bottom, and return how many there are."""
    said = list(command_lines(GUIDES / page))
    for line in said:
        words = shlex.split(line.text, comments=True)
        at = words.index("kconv")
        command = [url if word.startswith("http://127.0.0.1:") else word for word in words[at + 1 :]]
        # The tiny target's vocabulary ends at 511, and no text has its 258.
        own = {"/shared": "shared", "mask=151669": "mask=258"}
        command = [own.get(word, word.removesuffix("@COMMIT")) for word in command]
        for name in command[1:]:
            if name in GIVEN and not os.path.lexists(name) and not (command[0] in MAKERS and command[2] == name):
                GIVEN[name]()
        if command[0] in MAKERS and os.path.lexists(command[2]):
            # A guide shows several ways to make a thing.
            shutil.rmtree(command[2])
        command += SHORT.get(command[0], [])
        command += ["--heal", "4"] if "--attention" in command else []
        # Texts of the tiny target are short, and a fit takes ten batches of them.
        command += ["--context", "64"] if "--context" in command else []
        print(line.number, *command, flush=True)
        if at:
            by_torchrun(words[:at], command)
        else:
            kconv(*command)
    return len(said)


@pytest.mark.parametrize("page", ["train.md", "mha-to-mla.md"])
def test_a_guide_that_serves_the_target_runs(desk, page):
    server = Server(desk / "my-target", desk / "shared")
    with serving(server) as url:
        assert run_guide(page, url) > 5
    assert server.written


def test_the_guide_to_quantizing_runs(desk):
    with speculating("vllm") as server:
        assert isinstance(server, SpecServer)
        assert run_guide("quantize.md", server.url) > 10
