"""The corpus: what it holds, and that nothing held out is trained on."""

import hashlib
import inspect
import json
import subprocess
import sys
import textwrap

import pytest

from kconv.errors import TrainingFailed
from kconv.tiny import text
from kconv.tiny.text import read_corpus


def test_the_split_is_disjoint_and_repeats_no_document():
    corpus = read_corpus()
    documents = [*corpus.train, *corpus.held_out]
    assert len(set(documents)) == len(documents)
    assert 0.03 < len(corpus.held_out) / len(documents) < 0.07


def test_no_held_out_paragraph_is_trained_on():
    corpus = read_corpus()
    trained = "\n\n".join(corpus.train)
    long = [p for document in corpus.held_out for p in document.split("\n\n") if len(p) > 80]
    assert len(long) > 100
    assert not [p for p in long if f"\n\n{p}\n\n" in trained]


@pytest.mark.parametrize("thing", [textwrap.wrap, json, json.JSONEncoder, subprocess.Popen.communicate])
def test_it_holds_the_docstrings_that_python_itself_shows(thing):
    corpus = read_corpus()
    assert inspect.getdoc(thing).strip() in {*corpus.train, *corpus.held_out}


def test_it_holds_the_topics_that_help_shows():
    from pydoc_data.topics import topics

    corpus = read_corpus()
    long = {text.strip() for text in topics.values() if len(text) > 100}
    # Some were drawn to be held out, and left out for what they share with others.
    assert len(long & {*corpus.train, *corpus.held_out}) > 0.9 * len(long)


def test_another_process_reads_the_same_corpus_without_importing_what_it_reads():
    script = (
        "import hashlib, sys; from kconv.tiny.text import read_corpus; c = read_corpus();"
        "print(hashlib.sha256('\\0'.join([*c.train, '|', *c.held_out]).encode()).hexdigest());"
        "print({'antigravity', 'this', 'smtplib', 'turtle'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    corpus = read_corpus()
    mine = hashlib.sha256("\0".join([*corpus.train, "|", *corpus.held_out]).encode()).hexdigest()
    assert done.stdout.split("\n")[:2] == [mine, "set()"]


def test_a_python_without_sources_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(text.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(TrainingFailed, match="only 0 docstrings"):
        read_corpus.__wrapped__()
