import json

import pytest
import torch

from kconv.errors import TrainingDataInvalid
from kconv.targets.dialogues import Sample, encode_row, read_rows
from kconv.targets.prompts import Prompt
from kconv.targets.tokenizer import load_tokenizer
from kconv.train.data import pack_samples, prepare_dialogues

ASK = "{% if add_generation_prompt %}<assistant>{% endif %}"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}" + ASK
# As reasoning models have it: an answer's thinking is dropped once another turn follows.
FORGETS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('@')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "</s>{% endfor %}" + ASK
)


# As Kimi-K2's: an answer that is history has an empty place for what was thought before it.
THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}</s>"
    "{% endfor %}" + ASK
)
# As Kimi-K2.5's, which opens the place before the target speaks.
OPENS = THINKS.replace("<assistant>", "<assistant><think>")
# As others have it, which write it out themselves.
WRITES = THINKS.replace("<think></think>", "<think>{{ m.reasoning_content }}</think>")


@pytest.fixture
def tokenizer(tiny_target):
    found = load_tokenizer(tiny_target)
    found.inner.chat_template = TEMPLATE
    return found


DIALOGUE = [
    {"role": "user", "content": "What is a list?"},
    {"role": "assistant", "content": "A sequence."},
    {"role": "user", "content": "And a dict?"},
    {"role": "assistant", "content": "A mapping."},
]


def counted(sample: Sample, tokenizer) -> str:
    return tokenizer.decode(sample.ids[sample.mask].tolist())


def test_only_the_answers_count(tokenizer):
    (sample,) = encode_row({"messages": DIALOGUE}, tokenizer, "here")
    assert counted(sample, tokenizer) == "A sequence.</s>A mapping.</s>"
    whole = "".join(f"<{m['role']}>{m['content']}</s>" for m in DIALOGUE)
    assert tokenizer.decode(sample.ids.tolist()) == whole


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"prompt": "Hi", "response": "Hello"},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
    ],
)
def test_every_form_is_the_same_dialogue(tokenizer, row):
    (sample,) = encode_row(row, tokenizer, "here")
    assert tokenizer.decode(sample.ids.tolist()) == "<user>Hi</s><assistant>Hello</s>"
    assert counted(sample, tokenizer) == "Hello</s>"


def test_a_template_that_forgets_gives_each_answer_the_context_that_it_saw(tokenizer):
    tokenizer.inner.chat_template = FORGETS
    dialogue = [dict(turn) for turn in DIALOGUE]
    dialogue[1]["content"] = "thinking@A sequence."
    samples = list(encode_row({"messages": dialogue}, tokenizer, "here"))
    assert [counted(s, tokenizer) for s in samples] == ["thinking@A sequence.</s>", "A mapping.</s>"]
    assert tokenizer.decode(samples[1].ids.tolist()).startswith("<user>What is a list?</s><assistant>A sequence.</s>")


@pytest.mark.parametrize(
    ("template", "said"),
    [(THINKS, "<think>Hm.</think>Hello</s>"), (OPENS, "Hm.</think>Hello</s>"), (WRITES, "<think>Hm.</think>Hello</s>")],
)
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_what_the_target_thought_before_its_answer_is_trained_on(tokenizer, template, said, name):
    tokenizer.inner.chat_template = template
    dialogue = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", name: "Hm."}]
    (sample,) = encode_row({"messages": dialogue}, tokenizer, "here")
    assert counted(sample, tokenizer) == said
    assert tokenizer.decode(sample.ids.tolist()) == "<user>Hi</s><assistant><think>Hm.</think>Hello</s>"


def test_an_earlier_answers_thoughts_are_no_context_of_the_next(tokenizer):
    tokenizer.inner.chat_template = THINKS
    dialogue = [turn | ({"reasoning_content": "Hm."} if turn["role"] == "assistant" else {}) for turn in DIALOGUE]
    samples = list(encode_row({"messages": dialogue}, tokenizer, "here"))
    assert [counted(s, tokenizer) for s in samples] == [
        "<think>Hm.</think>A sequence.</s>", "<think>Hm.</think>A mapping.</s>",
    ]  # fmt: skip
    assert "<think></think>A sequence." in tokenizer.decode(samples[1].ids.tolist())


def test_thoughts_without_a_place_in_the_template_are_not_dropped(tokenizer):
    dialogue = [DIALOGUE[0], DIALOGUE[1] | {"reasoning_content": "Hm."}]
    with pytest.raises(TrainingDataInvalid, match="no place for it") as fault:
        list(encode_row({"messages": dialogue}, tokenizer, "data.jsonl:7"))
    assert fault.value.where == "data.jsonl:7"


@pytest.mark.parametrize(
    ("reasoning", "answer"), [("4", "yes, 4"), ("Hm.", "use <think></think> tags"), ("<think>", "Hello"), ("\n", "Hi")]
)
@pytest.mark.parametrize("template", [THINKS, WRITES])
def test_thoughts_come_before_the_answer_whatever_it_says(tokenizer, template, reasoning, answer):
    tokenizer.inner.chat_template = template
    row = {"messages": [DIALOGUE[0], {"role": "assistant", "content": answer, "reasoning": reasoning}]}
    (sample,) = encode_row(row, tokenizer, "here")
    assert counted(sample, tokenizer) == f"<think>{reasoning}</think>{answer}</s>"


@pytest.mark.parametrize("answer", ["yes, 4", "use <think></think> tags for 4"])
def test_an_answer_is_no_place_for_thoughts(tokenizer, answer):
    row = {"messages": [DIALOGUE[0], {"role": "assistant", "content": answer, "reasoning": "4"}]}
    with pytest.raises(TrainingDataInvalid, match="no place for it"):
        list(encode_row(row, tokenizer, "here"))


def test_a_plain_text_counts_whole(tokenizer):
    (sample,) = encode_row({"text": "A sequence."}, tokenizer, "here")
    assert counted(sample, tokenizer) == "A sequence."
    assert sample.prompts == (Prompt("", "", ("A sequence.",)).digest,)


def test_what_is_answered_is_known_by_the_digests_of_held_out_prompts(tokenizer):
    asked = ("What is a list?", "And a dict?")
    wanted = tuple(Prompt("", "", turns).digest for turns in (asked[:1], asked))
    (sample,) = encode_row({"messages": [{"role": "system", "content": "Be brief."}, *DIALOGUE]}, tokenizer, "here")
    assert sample.prompts == wanted
    tokenizer.inner.chat_template = THINKS
    thought = [turn | ({"reasoning_content": "Hm."} if turn["role"] == "assistant" else {}) for turn in DIALOGUE]
    assert [s.prompts for s in encode_row({"messages": thought}, tokenizer, "here")] == [wanted[:1], wanted[1:]]


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"messages": "hi"},
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"messages": [{"role": "wizard", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "Hello"}]},
        {"messages": [{"role": "user", "content": ["Hi"]}, {"role": "assistant", "content": "Hello"}]},
        {"messages": [DIALOGUE[0], DIALOGUE[1] | {"reasoning_content": ["Hm."]}]},
        {"prompt": "Hi"},
    ],
)
def test_a_row_of_no_known_form_is_named(tokenizer, row):
    with pytest.raises(TrainingDataInvalid) as fault:
        list(encode_row(row, tokenizer, "data.jsonl:7"))
    assert fault.value.where == "data.jsonl:7"


def test_rows_are_cut_and_padded_and_lose_no_counted_token():
    mask = torch.tensor([False] * 5 + [True] * 6)
    rows = pack_samples([Sample(torch.arange(11), mask), Sample(torch.arange(20, 23), mask[:3])], 4)
    assert rows.ids.tolist() == [[4, 5, 6, 7], [8, 9, 10, 0]]
    assert rows.mask.tolist() == [[False, True, True, True], [True, True, True, False]]


def test_data_in_which_nothing_counts_is_refused():
    with pytest.raises(TrainingDataInvalid, match="no answers or texts"):
        pack_samples([Sample(torch.arange(8), torch.zeros(8, dtype=torch.bool))], 4)


def test_held_out_text_in_which_nothing_counts_is_named(tokenizer, tmp_path):
    data, held_out = tmp_path / "data.jsonl", tmp_path / "held-out.jsonl"
    data.write_text("".join(json.dumps({"text": f"The text of number {i}."}) + "\n" for i in range(20)))
    held_out.write_text("\n")
    with pytest.raises(TrainingDataInvalid, match="no answers or texts") as caught:
        prepare_dialogues(str(data), tokenizer, 8, held_out=str(held_out), split="train", revision=None)
    assert str(caught.value.where) == str(held_out)


def test_a_jsonl_is_read_row_by_row(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ({"text": "a"}, {"text": "b"})) + "\n\n")
    assert [(where.rsplit(":")[-1], row["text"]) for where, row in read_rows(str(file))] == [("1", "a"), ("2", "b")]


@pytest.mark.parametrize("line", ["{", "[1]", '"text"', "\xff"])
def test_a_broken_line_is_named(tmp_path, line):
    file = tmp_path / "data.jsonl"
    file.write_bytes(line.encode("latin-1"))
    with pytest.raises(TrainingDataInvalid, match="cannot be read"):
        list(read_rows(str(file)))


def test_a_dataset_that_is_not_there_is_named():
    with pytest.raises(TrainingDataInvalid, match="neither a file nor a readable dataset"):
        list(read_rows("org/no-such-dataset"))
