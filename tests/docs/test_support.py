"""The matrix of support: each run that it claims is there to be repeated, and each class that it names has its code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs_parts.support import CODE, FORMS, RUN, RUNS, UNKNOWN, cell, model_types

from kconv.engines.registry import engines
from kconv.validate.rules.table import all_rules

ROOT = Path(__file__).parent.parent.parent

PINNED = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/blob/(v[\d.]+|[0-9a-f]{40})/\S+\.py(#L\d+(-L\d+)?)?")


@pytest.mark.parametrize("claim", RUNS, ids=map(", ".join, RUNS))
def test_what_is_said_to_be_run_is_run_by_a_test_or_recorded(claim):
    file, words = RUNS[claim]
    assert words in (ROOT / file).read_text()
    engine, form, target = claim
    assert cell(next(one for one in engines() if one.name == engine), form, target) == RUN


def test_every_cell_is_a_run_or_code_or_a_rule_that_there_is():
    for one in engines():
        assert one.captures
        for kind in model_types():
            cells = [cell(one, name, kind) for name in FORMS]
            assert set(cells) - {RUN, CODE, UNKNOWN} <= all_rules().keys()
            assert (CODE in cells or RUN in cells) is (one.capture(kind) is not None)


def test_each_class_of_a_target_has_its_code_at_a_tag_or_a_commit():
    for one in engines():
        kinds = [kind for capture in one.captures for kind in capture.model_types]
        assert len(kinds) == len(set(kinds)), one.name
        assert all(PINNED.fullmatch(capture.source) for capture in one.captures)
