"""Hidden states on disk: what is not taken for them, when they are written and when they are read."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest

from kconv.checkpoint.header import read_header
from kconv.errors import PromptsInvalid, StatesInvalid, TargetInvalid
from kconv.targets.config import read_target_config
from kconv.targets.states import CONTENTS, RECORD, open_states


@pytest.mark.parametrize("captured", [(), (1, 1), (1, 7)])
def test_layers_that_are_not_there_cannot_be_stored(write, wanted, tmp_path, captured):
    with pytest.raises(TargetInvalid, match="cannot be captured"):
        write(wanted.model_copy(update={"captured": captured}), tmp_path / "out")


def test_prompts_that_do_not_fit_are_refused(write, wanted, tmp_path):
    with pytest.raises(PromptsInvalid, match="but the target accepts"):
        write(wanted.model_copy(update={"sampled": 10**6}), tmp_path / "out")


def test_states_that_are_no_numbers_are_refused(write, wanted, model, tmp_path):
    norm = model.model.norm.weight
    kept = norm.detach().clone()
    try:
        norm.data[0] = float("inf")
        with pytest.raises(TargetInvalid, match="NaN or Inf"):
            write(wanted, tmp_path / "out")
    finally:
        norm.data.copy_(kept)


def test_another_target_is_refused(stored, tiny_target):
    config = read_target_config(tiny_target)
    for changes, what in (
        ({"hidden": 32}, "hidden_size is 64 there and 32 here"),
        ({"layers": 9}, "num_hidden_layers"),
        ({"vocab": 9}, "vocab_size"),
        ({"raw": config.raw | {"rms_norm_eps": 1e-3}}, "config.json's sha256"),
    ):
        with pytest.raises(StatesInvalid, match=what):
            open_states(stored, config=dataclasses.replace(config, **changes))


def test_other_layers_are_refused(stored):
    with pytest.raises(StatesInvalid, match=r"layers \[1, 3, 5\], but layers \[2, 4\] are needed") as fault:
        open_states(stored, captured=(1, 2, 4))
    assert "--captured 1,2,4" in fault.value.fix


def test_damage_is_told(copy):
    first, second, *_ = sorted(copy.glob("states-*.safetensors"))
    info = read_header(second)
    second.write_bytes(second.read_bytes()[:-1])
    inside = next(int(name.split(".")[0]) for name in info)
    with pytest.raises(StatesInvalid, match=f"{second.name} has .* bytes, but"):
        open_states(copy).read(inside)
    first.unlink()
    with pytest.raises(StatesInvalid, match=f"{first.name} cannot be read"):
        open_states(copy).read(0)
    with pytest.raises(StatesInvalid, match="cannot be read"):
        open_states(copy).verify()


def test_a_changed_shard_is_found(copy):
    shard = next(iter(sorted(copy.glob("states-*.safetensors"))))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(StatesInvalid, match="differs from what kconv states wrote"):
        open_states(copy).verify()


def test_a_hole_in_a_shard_is_told(copy):
    """A copy that was cut off has its size and zeros at its end on many disks."""
    for shard in copy.glob("states-*.safetensors"):
        data = shard.read_bytes()
        shard.write_bytes(data[: len(data) // 2].ljust(len(data), b"\0"))
    states = open_states(copy)
    last = states.shards[0].count - 1
    with pytest.raises(StatesInvalid, match="states are all zero"):
        states.read(last)


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda record, _: record.pop("target"), "target is missing"),
        (lambda record, _: record.update(schema=3), "schema: it must be 2"),
        (lambda record, _: record["contents"].update(file="../elsewhere.json"), "not a file of the folder"),
        (lambda record, _: record["sequences"].update(greedy=9), "do not match its"),
        (lambda _, contents: contents["shards"].pop(0), "do not match its"),
        (lambda _, contents: contents["shards"][0].update(file="../elsewhere.safetensors"), "not a file of the folder"),
        (lambda _, contents: contents["sequences"][0].update(length=3), "does not hold sequence 0"),
    ],
)
def test_a_record_that_lies_is_refused(copy, spoil, what):
    record, contents = (json.loads((copy / name).read_text()) for name in (RECORD, CONTENTS))
    spoil(record, contents)
    text = json.dumps(contents).encode()
    if "contents" in record:
        record["contents"] |= {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    (copy / CONTENTS).write_bytes(text)
    (copy / RECORD).write_text(json.dumps(record))
    with pytest.raises(StatesInvalid, match=what):
        open_states(copy).read(0)


def test_a_list_that_was_changed_is_refused(copy):
    text = (copy / CONTENTS).read_text()
    (copy / CONTENTS).write_text(text.replace('"length": 24', '"length": 23', 1))
    with pytest.raises(StatesInvalid, match=f"{CONTENTS} differs from what kconv states wrote"):
        open_states(copy).read(0)


def test_a_folder_without_a_record_is_refused(tmp_path):
    with pytest.raises(StatesInvalid, match=r"holds no states\.json"):
        open_states(tmp_path)


def test_a_file_of_the_folder_is_no_folder(copy):
    with pytest.raises(StatesInvalid, match="is a file, not a folder") as fault:
        open_states(copy / RECORD)
    assert str(copy) in fault.value.fix
