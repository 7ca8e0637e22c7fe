"""Facts are typed: what does not exist is refused, what nobody said is asked for, and words stay as they were."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from kconv.cards.card import STYLES, make_card
from kconv.cards.evidence import Evidence
from kconv.cards.facts import SUBCARDS, Facts, read_facts
from kconv.cards.facts_file import write_facts
from kconv.cards.license_checks import check_folder
from kconv.errors import FactsInvalid, OutputExists


def read(tmp_path: Path, text: str) -> Facts:
    (tmp_path / "facts.yaml").write_text(text)
    return read_facts(tmp_path / "facts.yaml")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("licnce: {id: mit}", "licnce"),
        ("training: {gpus: 8}", "training.gpus"),
        ("license: {id: gpl-9}", "'gpl-9' is not a license that kconv knows"),
        ("subcards: {ethics: {}}", "no subcard 'ethics'"),
        ("subcards: {bias: {fairness: high}}", "bias has no fairness; it has participation, measures"),
        ("training: [", "not valid YAML: line 1"),
        ("- a list", "its top"),
        ("notes: {usgae: [a]}", "there is no section usgae; the sections are overview, license"),
    ],
)
def test_a_facts_file_that_is_none_is_named(tmp_path, text, what):
    with pytest.raises(FactsInvalid, match=re.escape(what)):
        read(tmp_path, text)


def test_a_facts_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FactsInvalid, match="there is no facts file"):
        read_facts(tmp_path / "facts.yaml")


@pytest.mark.parametrize("key", ["base_model", "source_head"])
def test_a_folder_is_no_model_of_the_hub(tmp_path, key):
    (tmp_path / "facts.yaml").write_text(f"name: org/head\n{key}: ./target\n")
    with pytest.raises(FactsInvalid, match=r"\./target is a path, and must be a Hub id") as fault:
        read_facts(tmp_path / "facts.yaml")
    assert fault.value.where.endswith("facts.yaml:2")


def test_an_engine_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(FactsInvalid, match=r"serve\.llamacpp"):
        read(tmp_path, "serve: {llamacpp: {}}")


@pytest.mark.parametrize("text", ["one | two", "one\ntwo\n\n# three", "| a | b |"])
def test_words_do_not_break_a_table(text):
    facts = Facts(name="org/head", subcards={"bias": {"measures": text}})
    other = Facts(name="org/head", subcards={"bias": {"measures": "none"}})
    made, plain = (make_card(Evidence(facts=f), "nvidia").text for f in (facts, other))
    assert len(made.splitlines()) == len(plain.splitlines())
    [line] = [line for line in made.splitlines() if line.startswith("| Measures")]
    assert line.replace("\\|", "").count("|") == 3


def test_an_empty_file_says_nothing(tmp_path):
    assert read(tmp_path, "") == Facts()


def test_words_stay_as_they_were_written(tmp_path):
    facts = read(tmp_path, "released: 2026-06-03\nversion: 1.0\ntraining: {iterations: 9279, samples: '48K'}\n")
    assert (facts.released, facts.version) == ("2026-06-03", "1.0")
    assert (facts.training.iterations, facts.training.samples) == ("9279", "48K")


@pytest.mark.parametrize("style", STYLES)
def test_what_nobody_said_is_asked_for_by_name_and_left_out(style):
    card = make_card(Evidence(facts=Facts(name="org/head")), style)
    assert ("license: unknown" in card.text) and "org/head" in card.text
    assert card.text.count("not stated") == 1, "but for the license"
    for name in card.missing:
        assert name.startswith("subcards.") or all(card.missing[name].split()), name
    # What is told is asked for no longer.
    if style != "short":
        assert "summary" in card.missing and "base_model" in card.missing
        told = make_card(Evidence(facts=Facts(name="org/head", summary="A head.", base_model="org/target")), style)
        assert card.missing.keys() - told.missing.keys() == {"summary", "base_model"}
        assert "## Description" not in card.text and "A head." in told.text


def test_the_nvidia_style_asks_for_every_subcard():
    missing = make_card(Evidence(facts=Facts(name="org/head")), "nvidia").missing
    rows = {f"subcards.{card}.{row}" for card, rows in SUBCARDS.items() for row in rows}
    # But for what only NVIDIA could say.
    assert rows - missing.keys() == {"subcards.explainability.quality_standards"}


@pytest.mark.parametrize(("publisher", "by", "warned"), [("NVIDIA", "NVIDIA", False), ("org", "org", True),
                                                         (None, "its publisher", True)])  # fmt: skip
def test_a_quality_claim_is_its_publishers_and_a_warning_if_that_is_not_nvidia(tmp_path, publisher, by, warned):
    facts = Facts(name="org/head", publisher=publisher, subcards={"explainability": {"quality_standards": "Yes"}})
    text = make_card(Evidence(facts=facts), "nvidia").text
    assert f"| Verified to have met prescribed NVIDIA quality standards | As {by} states: Yes |" in text
    assert "The answers are the publisher's; kconv evaluated none of them." in text
    (tmp_path / "README.md").write_text(text)
    assert ("L9" in {finding.rule for finding in check_folder(tmp_path, facts)}) == warned


def test_what_nobody_said_of_quality_is_left_out():
    facts = Facts(name="org/head", subcards={"explainability": {"output": "Text"}})
    assert "NVIDIA quality standards" not in make_card(Evidence(facts=facts), "nvidia").text


@pytest.mark.parametrize("argument", ["--config '{", 'a "b'])
def test_an_argument_that_no_shell_reads_is_named(tmp_path, argument):
    with pytest.raises(FactsInvalid, match="a shell cannot read"):
        read(tmp_path, yaml.safe_dump({"serve": {"vllm": {"arguments": [argument]}}}))


def test_commands_bear_the_heads_and_the_targets_names_and_arguments():
    facts = Facts.model_validate(
        {
            "name": "org/head",
            "base_model": "org/target",
            "serve": {
                "vllm": {"requires": "vLLM >= 1", "arguments": ["--tensor-parallel-size 8"]},
                "sglang": {"unsupported": "Not there yet."},
            },
        }
    )
    text = make_card(Evidence(facts=facts), "compact").text
    assert "vllm serve org/target \\\n    --tensor-parallel-size 8 \\\n" in text
    assert '{"model": "org/head", "method": "eagle3", "num_speculative_tokens": 3}' in text
    assert "Requires vLLM >= 1." in text
    assert "**SGLang**\n\nNot there yet." in text and "launch_server" not in text


def test_a_publishers_own_paragraphs_are_added_to_their_sections():
    facts = Facts.model_validate({"name": "org/head", "notes": {"ethics": ["Ours."], "usage": ["Ask us."]}})
    text = make_card(Evidence(facts=facts), "nvidia").text
    assert "## Ethical Considerations\n\nOurs.\n" in text and "## Usage\n\nAsk us.\n" in text


def test_an_engines_yaml_is_shown_as_it_runs():
    serve = {"target": "org/target-NVFP4", "config": "speculative_model: PATH_OR_ID_OF_THIS_HEAD\n", "note": "N."}
    facts = Facts.model_validate({"name": "org/head", "base_model": "org/target", "serve": {"trtllm": serve}})
    text = make_card(Evidence(facts=facts), "nvidia").text
    assert "trtllm-serve org/target-NVFP4 \\\n" in text and "--config serve-trtllm.yaml" in text
    assert "with `serve-trtllm.yaml` being\n\n```yaml\nspeculative_model: org/head\n```" in text


def test_a_facts_file_to_fill_in_asks_for_every_key_and_is_read_as_it_is(tmp_path):
    file = write_facts(tmp_path / "facts.yaml", Facts(name="org/head"), tmp_path)
    assert read_facts(file) == Facts(name="org/head")
    text = file.read_text()
    assert "summary:  # what it is, in your own words" in text and "name: org/head" in text
    # Whatever a card asks for has its line, commented out or not.
    for path in make_card(Evidence(facts=Facts(name="org/head")), "nvidia").missing:
        assert re.search(rf"^[# ]*{path.split('.')[-1]}:", text, re.MULTILINE), path
    # With the comment marks of its examples taken off, it is a facts file too.
    filled = re.sub(r"(?m)^( *)# ((  )*)(?=[a-zA-Z_-])", r"\1\2", text.split("\n\n", 1)[1])
    assert isinstance(yaml.safe_load(filled), dict)
    with pytest.raises(OutputExists, match="already"):
        write_facts(file, Facts(), tmp_path)
    write_facts(file, Facts(name="org/other"), tmp_path, force=True)
    assert read_facts(file).name == "org/other"
