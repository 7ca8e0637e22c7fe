"""A report for people, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import OutputFailed
from ..escape import code, markdown
from .figures import AcceptanceFigures, EngineFigures, NoiseFigures, ParityFigures, PerplexityFigures
from .plots import draw_plots
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
    lines = [f"# Validation of {markdown(report.subject)}", "", _verdict(report), ""]
    engines = report.provenance.get("for")
    if isinstance(engines, list):
        lines += [
            f"Checked for {markdown(', '.join(map(str, engines)))} "
            f"({markdown(report.provenance.get('for_by', 'asked'))}).",
            "",
        ]
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
    lines += [f"- {markdown(name)}: {markdown(value)}" for name, value in report.provenance.items()]
    lines += [f"- sha256 of {markdown(name)}: {code(digest)}" for name, digest in report.weights.items()]
    return "\n".join(lines) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return a Markdown table, line by line; what a cell holds is text and no Markdown of its own."""
    cells = [[markdown(cell) for cell in row] for row in (heads, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], "|" + "---|" * len(heads), *lines[1:]]


def _verdict(report: Report) -> str:
    counts = {s: sum(f.severity == s for f in report.findings) for s in ("error", "warning", "note")}
    said = ", ".join(f"{count} {severity}{'s' * (count != 1)}" for severity, count in counts.items())
    return f"**{'No errors' if report.clean else 'Not to be served'}**: {said}."


def _rows(report: Report) -> Iterable[Sequence[object]]:
    def row(finding: Finding) -> Sequence[object]:
        where = code(finding.where) if finding.where else ""
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


NO_PART_DIFFERS = "Each part of the head gives the very numbers of the source's."


def illustrate(report: Report, folder: Path) -> list[str]:
    """Return the lines that report.md has beyond its summary, and draw its plots into a folder.

    Raises:
        OutputFailed: the folder cannot be written to.
    """
    figures = report.figures
    lines: list[str] = []
    if figures.acceptance_by_category:
        heads = ("category", "text", "drafter", "sequences", "acceptance length", "standard error")
        rows = [
            (r.category or "none", r.text, r.drafter, r.sequences, f"{r.length:.4f}", _error(r.standard_error))
            for r in figures.acceptance_by_category
        ]
        lines += ["## Acceptance by category", "", *table(heads, rows), ""]
    if figures.parity_by_category:
        lines += ["## Parity by category", "", *_parity_by_category(figures.parity_by_category), ""]
    if any(row.by_step for row in figures.parity):
        heads = ("text", "step", "RMS of logits", "largest", "KL, nats", "same likeliest token", "accepted up to here")
        rows = [
            (
                row.text,
                step.step,
                f"{step.rms_error:.1e}",
                f"{step.relative_error:.1e}",
                f"{step.kl:.1e}",
                f"{step.top1:.2%}",
                _difference(step.rate_difference, step.rate_difference_se),
            )
            for row in figures.parity
            for step in row.by_step
        ]
        lines += ["## Parity by draft step", "", *table(heads, rows), ""]
    if figures.parts:
        lines += ["## Error by part", ""]
        if any(row.rms_error > 0 for row in figures.parts):
            rows = [(r.part, r.text, f"{r.rms_error:.1e}", f"{r.relative_error:.1e}") for r in figures.parts]
            lines += [*table(("part", "text", "RMS", "largest"), rows), ""]
        else:
            lines += [NO_PART_DIFFERS, ""]
    if figures.engine:
        lines += ["## Engine", "", *_engine(figures.engine), ""]
    if figures.noise or figures.perplexity:
        lines += ["## Quantization", "", *_quantization(figures.noise, figures.perplexity), ""]
    lines += draw_plots(report, folder)
    return lines[:-1] if lines and not lines[-1] else lines


def _parity_by_category(rows: Sequence[ParityFigures]) -> list[str]:
    heads = ("category", "text", "RMS of logits", "KL, nats", "same likeliest token", "acceptance length")
    return table(
        heads,
        [
            (
                row.category or "none",
                row.text,
                f"{row.rms_error:.1e}",
                f"{row.kl:.1e}",
                f"{row.top1:.2%}",
                _difference(row.length_difference, row.length_difference_se),
            )
            for row in rows
        ],
    )


def _engine(found: EngineFigures) -> list[str]:
    by = found.url or "started for this"
    rows = [
        (found.engine, found.drafts, _places(found.per_position) or f"{found.accepted} in all", f"{found.length:.4f}"),
        (
            "kconv's chain",
            found.expected_drafts,
            _places(found.expected_per_position),
            f"{found.expected_length:.4f}",
        ),
    ]
    return [
        f"{found.engine} ({by}), {found.prompts} prompts continued greedily by {found.new_tokens} tokens, "
        f"K={found.steps}: {found.same_output} of {found.prompts} outputs equal those of {found.reference}.",
        "",
        *table(("who", "drafts", "accepted up to each place", "acceptance length"), rows),
    ]


def _quantization(noise: NoiseFigures | None, text: PerplexityFigures | None) -> list[str]:
    rows: list[tuple[str, str]] = []
    if noise:
        rows += [("tensors in NVFP4", f"{noise.tensors:,}")]
    if noise and noise.median is not None:
        rows += [
            ("signal over noise, median", f"{noise.median:.1f} dB"),
            ("at worst", f"{noise.worst:.1f} dB ({code(noise.worst_tensor)})"),
        ]
    if text:
        error = "" if text.log_ratio_se is None else f" ± {text.log_ratio_se:.2%}"
        rows += [
            ("perplexity on held-out text", f"{text.output:.4f}"),
            ("the source's", f"{text.source:.4f}"),
            ("difference", f"{math.expm1(text.log_ratio):+.2%}{error}"),
            ("same likeliest token", f"{text.top1:.2%} of {text.tokens:,} places in {text.prompts} texts"),
            ("activations", "inputs of NVFP4 linears rounded by their input_scale, as an engine rounds them"),
        ]
    return table(("what", "figure"), rows)


def _places(counts: Sequence[int] | None) -> str:
    return "" if counts is None else " / ".join(map(str, counts))


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _difference(value: float, error: float | None) -> str:
    return f"{value:+.4f}" + ("" if error is None else f" ± {error:.4f}")
