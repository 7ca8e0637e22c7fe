"""The one form of findings and figures, from which text, JSON and cards are made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, field_validator

from ..checkpoint.bytes import Look, Wanted, file_digest
from ..checkpoint.folder import Checkpoint
from ..checkpoint.schema import load_json
from ..convert.read import Head
from ..engines.registry import engines
from ..errors import NotACheckpoint, ReportInvalid, Severity
from .figures import STRICT, Figures

if TYPE_CHECKING:
    from .measure import Measured


REPORT = "report.json"
# In a report's provenance: why a rule without findings may not have been applied.
UNREAD = "unread"


class Finding(BaseModel):
    """A problem, or something that a user must know.

    Attributes:
        rule: its id, e.g. "K101".
        severity: "error" if an engine would fail or serve wrong numbers; "warning" if only the target or a user could
            decide; "note" for what a launch flag must supply.
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
        subject: the validated folder, as the user named it.
        weights: sha256 of each weight file; the report holds for these bytes only.
        config: sha256 of config.json, if it was on this machine.
        findings: worst first.
        figures: the measurements.
        provenance: how they were made: versions, target, prompts and their hash, seed, date.
    """

    model_config = STRICT

    schema_version: Literal[1] = Field(default=1, alias="schema")
    subject: str
    weights: dict[str, str] = {}
    config: str = ""
    findings: tuple[Finding, ...] = ()
    figures: Figures = Figures()
    provenance: dict[str, Any] = {}

    @field_validator("provenance")
    @classmethod
    def _names_engines(cls, value: dict[str, Any]) -> dict[str, Any]:
        # Publishing and verdicts look into this list: in a text, any substring would count as an engine.
        asked = value.get("for", [])
        if not isinstance(asked, list) or not all(isinstance(name, str) for name in asked):
            raise ValueError(f"for is {asked!r}, not a list of engines")
        return value

    @property
    def clean(self) -> bool:
        """Whether there is no finding of severity "error"."""
        return not any(finding.severity == "error" for finding in self.findings)

    @property
    def warned(self) -> bool:
        """Whether there is a finding of severity "warning"."""
        return any(finding.severity == "warning" for finding in self.findings)

    def to_json(self) -> str:
        """Return report.json's text."""
        return self.model_dump_json(indent=1, by_alias=True) + "\n"


@dataclass(frozen=True)
class Verdict:
    """A report's verdict about one engine.

    Attributes:
        title: the engine's, e.g. "vLLM".
        runners: its checked runners, e.g. vllm-v1.
        errors, warnings: how many findings concern it.
    """

    title: str
    runners: tuple[str, ...]
    errors: int
    warnings: int

    @property
    def passed(self) -> bool:
        """Whether no error concerns it."""
        return not self.errors

    def concerns(self, finding: Finding) -> bool:
        """Return whether a finding concerns it; a finding without engines concerns all."""
        return not finding.engines or not set(self.runners).isdisjoint(finding.engines)


def verdicts(report: Report) -> tuple[Verdict, ...]:
    """Return a verdict for each engine in a report; none if it names no engine."""
    asked = [str(name) for name in report.provenance.get("for", ())]
    titles = {name: engine.title for engine in engines() for name in engine.runner_names}
    found = []
    for title in dict.fromkeys(titles.get(name, name) for name in asked):
        about = Verdict(title, tuple(name for name in asked if titles.get(name, name) == title), 0, 0)
        severities = [finding.severity for finding in report.findings if about.concerns(finding)]
        found.append(replace(about, errors=severities.count("error"), warnings=severities.count("warning")))
    return tuple(found)


def report_file(path: Path) -> Path:
    """Return a report's path, from its own path or from its folder's."""
    return path / REPORT if path.is_dir() else path


def read_report(file: Path) -> Report:
    """Read a report.json.

    Args:
        file: the file, or its folder (kconv validate --out).

    Raises:
        NotACheckpoint: the file is missing.
        ReportInvalid: it cannot be read, or does not match the schema.
    """
    file = report_file(file)
    missing = NotACheckpoint(
        f"there is no {file.name}", where=file.parent, fix=f"Run kconv validate ... --out {file.parent} first."
    )
    return load_json(Report, file, ReportInvalid, what="kconv report", fix="Run kconv validate again.", missing=missing)


def digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the sha256 of each weight file, by its name."""
    with Look(Wanted(file, whole=True) for file in checkpoint.files) as look:
        return {file.name: look.sha256(file) for file in checkpoint.files}


def make_report(head: Head, findings: Sequence[Finding], figures: Figures, provenance: Mapping[str, object]) -> Report:
    """Return the report on a head: findings worst first, and the digests of its weights."""
    about = head.checkpoint
    return assemble(about.source, digests(about), findings, figures, provenance, config_digest(about))


def config_digest(checkpoint: Checkpoint) -> str:
    """Return the sha256 of a checkpoint's config.json; empty if it is not on this machine."""
    file = checkpoint.folder / "config.json"
    return file_digest(file) if file.is_file() else ""


def assemble(
    subject: str,
    weights: Mapping[str, str],
    findings: Iterable[Finding],
    figures: Figures,
    provenance: Mapping[str, object],
    config: str = "",
) -> Report:
    """Return a report: findings worst first, and the versions used.

    Args:
        subject: what was validated, as the user named it.
        weights: sha256 of each weight file, by its name.
        findings: in any order.
        figures: the measurements.
        provenance: how they were made, besides the versions and the date.
        config: sha256 of config.json.
    """
    worst_first = sorted(findings, key=lambda finding: ("error", "warning", "note").index(finding.severity))
    stamp = {"kconv": version("kconv"), "date": datetime.now(UTC).date().isoformat(), "torch": version("torch")}
    return Report(
        subject=subject,
        weights=dict(weights),
        config=config,
        findings=tuple(worst_first),
        figures=figures,
        provenance=stamp | dict(provenance),
    )


def figures(identical: bool | None, measured: Sequence[Measured]) -> Figures:
    """Put each text's measurements into the report's form."""
    return Figures(
        identical=identical,
        texts=tuple(m.text for m in measured),
        acceptance=tuple(row for m in measured for row in m.acceptance),
        parity=tuple(m.parity for m in measured if m.parity),
        acceptance_by_category=tuple(row for m in measured for row in m.acceptance_by_category),
        parity_by_category=tuple(row for m in measured for row in m.parity_by_category),
        parts=tuple(row for m in measured for row in m.parts),
    )
