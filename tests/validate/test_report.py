"""report.json read again: the file, the folder that it was written into, and what cannot be taken for one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kconv.errors import NotACheckpoint, ReportInvalid
from kconv.validate.markdown import table, write_report
from kconv.validate.numbers import figures_in
from kconv.validate.report import Finding, Report, read_report, report_file


def test_a_report_is_read_by_its_name_or_its_folders(tmp_path: Path):
    report = Report(subject="head", weights={"model.safetensors": "0" * 64})
    write_report(report, tmp_path / "report")
    assert read_report(tmp_path / "report" / "report.json") == read_report(tmp_path / "report") == report
    assert report_file(tmp_path / "report") == tmp_path / "report" / "report.json"
    assert report_file(tmp_path / "mine.json") == tmp_path / "mine.json"


def test_a_written_report_names_no_folder_of_this_machine(tmp_path: Path):
    about = {"source": str(tmp_path / "models/source"), "states": {"folder": str(tmp_path / "data/states")}}
    about |= {"target": "org/target@main", "url": f"https://host{tmp_path}/models/x", "note": "1/2 of them"}
    finding = Finding(
        rule="K101", severity="error", where=f"{tmp_path}/models/head/config.json: a", message="no", fix="f"
    )
    report = Report(subject=str(tmp_path / "models/head/"), provenance=about, findings=(finding,))
    write_report(report, tmp_path / "report")
    kept = read_report(tmp_path / "report")
    assert (kept.subject, kept.findings[0].where) == ("head", "head/config.json: a")
    assert kept.provenance == about | {"source": "source", "states": {"folder": "states"}}
    html, text = ((tmp_path / "report" / name).read_text() for name in ("report.html", "report.md"))
    assert str(tmp_path / "data") not in html + text and "<h1>Validation of <code>head</code></h1>" in html


def test_a_written_report_names_no_path_that_leads_out_of_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "a" / "source").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    said = {"source": "../a/source", "note": f"config:{tmp_path}/a/source/y", "half": "/a/b is 3 of /c"}
    report = Report(subject="../a/source", provenance=said | {"out": f"{tmp_path}/a/source"})
    write_report(report, tmp_path / "report")
    kept = read_report(tmp_path / "report")
    assert kept.subject == "source"
    assert kept.provenance == said | {"source": "source", "note": "config:source/y", "out": "source"}


def test_figures_stand_right_in_a_table():
    rows = [("math", "1.543", "2", "–"), ("all", "1.575 [1.472, 1.691]", "1,600", "+3.1 % ± 0.2")]
    assert figures_in(rows) == [False, True, True, True]
    assert table(("text", "length"), [("a", 1.5)])[1] == "|---|---:|"
    assert table(("text", "length"), [])[1] == "|---|---|"


def test_a_report_that_is_not_there_is_named(tmp_path: Path):
    for name in (tmp_path, tmp_path / "report.json"):
        with pytest.raises(NotACheckpoint, match=r"there is no report\.json"):
            read_report(name)


def test_a_report_that_cannot_be_taken_is_named(tmp_path: Path):
    (tmp_path / "report.json").write_text('{"schema": 7}')
    with pytest.raises(ReportInvalid, match="is not a valid kconv report") as fault:
        read_report(tmp_path)
    assert fault.value.where == str(tmp_path / "report.json")
    (tmp_path / "report.json").unlink()
    (tmp_path / "report.json").mkdir()
    with pytest.raises(ReportInvalid, match="not a regular file"):
        read_report(tmp_path)


def test_a_length_that_its_rates_do_not_give_is_refused(tmp_path: Path):
    row = {"drafter": "output", "text": "sampled", "steps": 3, "drafts": 100, "standard_error": 0.02, "note": ""}
    for length, fits in ((2.84, True), (2.95, False)):
        shown = row | {"length": length, "rates": [0.9, 0.6, 0.34]}
        text = json.dumps({"schema": 1, "subject": "head", "figures": {"acceptance": [shown]}})
        (tmp_path / "report.json").write_text(text)
        if fits:
            assert read_report(tmp_path).figures.acceptance[0].length == length
        else:
            with pytest.raises(ReportInvalid, match=r"the rates give 2\.840 tokens, not 2\.950"):
                read_report(tmp_path)


def test_a_report_is_neither_true_nor_false():
    with pytest.raises(TypeError, match="its outcome is 'pass'"):
        bool(Report(subject="head"))
