"""What was measured, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from .figures import EngineFigures, NoiseFigures, ParityFigures, PerplexityFigures
from .markdown import table
from .plots import draw_plots
from .report import Report

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
    if figures.noise or figures.perplexity:
        lines += ["## Quantization", "", *_quantization(figures.noise, figures.perplexity), ""]
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


def _quantization(noise: NoiseFigures | None, text: PerplexityFigures | None) -> list[str]:
    rows: list[tuple[str, str]] = []
    if noise:
        rows += [("tensors in NVFP4", f"{noise.tensors:,}")]
    if noise and noise.median is not None:
        rows += [
            ("signal over noise, median", f"{noise.median:.1f} dB"),
            ("at worst", f"{noise.worst:.1f} dB (`{noise.worst_tensor}`)"),
        ]
    if text:
        error = "" if text.log_ratio_se is None else f" ± {text.log_ratio_se:.2%}"
        rows += [
            ("perplexity on held-out text", f"{text.output:.4f}"),
            ("the source's", f"{text.source:.4f}"),
            ("difference", f"{math.expm1(text.log_ratio):+.2%}{error}"),
            ("same likeliest token", f"{text.top1:.2%} of {text.tokens:,} places in {text.prompts} texts"),
            ("activations", "not rounded: the weights alone were run, and no input_scale"),
        ]
    return table(("what", "figure"), rows)


def _places(counts: Sequence[int] | None) -> str:
    return "" if counts is None else " / ".join(map(str, counts))


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _difference(value: float, error: float | None) -> str:
    return f"{value:+.4f}" + ("" if error is None else f" ± {error:.4f}")
