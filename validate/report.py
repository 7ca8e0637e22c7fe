"""One shape for what was found and measured: text, JSON and card are made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from ..errors import NotACheckpoint, ReportInvalid, Severity
from .figures import STRICT, Figures

REPORT = "report.json"


class Finding(BaseModel):
    """Something that is wrong, or that a user must know.

    Attributes:
        rule: its id, e.g. "K101".
        severity: "error" where an engine would fail or serve wrong numbers; "warning" where only the target
            or a user could decide; "note" for what a launch flag must supply.
        where: the tensor, key or file.
        message: what was found, one sentence with its figures.
        fix: what to do.
        engines: the engines concerned; empty for all.
        seen_in: the public thread that taught the rule.
    """

    model_config = STRICT

    rule: str
    severity: Severity
    where: str
    message: str
    fix: str
    engines: tuple[str, ...] = ()
    seen_in: str = ""


class Report(BaseModel):
    """The findings and figures about one folder; the schema of report.json.

    Attributes:
        subject: the folder that was validated, as named by the user.
        weights: sha256 of each weight file, so that a report is of these very bytes.
        config: sha256 of config.json, where it was on this machine; the same weights under another are another head.
        findings: worst first.
        figures: what was measured.
        provenance: what it was measured with: versions, target, prompts and their hash, seed, date.
    """

    model_config = STRICT

    schema_version: Literal[1] = Field(default=1, alias="schema")
    subject: str
    weights: dict[str, str] = {}
    config: str = ""
    findings: tuple[Finding, ...] = ()
    figures: Figures = Figures()
    provenance: dict[str, Any] = {}

    @property
    def clean(self) -> bool:
        """Whether nothing of severity "error" was found."""
        return not any(finding.severity == "error" for finding in self.findings)

    @property
    def warned(self) -> bool:
        """Whether something of severity "warning" was found."""
        return any(finding.severity == "warning" for finding in self.findings)

    def to_json(self) -> str:
        """Return report.json's text."""
        return self.model_dump_json(indent=1, by_alias=True) + "\n"


def report_file(path: Path) -> Path:
    """Return a report's file, where that or the folder that it was written into is named."""
    return path / REPORT if path.is_dir() else path


def read_report(file: Path) -> Report:
    """Read a report.json.

    Args:
        file: the file, or the folder that it was written into (kconv validate --out).

    Raises:
        NotACheckpoint: the file is missing.
        ReportInvalid: it cannot be read, or is not of the schema.
    """
    file = report_file(file)
    try:
        return Report.model_validate_json(file.read_bytes())
    except FileNotFoundError as fault:
        raise NotACheckpoint(
            f"there is no {file.name}", where=file.parent, fix=f"Run kconv validate ... --out {file.parent} first."
        ) from fault
    except (OSError, ValidationError) as fault:
        what = fault.errors()[0]["msg"] if isinstance(fault, ValidationError) else fault.strerror
        raise ReportInvalid(
            f"{file.name} cannot be taken: {what}",
            where=file,
            fix="Run kconv validate again.",
        ) from fault
