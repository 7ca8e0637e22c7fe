"""Held-out prompts: which are taken, which are refused, and that they are read before any weight."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.heads import GQA, random_slots, write_head

from kconv.checkpoint.manifest import MANIFEST
from kconv.checkpoint.source import Folder
from kconv.cli import main
from kconv.engines import by_name
from kconv.errors import PromptsInvalid
from kconv.measure.held_out import encode_held_out, read_held_out, refuse_overlap
from kconv.targets.prompts import read_prompts

TEXTS = ("Return the sum of two numbers.", "Name three rivers of Asia.", "Why is the sky blue?")


@pytest.fixture
def prompts(tmp_path) -> Path:
    file = tmp_path / "held-out.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return file


@pytest.fixture
def head(tmp_path) -> Path:
    return write_head(tmp_path / "head", by_name("vllm"), GQA, random_slots(GQA))


def test_texts_are_encoded_with_the_targets_tokenizer_and_cut(prompts, tiny_target):
    found = encode_held_out(str(prompts), Folder(tiny_target), 5)
    assert [len(row) for row in found.tokens] == [5, 5, 5]
    whole = encode_held_out(str(prompts), Folder(tiny_target), 1000)
    assert [row[:5] for row in whole.tokens] == list(found.tokens)
    assert found.revision == "sha256:" + hashlib.sha256(prompts.read_bytes()).hexdigest()
    assert found.describe()["file"] == "held-out.jsonl"


@pytest.mark.parametrize("source", [False, True])
def test_prompts_that_are_not_there_are_named_before_a_weight_is_read(source, head, tiny_target, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(Folder, "open_weights", read.append)
    monkeypatch.setattr(Folder, "fetch_model", read.append)
    words = ["validate", str(head), "--target", str(tiny_target), "--prompts", str(tmp_path / "no.jsonl")]
    done = CliRunner().invoke(main, [*words, *(["--source", str(head)] if source else [])])
    assert done.exit_code == 1 and "no.jsonl cannot be read" in done.output
    assert read == []


def test_what_the_manifest_says_of_the_calibration_counts(head, prompts):
    digests = [prompt.digest for prompt in read_prompts(prompts)]
    (head / MANIFEST).write_text(json.dumps({"conversion": {"prompts": digests[2:]}}))
    with pytest.raises(PromptsInvalid, match="1 of 3 prompts") as fault:
        refuse_overlap(digests, head)
    assert fault.value.where == str(head / MANIFEST)
    refuse_overlap(digests[:2], head)


def test_what_the_manifest_says_of_the_training_counts(head, prompts):
    """It keeps the beginnings of digests, as training may be on a million prompts."""
    digests = [prompt.digest for prompt in read_prompts(prompts)]
    (head / MANIFEST).write_text(json.dumps({"training": {"data": {"prompts": [digests[1][:16]]}}}))
    with pytest.raises(PromptsInvalid, match="1 of 3 prompts are among those that this was trained"):
        refuse_overlap(digests, head)
    refuse_overlap([digests[0], digests[2]], head)


@pytest.mark.parametrize("name", ["", "states.json"])
@pytest.mark.parametrize("lists", ["sequences.json", "states.json"])
def test_what_states_were_made_from_counts_wherever_they_list_it(head, prompts, tmp_path, lists, name):
    digests = [prompt.digest for prompt in read_prompts(prompts)]
    (tmp_path / "states").mkdir()
    (tmp_path / "states" / "states.json").write_text(json.dumps({"sequences": {"held-out": 1}}))
    (tmp_path / "states" / lists).write_text(json.dumps({"sequences": [{"digest": digests[2]}]}))
    with pytest.raises(PromptsInvalid, match="1 of 3 prompts"):
        refuse_overlap(digests, head, (tmp_path / "states" / name,))
    refuse_overlap(digests[:2], head, (tmp_path / "states" / name,))


def test_a_record_without_prompts_is_no_record(head, tmp_path):
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(PromptsInvalid, match="records no prompts"):
        refuse_overlap((), head, (tmp_path / "empty.json",))
    with pytest.raises(PromptsInvalid, match=r"holds neither states\.json nor kconv\.json"):
        refuse_overlap((), head, (tmp_path,))


@pytest.mark.parametrize("name", ["mt-bench", "mt-bench@main"])
def test_a_suite_of_the_hub_must_be_pinned(name):
    with pytest.raises(PromptsInvalid, match="is not pinned") as fault:
        read_held_out(name)
    assert "@<40 hex digits>" in fault.value.fix


def test_prompts_without_a_token_are_refused(prompts, tiny_target):
    with pytest.raises(PromptsInvalid, match="no prompt has any tokens"):
        encode_held_out(str(prompts), Folder(tiny_target), 0)
