"""States that a running target gives while a head is trained on them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from kconv.checkpoint.folder import open_checkpoint
from kconv.cli import main
from kconv.errors import EngineFailed, StatesInvalid
from kconv.serving.states import LATE_SECONDS, ServedRunner
from kconv.targets.config import read_target_config
from kconv.targets.forward import LocalRunner
from kconv.targets.model import load_target, one_thread
from kconv.targets.options import StatesOptions
from kconv.targets.tokenizer import load_tokenizer
from kconv.targets.write_states import write_states
from kconv.tiny.text import read_corpus
from kconv.train.job import TrainJob, offline_job, streamed_job
from kconv.train.options import TrainOptions
from kconv.train.run import train

from .test_offline import VALUES


@dataclass
class Served:
    """The target in memory in a server's place: it notes what it is asked for, and may die.

    Attributes:
        runner: the target.
        at_once: requests side by side.
        dies: after how many.
        asked: lengths of what it was asked for.
        lock: held while it runs.
    """

    runner: LocalRunner
    at_once: int = 3
    dies: int = 1 << 30
    asked: list[int] = field(default_factory=list)
    dtype: str = "F32"
    lock: threading.Lock = field(default_factory=threading.Lock)

    def capture(self, tokens, captured):
        # Its hooks are for one forward at a time.
        with self.lock:
            self.asked.append(tokens.shape[1])
            if len(self.asked) > self.dies:
                raise EngineFailed("the server does not answer", where="http://here", fix="Start it.")
            return self.runner.capture(tokens, captured)

    def extend(self, *_):
        raise AssertionError("dialogues have their answers")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    texts = [text for text in read_corpus().held_out if len(text) > 200][:40]
    rows = [[("user", text[:40]), ("assistant", text[40 : 120 + number])] for number, text in enumerate(texts)]
    file = tmp_path_factory.mktemp("data") / "dialogues.jsonl"
    said = ({"messages": [{"role": role, "content": text} for role, text in row]} for row in rows)
    file.write_text("".join(json.dumps(row) + "\n" for row in said))
    return file


@pytest.fixture(scope="module")
def runner(tiny_target) -> LocalRunner:
    return LocalRunner(load_target(tiny_target, torch.float32))


def stream(target: Path, data: Path, served: Served | ServedRunner, **values) -> TrainJob:
    config, tokenizer = read_target_config(target), load_tokenizer(target)
    return streamed_job(target, config, tokenizer, VALUES | values, TrainOptions(data=str(data)), served, None)


def test_streamed_and_stored_training_over_the_same_rows_end_with_the_same_weights(tiny_target, data, runner, tmp_path):
    config, tokenizer = read_target_config(tiny_target), load_tokenizer(tiny_target)
    wanted = StatesOptions(data=str(data), captured=(1, 3, 5))
    # More steps than batches, so that rows are asked for again.
    values = {"pack": True, "kernel": "sdpa", "seq": 64, "steps": 12}
    with one_thread():
        checkpoint = open_checkpoint(tiny_target)
        write_states(runner, checkpoint, config, tokenizer, wanted, tmp_path / "states", shard_bytes=1 << 18)
        stored = offline_job(tiny_target, config, tokenizer, VALUES | values, tmp_path / "states", None)
        served = Served(runner)
        streamed = stream(tiny_target, data, served, **values)
        assert stored.recipe == streamed.recipe and stored.recipe.batches < 12
        assert torch.equal(stored.text.ids, streamed.text.ids) and torch.equal(stored.unseen.ids, streamed.unseen.ids)
        one, other = (train(job, tmp_path / name) for job, name in ((stored, "stored"), (streamed, "streamed")))
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    said = [json.loads((out / "kconv.json").read_text())["training"]["data"] for out in (one, other)]
    assert said[1]["streamed"] and "sha256" not in said[1]
    assert said[0]["states"] == said[1]["states"] and said[0]["prompts"] == said[1]["prompts"]
    # Each sequence is asked for whole, and what is read again is kept.
    assert set(served.asked) <= {sequence.length for sequence in stored_lengths(tmp_path / "states")}
    assert len(served.asked) < 2 * 40


def stored_lengths(folder: Path):
    from kconv.targets.states import open_states

    return open_states(folder).sequences


def test_a_server_that_dies_ends_the_training(tiny_target, data, runner, tmp_path):
    job = stream(tiny_target, data, Served(runner, dies=20))
    with pytest.raises(EngineFailed, match="does not answer"):
        train(job, tmp_path / "head")
    assert not (tmp_path / "head").exists()


@dataclass
class BrokenServer:
    """Answers as vLLM's server does, but the first state of each sequence is not a number."""

    runner: LocalRunner
    lm_head: torch.Tensor
    shared: Path
    url: str = "http://here"
    lock: threading.Lock = field(default_factory=threading.Lock)

    def complete_whole(self, prompt, new_tokens, *, request_id, **_):
        with self.lock:
            captured, hidden = self.runner.capture(torch.tensor([prompt]), (1, 3, 5, 6))
        states = captured[0].unflatten(1, (4, -1)).clone()
        states[0, 0, 0] = float("nan")
        file = self.shared / f"{request_id}.safetensors"
        save_file({"hidden_states": states, "token_ids": torch.tensor(prompt)}, file)
        file.with_name(f"{file.name}.lock").touch()
        logprob, token = (hidden[0, -1] @ self.lm_head.T).log_softmax(-1).max(-1)
        choice = {"logprobs": {"token_logprobs": [float(logprob)]}}
        return [int(token)], {"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(file)}}


def test_states_that_are_not_numbers_are_named_before_the_loss_is(tiny_target, data, runner, tmp_path):
    weights = load_file(tiny_target / "model.safetensors")
    norm, lm_head = weights["model.norm.weight"], weights["lm_head.weight"]
    server: Any = BrokenServer(runner, lm_head, tmp_path)
    served = ServedRunner(server, tmp_path, read_target_config(tiny_target), norm, lm_head, "F32")
    with pytest.raises(StatesInvalid, match="hold NaN or Inf"):
        train(stream(tiny_target, data, served), tmp_path / "head")


def test_no_more_is_asked_for_than_is_read_ahead(tiny_target, data, runner):
    served = Served(runner)
    job = stream(tiny_target, data, served, seq=128, batch=1)
    assert not served.asked
    from kconv.train.feed import Feed

    feed = Feed(job.text, 1, job.states()[0])
    feed.follow(list(range(len(feed))))
    feed[0]
    feed._reader.shutdown()
    # A row holds one sequence here: the batch that was asked for, and the two behind it.
    assert len(served.asked) == 3


CHILD = """
import sys, time
from pathlib import Path
from kconv.serving.states import swept
folder = Path(sys.argv[1])
with swept(folder) as name:
    (folder / f"cmpl-{name}-1.safetensors").touch()
    (folder / f"cmpl-{name}-1.safetensors.lock").touch()
    (folder / "of-another.safetensors").touch()
    print(name, flush=True)
    if sys.argv[2] == "killed":
        time.sleep(600)
"""


@pytest.mark.parametrize("how", ["killed", "done"])
def test_what_nobody_read_is_removed_however_the_trainer_ends(tmp_path, how):
    program = [sys.executable, "-c", CHILD, str(tmp_path), how]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        if how == "killed":
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if how == "killed":
        # What the server was still asked for comes later.
        (tmp_path / f"cmpl-{name}-2.safetensors").touch()
    end = time.monotonic() + LATE_SECONDS
    while len(list(tmp_path.iterdir())) > 1 and time.monotonic() < end:
        time.sleep(0.05)
    assert [file.name for file in tmp_path.iterdir()] == ["of-another.safetensors"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--url", "http://127.0.0.1:9"], "--url and --shared need each other"),
        (["--url", "http://127.0.0.1:9", "--shared", "x", "--held-out", "y.jsonl"], "--held-out: only without --url"),
        (["--concurrency", "4"], "--concurrency: only with --url"),
        (["--split", "test", "--revision", "abc"], "--split, --revision: only with a dataset on the Hub"),
    ],
)
@pytest.mark.parametrize("asked", [[], ["--dry-run"]])
def test_what_the_data_has_no_use_for_is_refused(tiny_target, data, tmp_path, more, said, asked):
    words = ["train", tiny_target, tmp_path / "head", "--recipe", "eagle3-mla", "--data", data, *more, *asked]
    done = CliRunner().invoke(main, list(map(str, words)))
    assert done.exit_code == 2 and said in done.stderr
