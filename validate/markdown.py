"""A report for people, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import OutputFailed
from ..escape import code, markdown
from .html import to_html
from .numbers import Numbers, details, figures_in, plain, summary, verdict_line, verdict_words
from .report import REPORT, Finding, Report, portable

MARKDOWN, HTML = "report.md", "report.html"


def write_report(report: Report, folder: Path) -> None:
    """Write report.json, report.md and report.html into a folder, creating it if needed.

    They name no folder of this machine, since they are published with the head.

    Args:
        report: the findings and figures.
        folder: the folder.

    Raises:
        OutputFailed: the folder cannot be created or written to.
    """
    report = portable(report)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / REPORT).write_text(report.to_json(), encoding="utf-8")
        (folder / MARKDOWN).write_text(to_markdown(report), encoding="utf-8")
        (folder / HTML).write_text(to_html(report), encoding="utf-8")
    except OSError as fault:
        raise OutputFailed(
            f"the report cannot be written: {fault.strerror}", where=folder, fix="Choose another folder for --out."
        ) from fault


def to_markdown(report: Report) -> str:
    """Return report.md's text."""
    figures = report.figures
    lines = [f"# Validation of {markdown(report.subject)}", "", verdict_line(report), ""]
    if judged := report.verdicts:
        lines += [*table(("engine", "verdict"), [(one.engine, verdict_words(one)) for one in judged]), ""]
    engines = report.provenance.get("for")
    if isinstance(engines, list):
        lines += [
            f"Checked for {markdown(', '.join(map(str, engines)))} "
            f"({markdown(report.provenance.get('for_by', 'every engine'))}).",
            "",
        ]
    if draft := report.provenance.get("draft"):
        lines += [f"The head is {markdown(draft)}.", ""]
    if report.findings:
        lines += ["## Findings", "", *table(("severity", "rule", "where", "what", "fix", "seen in"), _rows(report)), ""]
    if figures.identical is not None:
        said = "identical to the source's" if figures.identical else "**not** identical to the source's"
        lines += ["## Weights", "", f"The weights are {said}.", ""]
    for part in (*summary(figures), *details(figures)):
        lines += _lines(part)
    lines += ["## Made with", ""]
    # Why for these engines stands above.
    about = {name: value for name, value in report.provenance.items() if name != "for_by"}
    lines += [f"- {markdown(name)}: {markdown(plain(value))}" for name, value in about.items()]
    lines += [f"- sha256 of {markdown(name)}: {code(digest)}" for name, digest in report.weights.items()]
    return "\n".join(lines) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return a Markdown table, line by line, with figures aligned right; the content of cells is escaped."""
    rows = list(rows)
    cells = [[markdown(cell) for cell in row] for row in (heads, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    rule = "".join("---:|" if right else "---|" for right in figures_in(rows) or [False] * len(heads))
    return [lines[0], f"|{rule}", *lines[1:]]


def _lines(part: Numbers) -> list[str]:
    grid = [*table(part.heads, part.rows), ""] if part.rows else []
    return [f"## {part.title}", "", *([markdown(part.note), ""] if part.note else []), *grid]


def _rows(report: Report) -> Iterable[Sequence[object]]:
    def row(finding: Finding) -> Sequence[object]:
        where = code(finding.where) if finding.where else ""
        return finding.severity, finding.rule, where, finding.message, finding.fix, finding.seen_in

    return map(row, report.findings)
