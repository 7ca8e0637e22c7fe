"""A card's front matter: written as the Hub reads it, and read whatever stands there."""

from __future__ import annotations

import pytest
import yaml
from huggingface_hub import ModelCard
from support.release_faults import found
from support.releases import row, write_card

from kconv.bench.acceptance import AcceptanceFile
from kconv.cards.evidence import Evidence
from kconv.cards.facts import Facts
from kconv.cards.front_matter import FrontMatter, front_matter, read_front_matter, results
from kconv.cards.license_checks import check_folder

INDEX = "license: mit\nmodel-index:\n"
HOSTILE = {
    "no YAML": "a: [",
    "a date that cannot be": "license: 2026-13-45",
    "lists within lists": "a: " + "[" * 3000,
    "a number too large": "a: " + "1:" * 400 + "1.0",
    "an object of Python's": "license: !!python/object/apply:os.getcwd []",
    "a list for a mapping": "- license",
    "a text for a mapping": "license",
    "keys that are no text": "1: mit\n2: x",
    "a key that is a method's name": "get: 1\nlicense: [x]",
    "a key of the reader's": "self: 1",
    "another key of the reader's": "ignore_metadata_errors: {}\neval_results: 5",
    "a number for a license": "license: 2.0",
    "a truth for a license": "license: no",
    "a list for a license": "license: [mit]",
    "a mapping for a link": "license: other\nlicense_link: {a: b}",
    "a mapping for a base model": "base_model: {a: b}",
    "a number among base models": "base_model: [org/target, 7]",
    "a number for tags": "tags: 5",
    "an index that is a number": "model-index: 5",
    "an index that is a text": "model-index: text",
    "an index of numbers": "model-index: [1]",
    "an index without results": "model-index: [{name: x}]",
    "results that are a number": "model-index: [{name: x, results: 5}]",
    "a source that is a text": (
        "model-index: [{name: x, results: [{task: {type: t}, dataset: {type: d, name: n}, source: s, metrics: []}]}]"
    ),
    "metrics that are a text": (
        "model-index: [{name: x, results: [{task: {type: t}, dataset: {type: d, name: n}, metrics: text}]}]"
    ),
}


@pytest.mark.parametrize("held", HOSTILE.values(), ids=HOSTILE)
def test_what_cannot_be_read_is_a_finding_of_gate_and_license_checks(folder, held):
    card = f"---\n{held}\n---\n# A head\n"
    front = read_front_matter(card)
    assert front == FrontMatter(problem=front.problem) and front.problem.startswith("the card's front matter ")
    assert "\n" not in front.problem and len(front.problem) < 300
    (folder / "README.md").write_text(card)
    assert {"P113", "L2"} <= set(found(folder))
    assert front.problem in "".join(one.message for one in check_folder(folder) if one.rule == "L2")


@pytest.mark.parametrize("card", ["", "# A head\n", "text\n---\nlicense: mit\n---\n"])
def test_a_card_without_front_matter_says_so(card, capsys):
    assert read_front_matter(card) == FrontMatter(problem="the card has no front matter")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("held, bases", [("org/a", ("org/a",)), (["org/a", "org/b"], ("org/a", "org/b")), (None, ())])
def test_base_models_may_be_one_several_or_none(held, bases):
    assert read_front_matter(f"---\n{yaml.safe_dump({'base_model': held})}---\n").base_models == bases


def test_line_ends_of_windows_are_read():
    assert read_front_matter("---\r\nlicense: mit\r\n---\r\n# A head\r\n").license == "mit"


def evidence() -> Evidence:
    rows = (
        row(category="math", value=2.1),
        row(category="stem", value=2.2),
        row(category="math", value=2.4, measured_by="quoted", url="https://example.org/figures"),
    )
    return Evidence(
        facts=Facts(name="org/head", base_model="org/target"), acceptance=(AcceptanceFile(head="h", rows=rows),)
    )


def test_each_figure_keeps_its_category_and_its_source():
    """The library's own model index keeps one name and one source of all figures on a data set."""
    made = f"---\n{front_matter(evidence(), link='', model_index=True)}---\n# A head\n"
    shown = [(one.dataset_name, one.metric_value, one.source_url) for one in ModelCard(made).data.eval_results]
    assert shown == [
        ("MT-Bench (math)", 2.1, None),
        ("MT-Bench (stem)", 2.2, None),
        ("MT-Bench (math)", 2.4, "https://example.org/figures"),
    ]
    assert list(read_front_matter(made).results) == results(evidence())


def test_what_is_written_stands_in_the_order_of_the_hubs_guide():
    written = yaml.safe_load(front_matter(evidence(), link="", model_index=True))
    keys = ["license", "pipeline_tag", "base_model", "tags", "model-index"]
    assert list(written) == keys


def test_figures_of_a_release_are_read_back_as_they_were_written(folder):
    write_card(folder, {"license": "mit", "library_name": "kconv", "pipeline_tag": "text-generation"})
    assert read_front_matter((folder / "README.md").read_text()).results == ()
