"""A target's vocabulary: its special tokens by name, and the tokens of a text as transformers counts them."""

import json
import shutil
from collections import Counter

import pytest
from transformers import AutoTokenizer, PreTrainedConfig

from kconv.checkpoint.source import Folder
from kconv.errors import PromptsInvalid, TargetInvalid
from kconv.targets.tokenizer import read_vocabulary

TEXT = "Return the sum of a and b.\n\nRaise ValueError if either is negative."


@pytest.fixture(scope="module")
def vocabulary(tiny_target):
    return read_vocabulary(Folder(tiny_target))


def test_rows_and_special_tokens(vocabulary, tiny_target):
    config = json.loads((tiny_target / "config.json").read_text())
    assert vocabulary.lm_head.shape == (config["vocab_size"], config["hidden_size"])
    assert (vocabulary.size, vocabulary.layers) == (config["vocab_size"], config["num_hidden_layers"])
    assert {config[f"{name}_token_id"] for name in ("bos", "eos", "pad")} == set(vocabulary.specials)
    assert vocabulary.specials[config["eos_token_id"]] == "[EOS]"


def test_special_tokens_that_have_no_role_count_too(tiny_target, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(tiny_target, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, config=PreTrainedConfig())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    tokenizer.save_pretrained(folder)
    assert "<|tool|>" in read_vocabulary(Folder(folder)).specials.values()


def test_a_text_is_counted_as_it_is_tokenized(vocabulary, tiny_target, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    ids = AutoTokenizer.from_pretrained(tiny_target, config=PreTrainedConfig())(
        TEXT, add_special_tokens=False
    ).input_ids
    counts = vocabulary.count_tokens(file)
    assert {i: n for i, n in enumerate(counts.tolist()) if n} == Counter(ids)
    assert len(counts) == vocabulary.size


def test_every_turn_of_every_prompt_is_counted(vocabulary, tmp_path):
    prompts, once = tmp_path / "prompts.jsonl", tmp_path / "text.txt"
    prompts.write_text(json.dumps({"turns": [TEXT, TEXT]}) + "\n" + json.dumps({"prompt": TEXT}))
    once.write_text(TEXT)
    assert vocabulary.count_tokens(prompts).tolist() == (3 * vocabulary.count_tokens(once)).tolist()


def test_of_dialogues_the_answers_are_counted(vocabulary, tmp_path):
    dialogues, once = tmp_path / "dialogues.jsonl", tmp_path / "text.txt"
    dialogues.write_text(json.dumps({"prompt": "What is it?", "response": TEXT}) + "\n" + json.dumps({"text": TEXT}))
    once.write_text(TEXT)
    more = vocabulary.count_tokens(dialogues) - 2 * vocabulary.count_tokens(once)
    # What the chat template ends an answer with.
    assert more.min() == 0
    assert 0 <= more.sum() < 5


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\xff"])
def test_a_text_that_is_none_is_refused(vocabulary, tmp_path, content):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(PromptsInvalid, match=r"text\.txt"):
        vocabulary.count_tokens(file)


def test_a_tokenizer_of_another_target_is_refused(tiny_target, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(tiny_target, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 10}))
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(TargetInvalid, match="ends at 9"):
        read_vocabulary(Folder(folder)).count_tokens(tmp_path / "text.txt")
