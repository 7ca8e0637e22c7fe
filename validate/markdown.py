"""A report for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import OutputFailed
from .figures import AcceptanceFigures, ParityFigures
from .report import REPORT, Finding, Report

MARKDOWN = "report.md"


def write_report(report: Report, folder: Path, *, more: Sequence[str] = ()) -> None:
    """Write report.json and report.md into a folder, which is made if it is not there.

    Args:
        report: what was found and measured.
        folder: where; reports that are there already are replaced.
        more: lines to be added to report.md, e.g. its plots.

    Raises:
        OutputFailed: the folder cannot be made, or not written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / REPORT).write_text(report.to_json(), encoding="utf-8")
        (folder / MARKDOWN).write_text(to_markdown(report, more=more), encoding="utf-8")
    except OSError as fault:
        raise OutputFailed(
            f"the report cannot be written: {fault.strerror}", where=folder, fix="Give --out another folder."
        ) from fault


def to_markdown(report: Report, *, more: Sequence[str] = ()) -> str:
    """Return report.md's text."""
    figures = report.figures
    lines = [f"# Validation of {report.subject}", "", _verdict(report), ""]
    engines = report.provenance.get("for")
    if isinstance(engines, list):
        lines += [f"Checked for {', '.join(map(str, engines))} ({report.provenance.get('for_by', 'asked')}).", ""]
    if report.findings:
        lines += ["## Findings", "", *table(("severity", "rule", "where", "what", "fix", "seen in"), _rows(report)), ""]
    if figures.identical is not None:
        said = "identical to the source's" if figures.identical else "**not** the source's"
        lines += ["## Weights", "", f"The weights are {said}.", ""]
    if figures.acceptance:
        heads = ("drafter", "text", "K", "acceptance length", "standard error", "positions")
        lines += ["## Acceptance", "", "The bonus token is included.", ""]
        lines += [*table(heads, map(_acceptance, figures.acceptance)), ""]
    if figures.parity:
        heads = ("text", "RMS of logits", "largest", "KL, nats", "same likeliest token", "acceptance length")
        lines += ["## Parity with the source", "", *table(heads, map(_parity, figures.parity)), ""]
    lines += [*more, *([""] if more else []), "## Made with", ""]
    lines += [f"- {name}: {value}" for name, value in report.provenance.items()]
    lines += [f"- sha256 of {name}: `{digest}`" for name, digest in report.weights.items()]
    return "\n".join(lines) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return a Markdown table, line by line; a bar in a cell is escaped."""
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in (heads, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], "|" + "---|" * len(heads), *lines[1:]]


def _verdict(report: Report) -> str:
    counts = {s: sum(f.severity == s for f in report.findings) for s in ("error", "warning", "note")}
    said = ", ".join(f"{count} {severity}{'s' * (count != 1)}" for severity, count in counts.items())
    return f"**{'No errors' if report.clean else 'Not to be served'}**: {said}."


def _rows(report: Report) -> Iterable[Sequence[object]]:
    def row(finding: Finding) -> Sequence[object]:
        where = f"`{finding.where}`" if finding.where else ""
        return finding.severity, finding.rule, where, finding.message, finding.fix, finding.seen_in

    return map(row, report.findings)


def _acceptance(row: AcceptanceFigures) -> Sequence[object]:
    error = "" if row.standard_error is None else f"{row.standard_error:.4f}"
    return row.drafter, row.text, row.steps, f"{row.length:.4f}", error, row.drafts


def _parity(row: ParityFigures) -> Sequence[object]:
    lengths = f"{row.length_difference:+.4f}"
    if row.length_difference_se is not None:
        lengths += f" ± {row.length_difference_se:.4f}"
    return row.text, f"{row.rms_error:.1e}", f"{row.relative_error:.1e}", f"{row.kl:.1e}", f"{row.top1:.2%}", lengths
