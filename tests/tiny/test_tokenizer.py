"""The tiny tokenizer: any text survives it, and the libraries that serve it can load it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kconv.tiny.target import pack, train_tokenizer
from kconv.tiny.text import read_corpus

VOCAB = 512
trained = pytest.fixture(scope="module")(lambda: train_tokenizer(read_corpus().train, VOCAB, 4096))


@given(st.text())
def test_any_text_is_encoded_within_the_vocabulary_and_decodes_to_itself(trained, text):
    ids = trained.encode(text, add_special_tokens=False)
    assert all(0 <= i < VOCAB for i in ids)
    assert trained.decode(ids) == text


def test_merges_were_learnt(trained):
    text = "Return the value of the attribute.\n"
    assert len(trained) == VOCAB
    assert len(trained.encode(text)) < len(text) / 1.8


def test_training_again_gives_the_same_tokenizer(trained):
    again = train_tokenizer(read_corpus().train, VOCAB, 4096)
    assert again.backend_tokenizer.to_str() == trained.backend_tokenizer.to_str()


def test_packing_puts_each_document_between_bos_and_eos(trained):
    documents = ["Return it.", "Do é not."]
    stream = pack(trained, documents).tolist()
    assert trained.decode(stream) == "[BOS]Return it.[EOS][BOS]Do é not.[EOS]"
    assert stream[0] == trained.bos_token_id
    assert stream[-1] == trained.eos_token_id


def test_the_folder_is_read_by_the_tokenizers_library_alone(tiny_target):
    inner = Tokenizer.from_file(str(tiny_target / "tokenizer.json"))
    assert inner.decode(inner.encode("def f(x): ...").ids) == "def f(x): ..."
    config = json.loads((tiny_target / "config.json").read_text())
    for key in ("bos", "eos", "pad"):
        assert inner.token_to_id(f"[{key.upper()}]") == config[f"{key}_token_id"]
    assert inner.get_vocab_size() == config["vocab_size"]
