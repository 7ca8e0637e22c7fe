"""acceptance.json: what a row must say, what cannot be, and what keeps two figures apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.releases import FULL, row

from kconv.bench.acceptance import LINE, METHOD, AcceptanceFile, differences, read_acceptance
from kconv.bench.stats import mean_of_categories
from kconv.errors import AcceptanceInvalid, DefinitionsMixed, NotACheckpoint

DOCS = Path(__file__).parent.parent.parent / "docs"
OTHER = {
    "metric": "draft_accept_rate", "draft_tokens": 4, "tree": "topk=4", "averaging": "micro_steps", "engine": "sglang",
    "engine_version": "0.33.0", "target": "moonshotai/Kimi-K2.5", "precision": "INT4", "temperature": 1.0,
    "reasoning": "medium", "max_tokens": 4096, "measured_by": "quoted", "dataset": "SPEED-Bench", "revision": "b" * 40,
    "category": "coding", "prompts": 80, "prompts_sha256": "c" * 64, "draft_sample_method": "probabilistic",
    "rejection_sample_method": "block",
}  # fmt: skip


@pytest.mark.parametrize("name", [*METHOD, *LINE])
def test_each_field_of_the_key_keeps_two_figures_apart(name):
    changed = {name: OTHER[name]} | ({"value": 0.5} if name == "metric" else {})
    if OTHER[name] == "quoted":
        changed["url"] = "https://example.org"
    assert set(differences(row(), row(**changed))) == {name}
    assert not differences(row(), row(value=2.6, date="2026-11-22"))


@pytest.mark.parametrize("name", ["precision", "temperature", "max_tokens", "revision", "tree", "target"])
def test_what_neither_states_keeps_them_apart_too(name):
    assert set(differences(row(**{name: None}), row(**{name: None}))) == {name}


@given(
    value=st.floats(1.0, 4.0),
    decimals=st.integers(0, 6),
    category=st.text(max_size=5),
    rates=st.none() | st.tuples(*[st.floats(0, 1)] * 3).map(lambda some: tuple(sorted(some, reverse=True))),
)
def test_a_file_says_what_was_written(tmp_path_factory, value, decimals, category, rates):
    value = value if rates is None else 1 + sum(rates)
    written = AcceptanceFile(head="h", rows=(row(value=value, decimals=decimals, category=category, rates=rates),))
    file = tmp_path_factory.mktemp("acceptance") / "acceptance.json"
    file.write_text(written.to_json())
    assert read_acceptance(file) == written


@pytest.mark.parametrize(
    ("rates", "said"),
    [((0.5, 0.6, 0.1), "up to a later position"), ((0.9, 0.8, 0.7), r"give 3\.400 tokens per step, not")],
)
def test_rates_that_contradict_themselves_or_the_figure_are_refused(rates, said):
    with pytest.raises(ValidationError, match=said):
        row(value=2.0, rates=rates, averaging="micro_steps")
    row(value=2.0, rates=(0.62, 0.28, 0.11), averaging="micro_steps")


@pytest.mark.parametrize(
    "changes",
    [{"value": 4.2}, {"value": 0.9}, {"metric": "draft_accept_rate", "value": 1.2}, {"value": float("nan")}],
    ids=["above K+1", "below 1", "a rate above 1", "no number"],
)
def test_a_figure_that_cannot_be_is_refused(changes):
    with pytest.raises(ValidationError, match=r"is not from"):
        row(**changes)


@pytest.mark.parametrize("name", ["draft_tokens", "averaging", "engine", "engine_version", "prompts", "date"])
def test_what_kconv_measured_says_with_what(name):
    with pytest.raises(ValidationError, match=f"does not state {name}"):
        row(**{name: None})


def test_a_quotation_names_its_source():
    with pytest.raises(ValidationError, match="without the url"):
        row(measured_by="quoted")
    assert row(measured_by="quoted", url="https://example.org", engine=None, averaging=None, date=None)


def test_a_figure_is_shown_with_the_digits_of_its_source():
    assert row(value=3.34).shown == "3.340" and row(value=2.76, decimals=2).shown == "2.76"


BAND = {"low": 1.77, "high": 2.41, "over": "prompts", "units": 12}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "JSON"),
        ('{"schema": 2, "head": "h", "rows": []}', "schema: it must be 1"),
        ('{"schema": 1, "head": "h", "rows": []}', "1 or more"),
        (json.dumps({"head": "h", "rows": [FULL, FULL]}), "same key"),
        (json.dumps({"head": "h", "rows": [FULL | {"acceptance": 1}]}), r"rows\.0\.acceptance is not a known key"),
        (json.dumps({"head": "h", "rows": [FULL | {"value": 5}]}), "not from 1 to 4"),
        (
            json.dumps({"head": "h", "rows": [FULL | {"value": 2.958, "interval": BAND, "prompts": 12}]}),
            "outside of its own interval",
        ),
        (
            json.dumps({"head": "h", "rows": [FULL | {"value": 2.1, "interval": BAND, "prompts": 80}]}),
            "prompts is 80, but the interval is over 12",
        ),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path, text, what):
    (tmp_path / "acceptance.json").write_text(text)
    with pytest.raises(AcceptanceInvalid, match=what):
        read_acceptance(tmp_path / "acceptance.json")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(NotACheckpoint):
        read_acceptance(tmp_path / "acceptance.json")


def test_the_mean_of_the_categories_weighs_each_the_same():
    rows = [row(category="math", value=3.0, prompts=10), row(category="coding", value=2.0, prompts=30)]
    assert mean_of_categories(rows, ["math", "coding"]) == 2.5


@pytest.mark.parametrize("changes", [{"averaging": "micro_steps"}, {"draft_tokens": 4}, {"revision": "b" * 40}])
def test_no_mean_is_taken_over_mixed_definitions(changes):
    with pytest.raises(DefinitionsMixed, match=next(iter(changes))):
        mean_of_categories([row(), row(category="coding", **changes)], ["math", "coding"])


def test_no_mean_is_taken_without_a_category():
    with pytest.raises(AcceptanceInvalid, match="stem has none"):
        mean_of_categories([row()], ["math", "stem"])
