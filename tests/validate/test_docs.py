"""What is written of the rules and the report: that it is current, and that a report is of its schema."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError
from support.changes import drop
from support.faults import MLA_VLLM, Fault
from support.validated import validate

from kconv.checkpoint.source import Folder
from kconv.validate.report import Report
from kconv.validate.rules.table import all_rules

ROOT = Path(__file__).parent.parent.parent
SCHEMA = ROOT / "docs" / "report.schema.json"


@pytest.fixture
def report(tmp_path: Path) -> dict:
    folder = Fault("", "", MLA_VLLM, drop("fc.weight")).write(tmp_path / "head")
    return json.loads(validate(Folder(folder)).to_json())


def test_a_report_has_the_documented_keys(report):
    keys = ["schema", "subject", "weights", "config", "findings", "figures", "provenance", "verdicts"]
    assert list(report) == keys
    assert report["schema"] == 1
    (finding,) = [one for one in report["findings"] if one["rule"] == "K104"]
    assert list(finding) == ["rule", "severity", "where", "message", "fix", "engines", "seen_in", "needs"]
    assert finding["severity"] == "error" and finding["engines"] == ["vllm-v1", "vllm-v2"]


def test_the_schema_names_the_same_keys(report):
    schema = json.loads(SCHEMA.read_text())
    assert schema["properties"].keys() == report.keys()
    assert schema["additionalProperties"] is False and schema["properties"]["schema"]["const"] == 1
    finding = schema["$defs"]["Finding"]
    assert finding["properties"].keys() == report["findings"][0].keys()
    assert finding["properties"]["severity"]["enum"] == ["error", "undecided", "warning", "note"]
    assert schema["$defs"]["Figures"]["properties"].keys() == report["figures"].keys()
    assert schema["$defs"]["Verdict"]["properties"].keys() == report["verdicts"][0].keys()


def test_the_schema_says_what_each_key_of_a_finding_and_a_verdict_means():
    kinds = json.loads(SCHEMA.read_text())["$defs"]
    for kind in ("Finding", "Verdict"):
        assert all(len(key.get("description", "")) > 10 for key in kinds[kind]["properties"].values()), kind
    assert "empty for all" in kinds["Finding"]["properties"]["engines"]["description"]


@pytest.mark.parametrize("change", [{"schema": 2}, {"more": 1}, {"findings": [{"rule": "K101"}]}])
def test_another_schema_is_refused(report, change):
    with pytest.raises(ValidationError):
        Report.model_validate(report | change)


def test_the_page_explains_every_rule_and_no_other():
    text = (ROOT / "docs" / "reference" / "rules.md").read_text()
    assert set(re.findall(r"^### (K\d{3}) ", text, re.MULTILINE)) == all_rules().keys()
