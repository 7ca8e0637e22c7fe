"""What was measured, in Markdown. What belongs here: the tables of report.md by category, step, part and engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .markdown import table
from .plots import draw_plots
from .report import EngineFigures, ParityFigures, Report

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
        lines += ["## Parity by category", "", *_parity(figures.parity_by_category), ""]
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
    lines += draw_plots(report, folder)
    return lines[:-1] if lines and not lines[-1] else lines


def _parity(rows: Sequence[ParityFigures]) -> list[str]:
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


def _places(counts: Sequence[int] | None) -> str:
    return "" if counts is None else " / ".join(map(str, counts))


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _difference(value: float, error: float | None) -> str:
    return f"{value:+.4f}" + ("" if error is None else f" ± {error:.4f}")
