"""States of dialogues that hold their answers: what `kconv generate` writes becomes what `kconv train` reads."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from kconv.checkpoint.folder import open_checkpoint
from kconv.cli import main
from kconv.errors import TrainingDataInvalid
from kconv.targets import write_states as writer
from kconv.targets.config import read_target_config
from kconv.targets.dialogues import encode_row
from kconv.targets.forward import LocalRunner, capture
from kconv.targets.options import StatesOptions
from kconv.targets.states import open_states
from kconv.targets.tokenizer import load_tokenizer
from kconv.targets.write_states import write_states

CAPTURED = (1, 3, 5)
SAID = [
    ("What is a list?", "A sequence of values.", "And a dict?", "A mapping from keys to values."),
    ("Name a river.", "The Rhine, which flows north."),
    ("Why is the sky blue?", "Short waves scatter more than long ones do."),
    ("Count to three.", "One, two, three.", "Again.", "One and two and three."),
    ("What does zip do?", "It walks over several things side by side."),
]


@pytest.fixture(scope="module")
def dialogues(tmp_path_factory) -> Path:
    """Return a file as kconv generate writes it, with a prompt that got no answer."""
    file = tmp_path_factory.mktemp("dialogues") / "dialogues.jsonl"
    rows = [
        {
            "id": f"q{place}",
            "digest": "0",
            "category": "talk",
            "messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)],
            "finish_reasons": ["stop"] * (len(turns) // 2),
        }
        for place, turns in enumerate(SAID)
    ]
    rows.insert(1, {"id": "lost", "digest": "1", "category": "", "failed": "ReadTimeout"})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


class SideBySide:
    """A target that three sequences are asked of at once, as of a server; it holds each back until another is there."""

    def __init__(self, model) -> None:
        self.local, self.dtype, self.at_once, self.most, self.now = LocalRunner(model), "F32", 3, 0, 0
        self.running = threading.Lock()

    def capture(self, tokens, captured):
        self.now += 1
        self.most = max(self.most, self.now)
        time.sleep(0.02)
        # The model is one, and its hooks are not for two threads.
        with self.running:
            self.now -= 1
            return self.local.capture(tokens, captured)

    def extend(self, *args):
        return self.local.extend(*args)


def write(runner, target: Path, dialogues: Path, out: Path, **changes):
    wanted = StatesOptions(data=str(dialogues), captured=CAPTURED, **changes)
    checkpoint, config = open_checkpoint(target), read_target_config(target)
    return write_states(runner, checkpoint, config, load_tokenizer(target), wanted, out, shard_bytes=30_000)


@pytest.fixture(scope="module")
def stored(model, tiny_target, dialogues, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("states") / "out"
    write(LocalRunner(model), tiny_target, dialogues, out)
    return out


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def test_tokens_and_masks_are_those_that_training_on_the_dialogues_has(stored, tiny_target, dialogues, model):
    states, tokenizer = open_states(stored), load_tokenizer(tiny_target)
    rows = [json.loads(line) for line in dialogues.read_text().splitlines()]
    samples = [sample for row in rows if "messages" in row for sample in encode_row(row, tokenizer, "")]
    assert len(states.sequences) == len(samples) == len(SAID)
    for place, sample in enumerate(samples):
        found = states.read(place)
        assert torch.equal(found.tokens, sample.ids) and torch.equal(found.loss_mask, sample.mask)
        assert 0 < int(sample.mask.sum()) < len(sample.mask)
        captured, hidden = capture(model, sample.ids[None], CAPTURED)
        assert torch.allclose(found.captured, captured[0], atol=1e-5)
        assert torch.allclose(found.hidden, hidden[0], atol=1e-5)
    assert {(s.kind, s.category) for s in states.sequences} == {("dialogue", "talk")}
    # Each answer of a dialogue is known by what was asked before it.
    assert len(states.digests) == 7


def test_the_index_holds_what_the_shards_hold(stored):
    states = open_states(stored)
    bare = open_states(stored)
    object.__setattr__(bare, "record", bare.record.model_copy(update={"index": None}))
    assert states.record.index is not None and len(states.shards) > 1
    for place in range(len(states.sequences)):
        assert torch.equal(states.read_tokens(place), bare.read_tokens(place))
        assert torch.equal(states.read_mask(place), bare.read_mask(place))
    states.verify()


def test_asked_for_side_by_side_they_are_the_same_bytes(stored, model, tiny_target, dialogues, tmp_path):
    runner = SideBySide(model)
    write(runner, tiny_target, dialogues, tmp_path / "out")
    assert runner.most > 1
    for file in stored.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("runner", [LocalRunner, SideBySide])
def test_a_killed_run_goes_on_to_the_same_bytes(runner, stored, model, tiny_target, dialogues, tmp_path, monkeypatch):
    whole, written = writer._write_shard, []

    def stopping(captures, planned, folder, name, number):
        if number == 2:
            raise KeyboardInterrupt
        written.append(number)
        return whole(captures, planned, folder, name, number)

    monkeypatch.setattr(writer, "_write_shard", stopping)
    with pytest.raises(KeyboardInterrupt):
        write(runner(model), tiny_target, dialogues, tmp_path / "out")
    monkeypatch.setattr(writer, "_write_shard", lambda *args: written.append(args[-1]) or whole(*args))
    write(runner(model), tiny_target, dialogues, tmp_path / "out")
    assert written == list(range(open_states(stored).record.shards))
    for file in stored.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_dialogues_are_cut_where_that_is_asked_for(model, tiny_target, dialogues, tmp_path):
    write(LocalRunner(model), tiny_target, dialogues, tmp_path / "out", text_tokens=20)
    assert max(s.length for s in open_states(tmp_path / "out").sequences) == 20


def test_prompts_without_answers_are_refused(model, tiny_target, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "What is a list?"}\n')
    with pytest.raises(TrainingDataInvalid, match="it has no answer"):
        write(LocalRunner(model), tiny_target, file, tmp_path / "out")


def test_the_command_takes_either(tiny_target, dialogues, tmp_path):
    done = run("states", tiny_target, tmp_path / "out", "--data", dialogues, "--captured", "1,3,5")
    assert done.exit_code == 0, done.output
    assert "5 sequences (5 dialogue)" in done.stdout
    both = run("states", tiny_target, tmp_path / "two", "--data", dialogues, "--prompts", dialogues)
    assert both.exit_code == 2 and "either --prompts or --data" in both.output
    idle = run("states", tiny_target, tmp_path / "two", "--data", dialogues, "--sampled", "4")
    assert idle.exit_code == 2 and "dialogues already have answers" in idle.output
