"""Tables of figures: what shares a column, and how missing ones stand; figures side by side, and those kept apart."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.releases import FULL, row

from kconv.bench.acceptance import (
    MAY_BE_UNSAID,
    METHOD,
    AcceptanceFile,
    AcceptanceRow,
    Interval,
    SuiteRecord,
    differences,
    read_acceptance,
)
from kconv.bench.compare import compare, draw
from kconv.bench.tables import describe, table_of
from kconv.cards.card import draw_chart
from kconv.errors import AcceptanceInvalid, MissingExtra

OTHER = {
    "draft_tokens": 4, "tree": "topk=4", "averaging": "micro_steps", "engine": "sglang", "engine_version": "0.33.0",
    "target": "moonshotai/Kimi-K2.5", "precision": "INT4", "temperature": 1.0, "reasoning": "medium",
    "max_tokens": 4096, "draft_sample_method": "probabilistic", "rejection_sample_method": "block",
}  # fmt: skip


def said(*rows: AcceptanceRow) -> str:
    return str(describe(*rows))


def head(name: str, *rows: AcceptanceRow) -> AcceptanceFile:
    return AcceptanceFile(head=name, rows=rows)


@given(st.lists(st.tuples(st.sampled_from(list(OTHER)), st.sampled_from(["math", "coding"])), max_size=8, unique=True))
def test_rows_of_different_keys_never_share_a_column(changes):
    rows = [row(value=2.0), *(row(**{name: OTHER[name]}, category=category, value=3.0) for name, category in changes)]
    rows = list({(*r.method.values(), r.category): r for r in rows}.values())
    table = table_of([head("h", *rows)], {})
    assert table is not None
    for own in zip(*(line.rows for line in table.lines), strict=True):
        assert len({tuple(r.method.values()) for r in own if r}) == 1
    assert len({tuple(r.method.values()) for r in rows}) == len(set(table.columns)) == len(table.columns)
    shown = [cell for line in table.lines for cell in line.cells if cell]
    assert sorted(shown) == sorted(r.shown for r in rows)


@pytest.mark.parametrize("name", OTHER)
def test_a_column_is_headed_by_what_tells_it_from_the_next(name):
    table = table_of([head("h", row(), row(**{name: OTHER[name]}))], {})
    assert table is not None
    said = "verify steps" if name == "averaging" else str(OTHER[name])
    assert said in table.columns[1] and said not in table.columns[0]
    assert table.lines[0].cells == ("2.500", "2.500") and len(table.lines) == 1


def test_a_quotation_never_shares_a_column_with_a_measurement():
    quoted = row(measured_by="quoted", url="https://example.org", category="coding", value=3.1)
    table = table_of([head("h", row()), head("h", quoted)], {})
    assert table is not None and [line.cells for line in table.lines] == [("2.500", ""), ("", "3.100")]


OTHER_PROMPTS = {
    "revision": ("b" * 40, [f"revision {'a' * 40}", f"revision {'b' * 40}"]),
    "prompts_sha256": ("c" * 64, ["prompts' sha256 not stated", f"prompts' sha256 {'c' * 64}"]),
}


@pytest.mark.parametrize(
    ("name", "changed", "told"), [(n, *how) for n, how in OTHER_PROMPTS.items()], ids=OTHER_PROMPTS
)
def test_figures_on_other_prompts_stand_in_lines_that_say_so(name, changed, told):
    other = row(**{name: changed}, value=3.4, date="2026-11-20")
    table = table_of([head("h", row()), head("h", other)], {})
    assert table is not None
    assert [(line.benchmark, line.prompts, line.cells) for line in table.lines] == [
        (f"MT-Bench, {told[0]}", "10", ("2.500", "")),
        (f"MT-Bench, {told[1]}", "10", ("", "3.400")),
    ]
    assert [list(bars.items()) for bars in table.bars.values()] == [
        [(f"math, {told[0]}", 2.5)],
        [(f"math, {told[1]}", 3.4)],
    ]


def test_another_number_of_prompts_is_another_line_and_another_bar():
    table = table_of([head("h", row(), row(prompts=80, value=2.1))], {})
    assert table is not None
    assert [(line.benchmark, line.prompts, line.cells) for line in table.lines] == [
        ("MT-Bench", "10", ("2.500",)),
        ("MT-Bench", "80", ("2.100",)),
    ]
    assert table.bars == {"Acceptance length": {"math, N = 10": 2.5, "math, N = 80": 2.1}}


def test_what_a_source_leaves_unsaid_is_the_same_within_that_source_alone():
    def quoted(url: str, **changes) -> AcceptanceRow:
        return row(measured_by="quoted", url=url, date=None, revision=None, **changes)

    one = head("h", quoted("https://x"), quoted("https://x", draft_tokens=4, value=2.8))
    table = table_of([one, head("h", quoted("https://y", value=3.1)), head("h", row(value=2.6))], {})
    assert table is not None
    assert [(line.benchmark, line.cells) for line in table.lines] == [
        ("MT-Bench, revision not stated, of https://x", ("2.500", "2.800", "", "")),
        ("MT-Bench, revision not stated, of https://y", ("", "", "3.100", "")),
        (f"MT-Bench, revision {'a' * 40}", ("", "", "", "2.600")),
    ]
    assert len(set(table.columns)) == 4


def test_a_category_is_missing_only_where_the_column_has_it_on_no_prompts():
    suite = SuiteRecord(dataset="MT-Bench", categories=("math", "stem"))
    quoted = row(measured_by="quoted", url="https://x", revision=None)
    measured = AcceptanceFile(head="h", suites=(suite,), rows=(row(), row(category="stem", value=2.1)))
    table = table_of([measured, head("h", quoted)], {})
    assert table is not None
    assert [(line.category, line.cells) for line in table.lines] == [
        ("math", ("2.500", "")),
        ("stem", ("2.100", "unknown")),
        ("math", ("", "2.500")),
    ]


def test_what_was_measured_again_has_a_column_of_its_own_and_a_file_given_twice_has_one():
    again = row(value=3.4)
    table = table_of([head("h", row(), row(category="stem", value=2.1)), head("h", again), head("h", again)], {})
    assert table is not None and table.columns == ("Acceptance length", "Acceptance length, no. 2")
    assert [line.cells for line in table.lines] == [("2.500", "3.400"), ("2.100", "")]
    assert table.bars == {table.columns[0]: {"math": 2.5, "stem": 2.1}, table.columns[1]: {"math": 3.4}}


def test_a_mean_of_the_categories_is_a_line_beside_another_mean():
    suite = SuiteRecord(dataset="MT-Bench", categories=("math", "stem"))
    steps = [row(averaging="micro_steps", category=name) for name in ("math", "stem", "")]
    mean = row(averaging="macro_category", category="", value=2.6)
    table = table_of([AcceptanceFile(head="h", suites=(suite,), rows=(*steps, mean))], {})
    assert table is not None
    assert table.columns == ("Acceptance length",) and table.legend == []
    assert [(line.category, *line.cells) for line in table.lines] == [
        ("math", "2.500"), ("stem", "2.500"), ("all", "2.500"), ("mean of the categories", "2.600"),
    ]  # fmt: skip
    alone = table_of([AcceptanceFile(head="h", suites=(suite,), rows=(mean,))], {})
    assert alone is not None and [(line.category, *line.cells) for line in alone.lines] == [("all", "2.600")]


def test_a_figure_that_does_not_state_the_bonus_token_says_so_and_is_compared_with_nothing():
    quoted = row(metric="al_as_published", measured_by="quoted", url="https://x", value=0.4)
    assert "tokens per verify step, K = 3" in said(quoted) and "not stated: bonus token;" in said(quoted)
    assert "metric" in differences(quoted, quoted)
    table = table_of([head("h", quoted)], {})
    assert table is not None and list(table.bars.values()) == [{"math": 0.4}]
    with pytest.raises(ValueError, match="the metric of a quoted figure"):
        row(metric="al_as_published")


def test_missing_categories_stand_in_their_lines():
    quoted = row(measured_by="quoted", url="https://example.org", decimals=2)
    suite = SuiteRecord(dataset="MT-Bench", categories=("math", "stem"), source="whole")
    whole = row(measured_by="quoted", url="https://example.org", category="", value=2.6, decimals=2)
    table = table_of([AcceptanceFile(head="h", suites=(suite,), rows=(quoted, whole))], {"SPEED-Bench": ()})
    assert table is not None
    assert [(line.category, line.benchmark, line.cells) for line in table.lines] == [
        ("math", "MT-Bench", ("2.50",)),
        ("stem", "MT-Bench", ("not published",)),
        ("all", "MT-Bench", ("2.60",)),
        ("all", "SPEED-Bench", ("not published",)),
    ]
    measured = table_of([AcceptanceFile(head="h", suites=(suite,), rows=(row(),))], {})
    assert measured is not None and [line.category for line in measured.lines] == ["math"]


@pytest.mark.parametrize(("source", "word"), [("whole", "not published"), ("excerpt", "unknown"), (None, "unknown")])
def test_only_of_a_source_that_was_read_whole_something_is_called_unpublished(source, word):
    suite = SuiteRecord(dataset="MT-Bench", categories=("math", "stem"), source=source)
    quoted = row(measured_by="quoted", url="https://example.org")
    table = table_of([AcceptanceFile(head="h", suites=(suite,), rows=(quoted,))], {})
    assert table is not None
    # A line of which nothing is known is left out, and it is said that there may be more.
    assert [line.cells for line in table.lines[1:]] == [(word,)] * (word != "unknown")
    assert [line.startswith("Only a part of the source") for line in table.legend] == [True] * (word == "unknown")


@pytest.mark.parametrize("spelled", ["MTBench", "mt_bench", "MT Bench"])
def test_one_suite_is_one_however_it_is_spelled(spelled):
    found = compare([head("a", row()), head("b", row(dataset=spelled, value=2.7))])
    [(about, rows)] = found.tables[0].lines
    assert about == "MT-Bench (math)" and [r and r.value for r in rows] == [2.5, 2.7] and not found.apart


def test_the_published_figures_of_one_target_are_held_against_each_other():
    """No two of them compare, and each pair on one suite says why, spelled alike or not."""
    cards = Path(__file__).parents[2] / "docs" / "cards"
    files = [read_acceptance(file) for file in sorted(cards.glob("*/acceptance.json"))]
    found = compare(files)
    assert len(found.heads) == 4 and not found.tables
    [reason] = [a.reason for a in found.apart if a.head == "nvidia/Kimi-K2.6-Eagle3" and a.about == "MT-Bench"]
    assert "engine trtllm here, vllm there" in reason and "averaging not stated by either" in reason


def test_an_interval_stands_beside_its_figure_and_is_explained():
    table = table_of([head("h", row(interval=Interval(low=2.4, high=2.61, over="prompts", units=10)))], {})
    assert table is not None and table.lines[0].cells == ("2.500 [2.400, 2.610]",)
    assert table.legend == ["In brackets: the 95% confidence interval, by bootstrap over prompts."]


def test_nothing_known_and_nothing_looked_for_is_no_table():
    assert table_of([], {}) is None


def test_a_key_says_what_is_not_stated():
    text = said(row(precision=None, averaging=None, measured_by="quoted", url="https://example.org"))
    assert "; not stated: kind of mean, precision; quoted from" in text
    assert "https://example.org" in text and "bonus token" in text


def test_a_key_says_of_which_revision_each_data_set_is():
    assert f", prompts of revision {'a' * 40}; measured" in said(row(), row(dataset="SPEED-Bench"))
    text = said(row(), row(category="stem"), row(dataset="SPEED-Bench", revision="main"))
    assert f", prompts of revisions MT-Bench {'a' * 40} and SPEED-Bench main; measured" in text


def test_heads_stand_side_by_side_where_every_key_is_equal():
    found = compare([head("a", row(), row(category="stem", value=2.1)), head("b", row(value=2.7))])
    assert found.heads == ("a", "b")
    [table] = found.tables
    assert [(about, [r and r.value for r in rows]) for about, rows in table.lines] == [("MT-Bench (math)", [2.5, 2.7])]
    [apart] = found.apart
    assert (apart.head, apart.about, apart.reason) == (
        "a",
        "MT-Bench (stem)",
        "no other head has a figure on MT-Bench (stem)",
    )


@pytest.mark.parametrize("name", [*OTHER, "revision", "prompts"])
def test_figures_of_other_keys_are_listed_with_what_keeps_them_apart(name):
    changed = {"revision": "b" * 40, "prompts": 80, **OTHER}[name]
    found = compare([head("a", row()), head("b", row(**{name: changed}))])
    assert not found.tables and len(found.apart) == 2
    own, said = {**dict.fromkeys(OTHER), **FULL}[name], name.replace("_", " ")
    assert found.apart[0].reason == f"{said} {'not stated' if own is None else own} here, {changed} there"


@pytest.mark.parametrize("name", [name for name in METHOD if name not in {"metric", "measured_by", *MAY_BE_UNSAID}])
def test_what_neither_states_compares_with_nothing(name):
    quoted = {"measured_by": "quoted", "url": "https://example.org", name: None}
    found = compare([head("a", row(**quoted)), head("b", row(**quoted))])
    assert found.apart[0].reason == f"{name.replace('_', ' ')} not stated by either"


def test_three_heads_two_of_which_compare():
    found = compare([head("a", row()), head("b", row(value=2.7)), head("c", row(draft_tokens=4))])
    assert [[r and r.value for r in rows] for _, rows in found.tables[0].lines] == [[2.5, 2.7, None]]
    assert [apart.head for apart in found.apart] == ["c"]


def test_a_second_figure_of_one_key_is_not_lost():
    def quoted(url: str, value: float) -> AcceptanceRow:
        return row(measured_by="quoted", url=url, value=value)

    found = compare(
        [head("a", quoted("https://x", 2.1), quoted("https://y", 3.1)), head("b", quoted("https://x", 2.6))]
    )
    assert [[r and r.value for r in rows] for _, rows in found.tables[0].lines] == [[2.1, 2.6]]
    [apart] = found.apart
    assert (apart.head, apart.about, apart.figure) == ("a", "MT-Bench (math)", "3.100")
    assert apart.reason == "the table has 2.100 with the same key from https://x; this one is from https://y"


def test_lines_side_by_side_on_other_prompts_say_so():
    found = compare([head(name, row(), row(revision="main", value=2.1)) for name in ("a", "b")])
    [table] = found.tables
    assert [about for about, _ in table.lines] == [f"MT-Bench (math), revision {told}" for told in ("a" * 40, "main")]
    assert table.method.endswith(f"revisions MT-Bench {'a' * 40} and MT-Bench main")


def test_a_domain_keeps_no_two_heads_apart():
    found = compare([head("a", row(domain="Math")), head("b", row(value=2.7))])
    assert [[r and r.value for r in rows] for _, rows in found.tables[0].lines] == [[2.5, 2.7]] and not found.apart


@pytest.mark.parametrize("names", [["a"], ["a", "a"], ["a", "b", "a"]])
def test_one_head_is_nothing_to_compare(names):
    with pytest.raises(AcceptanceInvalid, match=f"about {', '.join(names)}, but .* at least two heads"):
        compare([head(name, row()) for name in names])


def test_charts_are_drawn(tmp_path):
    rows = [row(category=name, value=2 + place / 5) for place, name in enumerate(("math", "stem", "coding"))]
    others = [one.model_copy(update={"value": 3.0}) for one in rows]
    draw(compare([head("a", *rows), head("b", *others)]), tmp_path / "c.png")
    table = table_of([head("a", *rows, row(averaging="micro_steps"))], {})
    assert table is not None
    draw_chart(tmp_path / "d.png", table)
    draw_chart(tmp_path / "e.png", table)
    for name in ("c.png", "d.png"):
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and (tmp_path / name).stat().st_size > 5000
    assert (tmp_path / "d.png").read_bytes() == (tmp_path / "e.png").read_bytes()


def test_a_chart_without_matplotlib_is_a_named_fault(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match="matplotlib"):
        draw(compare([head("a", row()), head("b", row(value=2.7))]), tmp_path / "c.png")


def test_nothing_comparable_is_not_drawn(tmp_path):
    with pytest.raises(AcceptanceInvalid, match="no figure"):
        draw(compare([head("a", row()), head("b", row(draft_tokens=4))]), tmp_path / "c.png")
    assert not (tmp_path / "c.png").exists()
