"""Tables of figures: what shares a column, and how missing ones stand; figures side by side, and those kept apart."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.acceptance_rows import FULL, row

from kconv.cards.card import draw_chart
from kconv.cards.compare import compare, draw
from kconv.cards.tables import describe, table_of
from kconv.errors import AcceptanceInvalid, MissingExtra
from kconv.validate.acceptance import METHOD, Acceptance, Row, Suite
from kconv.validate.acceptance_parts import Interval

OTHER = {
    "draft_tokens": 4, "tree": "topk=4", "averaging": "micro_steps", "engine": "sglang", "engine_version": "0.33.0",
    "target": "moonshotai/Kimi-K2.5", "precision": "INT4", "temperature": 1.0, "reasoning": "medium",
    "max_tokens": 4096,
}  # fmt: skip


def head(name: str, *rows: Row) -> Acceptance:
    return Acceptance(head=name, rows=rows)


@given(st.lists(st.tuples(st.sampled_from(list(OTHER)), st.sampled_from(["math", "coding"])), max_size=8, unique=True))
def test_rows_of_different_keys_never_share_a_column(changes):
    rows = [row(value=2.0), *(row(**{name: OTHER[name]}, category=category, value=3.0) for name, category in changes)]
    rows = list({(*r.method.values(), r.category): r for r in rows}.values())
    table = table_of([head("h", *rows)], {})
    assert table is not None
    for own in table.rows:
        assert len({tuple(r.method.values()) for r in own}) == 1
    assert len(table.rows) == len({tuple(r.method.values()) for r in rows}) == len(set(table.columns))
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


def test_missing_categories_stand_in_their_lines():
    quoted = row(measured_by="quoted", url="https://example.org", decimals=2)
    suite = Suite(dataset="MT-Bench", categories=("math", "stem"))
    whole = row(measured_by="quoted", url="https://example.org", category="", value=2.6, decimals=2)
    table = table_of([Acceptance(head="h", suites=(suite,), rows=(quoted, whole))], {"SPEED-Bench": ()})
    assert table is not None
    assert [(line.category, line.benchmark, line.cells) for line in table.lines] == [
        ("math", "MT-Bench", ("2.50",)),
        ("stem", "MT-Bench", ("not published",)),
        ("all", "MT-Bench", ("2.60",)),
        ("all", "SPEED-Bench", ("not published",)),
    ]
    measured = table_of([Acceptance(head="h", suites=(suite,), rows=(row(),))], {})
    assert measured is not None and measured.lines[1].cells == ("not measured",)


def test_an_interval_stands_beside_its_figure():
    table = table_of([head("h", row(interval=Interval(low=2.4, high=2.61, over="prompts", units=10)))], {})
    assert table is not None and table.lines[0].cells == ("2.500 [2.400, 2.610]",)


def test_nothing_known_and_nothing_looked_for_is_no_table():
    assert table_of([], {}) is None


def test_a_key_says_what_is_not_stated():
    text = describe(row(precision=None, averaging=None, measured_by="quoted", url="https://example.org"))
    assert "precision not stated" in text and "kind of mean not stated" in text
    assert "https://example.org" in text and "bonus token" in text


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
    own, said = {**FULL, "reasoning": None}[name], name.replace("_", " ")
    assert found.apart[0].reason == f"{said} {'not stated' if own is None else own} here, {changed} there"


@pytest.mark.parametrize("name", [name for name in METHOD if name not in ("metric", "measured_by", "reasoning")])
def test_what_neither_states_compares_with_nothing(name):
    quoted = {"measured_by": "quoted", "url": "https://example.org", name: None}
    found = compare([head("a", row(**quoted)), head("b", row(**quoted))])
    assert found.apart[0].reason == f"{name.replace('_', ' ')} not stated by either"


def test_three_heads_two_of_which_compare():
    found = compare([head("a", row()), head("b", row(value=2.7)), head("c", row(draft_tokens=4))])
    assert [[r and r.value for r in rows] for _, rows in found.tables[0].lines] == [[2.5, 2.7, None]]
    assert [apart.head for apart in found.apart] == ["c"]


@pytest.mark.parametrize("names", [["a"], ["a", "a"], ["a", "b", "a"]])
def test_one_head_is_nothing_to_compare(names):
    with pytest.raises(AcceptanceInvalid, match="nothing to compare"):
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
