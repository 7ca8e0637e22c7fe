"""The tables of a report: what was measured, and nothing else."""

from __future__ import annotations

from support.releases import ENGINE, report

from kconv.validate.html import to_html
from kconv.validate.markdown import to_markdown
from kconv.validate.numbers import NO_PART_DIFFERS
from kconv.validate.report import Report


def test_the_tables_say_what_was_measured():
    text = to_markdown(report())
    assert "| writing | sampled | source | 8 | 2.0000 | 0.0500 |" in text
    assert "| math | greedy | 2.0e-02 | 3.0e-03 | 97.00% | -0.2500 ± 0.0300 |" in text
    assert "| held-out | 2 | 2.0e-02 | 1.0e-01 | 3.0e-03 | 97.00% | -0.0500 ± 0.0100 |" in text
    assert "| attention | greedy | 1.0e-02 | 1.0e-02 |" in text
    assert "| vllm | 90 | 70 / 40 / 10 | 2.3333 |" in text
    assert "| kconv's chain | 91 | 70 / 39 / 10 | 2.3077 |" in text
    assert "7 of 8 outputs equal those of the same engine." in text


def test_an_engine_that_counts_no_places_says_how_many_it_accepted():
    engine = ENGINE.model_copy(update={"engine": "trtllm", "per_position": None, "url": "http://there:1"})
    text = to_markdown(report(engine=engine))
    assert "| trtllm | 90 | 120 in all | 2.3333 |" in text
    assert "trtllm (http://there:1), 8 prompts" in text


def test_how_far_drafts_are_accepted_stands_in_both_reports():
    made = report()
    row = made.figures.acceptance[0]
    short = row.model_copy(update={"drafter": "short", "steps": 1, "rates": (0.815,), "rate_errors": ()})
    made = made.model_copy(update={"figures": made.figures.model_copy(update={"acceptance": (row, short)})})
    cells = [row.drafter, row.text, *(f"{rate:.1%}" for rate in row.rates)]
    text = to_markdown(made)
    assert f"| {' | '.join(cells)} |" in text and f"| short | {row.text} | 81.5% |{'  |' * (row.steps - 1)}" in text
    assert all(f">{cell}</td>" in to_html(made) for cell in [*cells, "81.5%"])


def test_parts_that_are_the_sources_own_need_no_table():
    text = to_markdown(report(part_error=0.0))
    assert NO_PART_DIFFERS in text and "| attention | greedy" not in text


def test_nothing_measured_shows_nothing():
    assert [line for line in to_markdown(Report(subject="head")).splitlines() if line.startswith("## ")] == [
        "## Made with"
    ]
