"""Prompts: both forms are read, and what is wrong is found by its line."""

import json
import tracemalloc
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconv.errors import PromptsInvalid
from kconv.measure.held_out import read_held_out
from kconv.targets import write_states
from kconv.targets.options import StatesOptions
from kconv.targets.prompts import Prompt, digest_prompts, read_prompts
from kconv.targets.suites import load_suite


def write(tmp_path, *lines):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return file


def test_both_forms_in_one_file(tmp_path):
    file = write(
        tmp_path,
        {"prompt": "Add 2 and 2.", "category": "math"},
        "",
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": ["x"]},
        {"prompt": "zwei\u2028Zeilen"},
    )
    assert read_prompts(file) == (
        Prompt("1", "math", ("Add 2 and 2.",)),
        Prompt("81", "writing", ("Write.", "Again.")),
        Prompt("4", "", ("zwei\u2028Zeilen",)),
    )


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "each object on a line of its own"),
        ("[", "each object on a line of its own"),
        ('[{"prompt": "a"}]', "each object on a line of its own"),
        ('{"prompt": "a",', "not JSON: .*: column 16"),
        ('{"prompt": "a', "the file may have been cut off here"),
        ('{"prompt": "a"} x', r"not JSON: Extra data: column 17\n"),
        ('"text"', "not a JSON object"),
        ({"category": "math"}, "either"),
        ({"prompt": "a", "turns": ["a"]}, "either"),
        ({"prompt": ""}, "an empty prompt"),
        ({"prompt": 3}, "turn"),
        ({"turns": []}, "turn"),
        ({"turns": "abc"}, "turn"),
        ({"turns": ["a", " "]}, "turn"),
        ({"prompt": "a", "category": None}, "category"),
        ({"question_id": [1], "turns": ["a"]}, "category"),
        ({"question_id": "x", "turns": ["b"]}, "repeats"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line, what):
    file = write(tmp_path, {"question_id": "x", "turns": ["fine"]}, "", line)
    with pytest.raises(PromptsInvalid, match=f"line 3 .*{what}") as fault:
        read_prompts(file)
    assert fault.value.where.endswith("prompts.jsonl:3")
    assert fault.value.fix


@pytest.mark.parametrize("read", [read_held_out, lambda name: load_suite(name)])
def test_a_repeated_prompt_is_no_further_evidence(tmp_path, read):
    prompts = [{"prompt": "Add 2 and 2."}, {"id": "b", "prompt": "Write."}, {"id": "c", "turns": ["Add 2 and 2."]}]
    read(str(write(tmp_path, *prompts[:2])))
    with pytest.raises(PromptsInvalid, match="prompt c repeats prompt 1"):
        read(str(write(tmp_path, *prompts)))


def test_files_that_hold_no_prompts(tmp_path):
    with pytest.raises(PromptsInvalid, match="cannot be read"):
        read_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(PromptsInvalid, match="no prompts"):
        read_prompts(write(tmp_path, "", "  "))
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(PromptsInvalid, match="cannot be read"):
        read_prompts(tmp_path / "latin.jsonl")


texts = st.text(min_size=1).filter(str.strip)


@given(st.lists(texts, min_size=1, max_size=3))
def test_the_digest_is_of_the_turns_alone(turns):
    prompt = Prompt("1", "math", tuple(turns))
    assert Prompt("2", "", tuple(turns)).digest == prompt.digest
    assert Prompt("1", "math", (*turns, "more")).digest != prompt.digest
    # Joined turns are another dialogue.
    assert len(turns) == 1 or Prompt("1", "math", ("".join(turns),)).digest != prompt.digest


@given(st.permutations([Prompt(str(i), "", (f"turn {i}",)) for i in range(4)]))
def test_the_digest_of_a_set_does_not_hang_on_its_order(prompts):
    assert digest_prompts(tuple(prompts)) == digest_prompts(tuple(sorted(prompts, key=lambda p: p.id)))
    assert digest_prompts(tuple(prompts)) != digest_prompts(tuple(prompts[1:]))


def test_a_million_prompts_are_not_held_as_texts(tmp_path):
    """Of each prompt stay its id, its digest and its tokens; it was 4.5 kilobytes with two sequences."""
    file, count = tmp_path / "many.jsonl", 2000
    file.write_text("".join(json.dumps({"prompt": f"prompt {i} " + "word " * 400}) + "\n" for i in range(count)))
    words = SimpleNamespace(encode=lambda text, most=None: list(range(20)))
    tracemalloc.start()
    try:
        rows = list(write_states._continued(StatesOptions(prompts=str(file), captured=(1,), greedy=64), words, 4096))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(rows) == 2 * count and held / count < 1500, "bytes for each prompt"
    assert rows[0].tokens.tolist() == list(range(20)) and rows[0].mask is None


@pytest.mark.parametrize("place", ["prompt", "id", "category"])
def test_half_a_surrogate_pair_is_refused(tmp_path, place):
    """It has no bytes, so neither has its digest, nor the tokens of it."""
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": "a"} | {place: "x\ud800"}) + "\n")
    with pytest.raises(PromptsInvalid, match="surrogate"):
        read_prompts(file)
