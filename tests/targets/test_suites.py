"""Suites: what a named one holds, where it comes from, and what is refused."""

from __future__ import annotations

import hashlib
import io
import json
import sys
from dataclasses import replace

import pyarrow
import pytest
from pyarrow import parquet
from support.hub import hub

from kconv.errors import HubRefused, MissingExtra, SuiteInvalid
from kconv.targets.prompts import digest_prompts, read_prompts
from kconv.targets.suites import PLACEHOLDER, SUITES, load_suite

__all__ = ["hub"]


def lines(categories, each=2, turn="Say something."):
    return [
        {"question_id": f"{category}-{i}", "category": category, "turns": [f"{turn} {category} {i}", "Shorter."]}
        for category in categories
        for i in range(each)
    ]


def write(folder, rows):
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def as_parquet(rows) -> bytes:
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist([row | {"source": "x"} for row in rows]), buffer)
    return buffer.getvalue()


def test_speed_bench_of_a_file_is_told_by_its_categories_and_how_many_prompts_they_have(tmp_path):
    known = SUITES["speed-bench"]
    rows = lines(reversed(known.categories), each=80)
    assert load_suite(str(write(tmp_path, rows[:-1]))).dataset == "prompts.jsonl"
    file = write(tmp_path, rows)
    suite = load_suite(str(file))
    assert suite.dataset == known.dataset and suite.whole
    assert [category for category, _ in suite.groups] == list(known.categories)
    assert suite.revision == f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
    assert all(len(prompt.turns) == 2 for prompt in suite.prompts)


def test_mt_bench_of_a_file_is_told_by_its_very_prompts(tmp_path, monkeypatch):
    known = SUITES["mt-bench"]
    rows = lines(known.categories, each=10)
    file = write(tmp_path, rows)
    assert load_suite(str(file)).dataset == "prompts.jsonl", "as many of the same categories, and other prompts"
    digest = digest_prompts(read_prompts(file))
    monkeypatch.setitem(SUITES, "mt-bench", replace(known, digest=digest))
    suite = load_suite(str(write(tmp_path, rows[::-1])))
    assert suite.dataset == "MT-Bench" and suite.whole and suite.digest == digest
    assert [category for category, _ in suite.groups] == list(known.categories)
    rows[3]["turns"][1] += " Please."
    assert load_suite(str(write(tmp_path, rows))).dataset == "prompts.jsonl"


def test_any_other_file_is_named_by_its_name(tmp_path):
    suite = load_suite(str(write(tmp_path, lines(["b", "a"]))), categories=("a",), limit=1)
    assert suite.dataset == "prompts.jsonl" and not suite.whole
    assert [(category, len(prompts)) for category, prompts in suite.groups] == [("a", 1)]


def test_a_missing_category_is_named(tmp_path):
    file = write(tmp_path, lines(["math", "coding"]))
    with pytest.raises(SuiteInvalid, match=r"no prompt of the category stem; its categories are math, coding"):
        load_suite(str(file), categories=("math", "stem"))


def test_placeholders_are_not_measured(tmp_path):
    file = write(tmp_path, [*lines(["math"]), *lines(["rag"], each=1, turn=f"{PLACEHOLDER} USING SPECDEC_BENCH")])
    with pytest.raises(SuiteInvalid, match="1 of 3 prompts are placeholders, rag-0"):
        load_suite(str(file))
    assert load_suite(str(file), categories=("math",)).dataset == "prompts.jsonl"


def test_a_file_has_no_revision(tmp_path):
    with pytest.raises(SuiteInvalid, match="no revision"):
        load_suite(str(write(tmp_path, lines(["a"]))), revision="main")


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(SuiteInvalid, match=r"there is no suite and no file nowhere\.jsonl") as fault:
        load_suite("nowhere.jsonl")
    assert fault.value.fix == "Use mt-bench, speed-bench, or a JSONL file of prompts."


def test_mt_bench_comes_from_the_hub_at_a_commit(hub):
    known = SUITES["mt-bench"]
    text = "".join(json.dumps(row) + "\n" for row in lines(known.categories))
    sha = hub.commit(f"datasets/{known.repo}", {known.file: text.encode()})
    suite = load_suite("mt-bench")
    assert suite.revision == sha and len(suite.prompts) == 16
    assert load_suite("mt-bench", revision=sha).digest == suite.digest


def test_speed_bench_comes_from_the_hub_at_the_pinned_commit(hub):
    known = SUITES["speed-bench"]
    repo = f"datasets/{known.repo}"
    sha = hub.commit(repo, {known.file: as_parquet(lines(known.categories, each=1))})
    hub.repos[repo].commits[known.revision] = hub.repos[repo].commits[sha]
    suite = load_suite("speed-bench")
    assert suite.revision == known.revision
    assert tuple(category for category, _ in suite.groups) == known.categories


def test_speed_bench_without_pyarrow_is_a_named_fault(hub, monkeypatch):
    known = SUITES["speed-bench"]
    repo = f"datasets/{known.repo}"
    sha = hub.commit(repo, {known.file: as_parquet(lines(known.categories, each=1))})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match="pyarrow"):
        load_suite("speed-bench", revision=sha)


def test_a_suite_that_the_hub_does_not_give_is_named(hub):
    with pytest.raises(HubRefused):
        load_suite("mt-bench")
