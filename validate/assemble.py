"""A report put together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING

from ..checkpoint.bytes import file_digest
from ..checkpoint.folder import Checkpoint
from ..convert.read import Head
from .figures import Figures
from .report import Finding, Report

if TYPE_CHECKING:
    from .measure import Measured


def digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the sha256 of each weight file, by its name."""
    return {file.name: file_digest(file) for file in checkpoint.files}


def make_report(head: Head, findings: Sequence[Finding], figures: Figures, provenance: Mapping[str, object]) -> Report:
    """Return the report on a head: findings worst first, and the digests of the weights they are about."""
    about = head.checkpoint
    return assemble(about.source, digests(about), findings, figures, provenance, config_digest(about))


def config_digest(checkpoint: Checkpoint) -> str:
    """Return the sha256 of a checkpoint's config.json; empty where it is not on this machine."""
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
    """Return a report: findings worst first, and what it was made with.

    Args:
        subject: what was validated, as the user named it.
        weights: sha256 of each weight file, by its name.
        findings: in any order.
        figures: what was measured.
        provenance: what it was measured with, beside the versions and the date.
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
    """Put what was measured on each text into the report's shape."""
    return Figures(
        identical=identical,
        texts=tuple(m.text for m in measured),
        acceptance=tuple(row for m in measured for row in m.acceptance),
        parity=tuple(m.parity for m in measured if m.parity),
        acceptance_by_category=tuple(row for m in measured for row in m.acceptance_by_category),
        parity_by_category=tuple(row for m in measured for row in m.parity_by_category),
        parts=tuple(row for m in measured for row in m.parts),
    )
