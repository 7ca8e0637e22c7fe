"""Hidden states on disk: what comes back is what transformers reports, whatever stopped the run."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open

from kconv.errors import OutputExists, StatesInvalid
from kconv.targets import forward as runners
from kconv.targets import write_states as writer
from kconv.targets.config import read_target_config
from kconv.targets.prompts import read_prompts
from kconv.targets.states import CONTENTS, RECORD, open_states, read_record
from kconv.targets.tokenizer import load_tokenizer


def test_what_is_read_back_is_what_transformers_reports(stored, wanted, model, tiny_target):
    states = open_states(stored, config=read_target_config(tiny_target))
    states.verify()
    assert states.record.shards == len(states.shards) > 2
    for index, sequence in enumerate(states.sequences):
        found = states.read(index)
        assert found.tokens.shape == (sequence.length,)
        with torch.no_grad():
            theirs = model(input_ids=found.tokens[None], output_hidden_states=True, use_cache=False)
        expected = torch.cat([theirs.hidden_states[layer + 1][0] for layer in wanted.captured], dim=-1)
        assert torch.equal(found.captured, expected)
        assert torch.equal(found.hidden, theirs.hidden_states[-1][0])
        assert torch.equal(model.lm_head(found.hidden), theirs.logits[0])


def test_each_sequence_is_of_its_kind(stored, prompts, model, tiny_target):
    states, tokenizer = open_states(stored), load_tokenizer(tiny_target)
    by_prompt = {p.id: p for p in read_prompts(prompts)}
    kinds = [sequence.kind for sequence in states.sequences]
    assert kinds == ["held-out", "sampled", "greedy"] * len(by_prompt)
    for index, sequence in enumerate(states.sequences):
        prompt, found = by_prompt[sequence.prompt], states.read(index)
        ids = tokenizer.encode(prompt.turns[0])
        assert (sequence.category, sequence.digest) == (prompt.category, prompt.digest)
        if sequence.kind == "held-out":
            assert found.tokens.tolist() == ids[:24]
            assert found.loss_mask is None
            continue
        assert found.tokens[:8].tolist() == ids[:8]
        assert found.loss_mask is not None
        assert found.loss_mask.tolist() == [False] * 8 + [True] * (sequence.length - 8)
        if sequence.kind == "greedy":
            assert torch.equal(model.lm_head(found.hidden).argmax(-1)[7:-1], found.tokens[8:])


def test_the_record_says_whose_states_these_are(stored, wanted, prompts, tiny_target):
    record, contents = (json.loads((stored / name).read_text()) for name in (RECORD, CONTENTS))
    assert record["schema"] == 2
    assert record["captured"] == list(wanted.captured)
    assert (record["dtype"], record["seed"], record["new_tokens"]) == ("F32", 3, {"sampled": 12, "greedy": 6})
    assert record["target"]["source"] == str(tiny_target)
    assert {p.digest for p in read_prompts(prompts)} == {sequence["digest"] for sequence in contents["sequences"]}
    assert set(record["tokenizer"]) >= {"class", "tokenizer.json"}
    # safetensors itself reads the shards, and they name what they hold as ModelOpt's dumps do.
    held = set()
    for shard in contents["shards"]:
        with safe_open(stored / shard["file"], "pt") as file:
            held |= set(file.keys())
    assert {name.split(".")[1] for name in held} == {"input_ids", "aux_hidden_states", "hidden_states", "loss_mask"}


def test_fewer_layers_can_be_read_than_were_stored(stored, copy):
    whole, part = open_states(stored).read(2), open_states(copy, captured=(1, 5)).read(2)
    first, _, last = whole.captured.chunk(3, dim=-1)
    assert torch.equal(part.captured, torch.cat([first, last], dim=-1))


@pytest.mark.parametrize("stop_after", [0, 1, 2])
def test_a_run_that_was_stopped_goes_on_and_writes_the_same(write, wanted, stored, tmp_path, monkeypatch, stop_after):
    out, whole = tmp_path / "out", writer._write_shard
    written: list[str] = []

    def stopping(model, record, folder, name, *rest):
        if len(written) == stop_after:
            (folder / writer.PROGRESS / name).write_bytes(b"half a shard")
            raise KeyboardInterrupt
        written.append(name)
        return whole(model, record, folder, name, *rest)

    monkeypatch.setattr(writer, "_write_shard", stopping)
    with pytest.raises(KeyboardInterrupt):
        write(wanted, out)
    assert not out.exists()
    monkeypatch.setattr(
        writer, "_write_shard", lambda m, r, f, name, *rest: written.append(name) or whole(m, r, f, name, *rest)
    )
    write(wanted, out)
    # No shard twice, and the very bytes of a run that nothing stopped.
    assert len(written) == len(set(written)) == read_record(out).shards
    assert {f.name: f.read_bytes() for f in out.iterdir()} == {f.name: f.read_bytes() for f in stored.iterdir()}


def test_a_finished_shard_that_was_damaged_is_written_again(write, wanted, stored, tmp_path, monkeypatch):
    out, whole = tmp_path / "out", writer._write_shard

    def stopping(captures, planned, folder, name, number):
        if number:
            raise KeyboardInterrupt
        return whole(captures, planned, folder, name, number)

    monkeypatch.setattr(writer, "_write_shard", stopping)
    with pytest.raises(KeyboardInterrupt):
        write(wanted, out)
    [shard] = tmp_path.glob(".kconv-partial-*/*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    monkeypatch.setattr(writer, "_write_shard", whole)
    write(wanted, out)
    assert (out / shard.name).read_bytes() == (stored / shard.name).read_bytes()


def test_a_run_of_other_settings_is_not_mixed_in(write, wanted, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "_write_shard", stop)
    with pytest.raises(KeyboardInterrupt):
        write(wanted, tmp_path / "out")
    with pytest.raises(StatesInvalid, match="interrupted run here differs in seed"):
        write(wanted.model_copy(update={"seed": 4}), tmp_path / "out")


def test_two_runs_do_not_write_one_folder(write, wanted, tmp_path, monkeypatch):
    def meanwhile(*_):
        with pytest.raises(StatesInvalid, match="another run"):
            write(wanted, tmp_path / "out")
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "_write_shard", meanwhile)
    with pytest.raises(KeyboardInterrupt):
        write(wanted, tmp_path / "out")


def test_what_is_there_is_not_overwritten(write, wanted, stored):
    with pytest.raises(OutputExists):
        write(wanted, stored)


def test_one_sequences_states_are_in_memory_at_a_time(write, wanted, prompts, tmp_path, monkeypatch):
    """The target is run between the writes, each sequence when its turn comes."""
    order: list[str] = []
    capture, opened = runners.capture, writer.write_safetensors

    def note(*args):
        order.append("run")
        return capture(*args)

    def checked(file, entries, *, check=lambda name, values: None):
        def through(name, values):
            order.append(name.split(".")[-1])
            check(name, values)

        return opened(file, entries, check=through)

    monkeypatch.setattr(runners, "capture", note)
    monkeypatch.setattr(writer, "write_safetensors", checked)
    write(wanted, tmp_path / "out", shard_bytes=1 << 30)
    states = [name for name in order if name in ("run", "aux_hidden_states", "hidden_states")]
    assert states == ["run", "aux_hidden_states", "hidden_states"] * len(read_prompts(prompts)) * 3
