"""report.json read again: the file, the folder that it was written into, and what cannot be taken for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kconv.errors import NotACheckpoint, ReportInvalid
from kconv.validate.markdown import write_report
from kconv.validate.report import Report, read_report, report_file


def test_a_report_is_read_by_its_name_or_its_folders(tmp_path: Path):
    report = Report(subject="head", weights={"model.safetensors": "0" * 64})
    write_report(report, tmp_path / "report")
    assert read_report(tmp_path / "report" / "report.json") == read_report(tmp_path / "report") == report
    assert report_file(tmp_path / "report") == tmp_path / "report" / "report.json"
    assert report_file(tmp_path / "mine.json") == tmp_path / "mine.json"


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
