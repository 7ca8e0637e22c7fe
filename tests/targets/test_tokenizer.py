"""A target's tokenizer: loaded from its folder, and its code never run unasked."""

import json
import resource
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconv.errors import TargetInvalid
from kconv.targets.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_target):
    return load_tokenizer(tiny_target)


@given(st.text())
def test_any_text_decodes_to_itself(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_encoding_adds_no_special_token_and_a_chat_begins_with_bos(tokenizer, tiny_target):
    config = json.loads((tiny_target / "config.json").read_text())
    assert config["bos_token_id"] not in tokenizer.encode("Return it.")
    chat = tokenizer.encode_chat(["Say it.", "It.", "Again."])
    assert chat[0] == config["bos_token_id"]
    assert chat.count(config["bos_token_id"]) == 1
    assert "Say it." in tokenizer.decode(chat)
    assert "Again." in tokenizer.decode(chat)


def spoil(tiny_target, tmp_path, **config):
    folder = tmp_path / "target"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_target / name, folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


CODE = """
from pathlib import Path
Path({mark!r}).write_text("ran")
from transformers import PreTrainedTokenizerFast
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def test_code_in_the_folder_runs_only_when_it_is_trusted(tiny_target, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    mark = tmp_path / "mark"
    folder = spoil(
        tiny_target, tmp_path, auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]}, tokenizer_class="OwnTokenizer"
    )
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    with pytest.raises(TargetInvalid, match="cannot be loaded") as fault:
        load_tokenizer(folder)
    assert not mark.exists()
    assert "--trust-remote-code" in fault.value.fix
    assert load_tokenizer(folder, trust_remote_code=True).decode([40]) != ""
    assert mark.exists()


def test_a_folder_without_a_tokenizer_or_with_a_broken_one(tiny_target, tmp_path):
    with pytest.raises(TargetInvalid, match="has no tokenizer"):
        load_tokenizer(tmp_path)
    folder = spoil(tiny_target, tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TargetInvalid, match="cannot be loaded"):
        load_tokenizer(folder)
    # tokenizer_config.json alone holds no vocabulary.
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TargetInvalid, match=r"no tokenizer\.json"):
        load_tokenizer(folder)


def test_a_folder_without_a_chat_template(tiny_target, tmp_path):
    with pytest.raises(TargetInvalid, match="chat template"):
        load_tokenizer(spoil(tiny_target, tmp_path)).encode_chat(["Hello"])


@pytest.mark.parametrize(
    "auto_map",
    [
        {"AutoTokenizer": ["org/name--tokenization_own.OwnTokenizer", None]},
        {"AutoTokenizer": "org/name--tokenization_own.OwnTokenizer"},
        ["org/name--tokenization_own.OwnTokenizer", None],
    ],
)
def test_code_of_another_repository_is_refused_even_where_code_is_trusted(tiny_target, tmp_path, auto_map):
    folder = spoil(tiny_target, tmp_path, auto_map=auto_map)
    with pytest.raises(TargetInvalid, match="code belongs to org/name, whose revision is not pinned"):
        load_tokenizer(folder, trust_remote_code=True)


def test_what_a_tokenizer_is_made_of_identifies_it(tokenizer, tiny_target, tmp_path):
    identity = tokenizer.identity
    assert set(identity) >= {"class", "tokenizer.json", "tokenizer_config.json"}
    folder = spoil(tiny_target, tmp_path, model_max_length=77)
    other = load_tokenizer(folder).identity
    assert other["tokenizer.json"] == identity["tokenizer.json"]
    assert other["tokenizer_config.json"] != identity["tokenizer_config.json"]


TEMPLATES = {
    "raises": "{{ raise_exception('roles must alternate') }}",
    "an undefined name": "{{ nobody.knows.this }}",
    "a syntax error": "{% for %}",
    "a text of 30 GB": "{{ 'a' * 30000000000 }}",
    "a text that doubles": "{% set s = namespace(t='a') %}{% for i in [1] * 60 %}{% set s.t = s.t ~ s.t %}{% endfor %}",
    "a wrong type": "{{ messages + 1 }}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_template_that_fails_or_grows_is_named(tiny_target, tmp_path, template):
    loaded = load_tokenizer(spoil(tiny_target, tmp_path))
    loaded.inner.chat_template = template
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(TargetInvalid, match="chat template fails"):
        loaded.encode_chat(["Say it."])
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.parametrize("text", ["Return the sum of two numbers. " * 4000, "a" * 100_000, "\n" * 100_000])
def test_of_a_long_text_no_more_is_read_than_is_kept(tokenizer, text, monkeypatch):
    whole = tokenizer.encode(text)
    read, encode = [], tokenizer.inner.encode
    monkeypatch.setattr(tokenizer.inner, "encode", lambda part, **more: read.append(len(part)) or encode(part, **more))
    assert tokenizer.encode(text, 8) == whole[:8]
    assert read[0] < 5000
