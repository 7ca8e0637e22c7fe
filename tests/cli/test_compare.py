"""`kconv compare`: tables of what compares, reasons for what does not, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kconv.cli import main

DOCS = Path(__file__).parent.parent.parent / "docs" / "cards"
FIGURE = {
    "metric": "al_incl_bonus", "value": 2.5, "draft_tokens": 3, "tree": "chain", "averaging": "macro_request",
    "engine": "vllm", "engine_version": "0.32.0", "target": "t", "precision": "NVFP4", "temperature": 0.0,
    "dataset": "MT-Bench", "revision": "a", "prompts": 80, "max_tokens": 1024, "date": "2026-11-21",
    "measured_by": "self",
}  # fmt: skip


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compare", *map(str, arguments)])


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    written = []
    for name, value, more in (("mla", 2.5, []), ("gqa", 2.7, [FIGURE | {"dataset": "GSM8K"}])):
        written.append(tmp_path / f"{name}.json")
        written[-1].write_text(json.dumps({"head": name, "rows": [FIGURE | {"value": value}, *more]}))
    return written


def test_heads_stand_side_by_side(files, tmp_path):
    result = run(*files, "--chart", tmp_path / "heads.png")
    assert result.exit_code == 0
    [line] = [line.split() for line in result.stdout.splitlines() if line.strip().startswith("MT-Bench")]
    assert line == ["MT-Bench", "2.500", "2.700"]
    assert "no other head has a figure on GSM8K" in " ".join(result.stdout.split())
    assert (tmp_path / "heads.png").read_bytes()[:4] == b"\x89PNG"


def test_as_json(files):
    found = json.loads(run(*files, "--json").stdout)
    assert found["heads"] == ["mla", "gqa"]
    assert found["tables"][0]["lines"] == [{"about": "MT-Bench", "figures": [2.5, 2.7]}]
    assert [apart["about"] for apart in found["incomparable"]] == ["GSM8K"]


def test_published_tables_do_not_compare_and_the_reasons_are_told():
    files = [DOCS / name / "acceptance.json" for name in ("kimi-k2.6-eagle3", "kimi-k2.6-eagle3-mla")]
    result = run(*files, "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and not found["tables"]
    figures = sum(len(json.loads(file.read_text())["rows"]) for file in files)
    assert len(found["incomparable"]) == figures and all(apart["reason"] for apart in found["incomparable"])


@pytest.mark.parametrize("count", [0, 1])
def test_one_file_is_misuse(files, count):
    assert run(*files[:count]).exit_code == 2


def test_the_same_head_twice_is_named(files):
    result = run(files[0], files[0])
    assert result.exit_code == 1 and "at least two heads" in result.stderr


def test_a_chart_is_not_overwritten(files, tmp_path):
    (tmp_path / "heads.png").write_text("mine")
    assert run(*files, "--chart", tmp_path / "heads.png").exit_code == 1
    assert (tmp_path / "heads.png").read_text() == "mine"
