"""A report's figures as sentences and tables of text, for Markdown, HTML and the terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..lines import counted
from ..measure.figures import (
    AcceptanceFigures,
    AccuracyFigures,
    EngineFigures,
    Figures,
    NoiseFigures,
    ParityFigures,
    PerplexityFigures,
)
from .report import SEVERITIES, STOPS, Report, Verdict

# A cell that is a figure: perhaps with an error, an interval, a unit or a few words in front.
FIGURE = re.compile(r"[-+−]?\d[\d.,]*(e[-+]?\d+)?( ?%)?( ± [\d.]+( ?%)?)?( \[.*\])?")
NO_FIGURE = ("", "–")

EXACT = "Bit-identical to the source, in every weight and every logit."
NO_PART_DIFFERS = "Each part of the head gives exactly the source's numbers."


@dataclass(frozen=True)
class Numbers:
    """A table of measurements.

    Attributes:
        title, note: shown above it; the note may be empty.
        heads, rows: the text of the cells; both empty if the note says everything.
    """

    title: str
    note: str = ""
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()

    @property
    def right(self) -> list[bool]:
        """Which columns hold figures, and are aligned right."""
        return figures_in(self.rows)


def figures_in(rows: Sequence[Sequence[object]]) -> list[bool]:
    """Return which columns of a table hold figures alone."""
    columns = ([str(cell) for cell in column if cell not in NO_FIGURE] for column in zip(*rows, strict=True))
    return [bool(column) and all(map(FIGURE.fullmatch, column)) for column in columns]


def summary(figures: Figures) -> Iterator[Numbers]:
    """Yield the figures that a reader looks for first: acceptance, parity with the source, what quantization costs."""
    if figures.noise or figures.perplexity:
        rows = _quantization(figures.noise, figures.perplexity)
        yield Numbers("Quantization", "", ("what", "figure"), rows)
    if figures.accuracy:
        heads = ("task", "few-shot", "metric", "questions", "accuracy", "the source's", "difference")
        note = f"By {figures.accuracy[0].harness}, which kconv does not run. Standard errors as if of other questions."
        yield Numbers("Accuracy", note, heads, [accuracy(row) for row in figures.accuracy])
    if figures.acceptance:
        heads = ("drafter", "text", "K", "acceptance length", "standard error", "positions")
        yield Numbers("Acceptance", "The bonus token is included.", heads, list(map(_acceptance, figures.acceptance)))
    if figures.parity:
        if is_exact(figures):
            yield Numbers("Parity with the source", EXACT)
            return
        heads = ("text", "RMS of logits", "largest", "KL, nats", "same likeliest token", "acceptance length")
        yield Numbers("Parity with the source", "", heads, list(map(_parity, figures.parity)))


def details(figures: Figures) -> Iterator[Numbers]:
    """Yield the other figures: by drafted token, category and part, in an engine."""
    if figures.acceptance:
        steps = max(row.steps for row in figures.acceptance)
        heads = ("drafter", "text", *(f"token {at}" for at in range(1, steps + 1)))
        rows = [(r.drafter, r.text, *(f"{rate:.1%}" for rate in r.rates), *[""] * (steps - len(r.rates)))
                for r in figures.acceptance]  # fmt: skip
        yield Numbers("Accepted up to each drafted token", "", heads, rows)
    if figures.acceptance_by_category:
        heads = ("category", "text", "drafter", "sequences", "acceptance length", "standard error")
        rows = [
            (r.category or "none", r.text, r.drafter, r.sequences, f"{r.length:.4f}", _error(r.standard_error))
            for r in figures.acceptance_by_category
        ]
        yield Numbers("Acceptance by category", "", heads, rows)
    if not is_exact(figures):
        yield from _differences(figures)
    if figures.engine:
        yield _engine(figures.engine)


def accuracy(row: AccuracyFigures) -> tuple[str, ...]:
    """Return the cells of a task: how it was measured, both accuracies and their difference."""
    shares = [
        f"{value:.2%}" + ("" if error is None else f" ± {error:.2%}")
        for value, error in ((row.output, row.output_error), (row.source, row.source_error))
    ]
    points = f"{100 * (row.output - row.source):+.2f}" + ("" if row.error is None else f" ± {100 * row.error:.2f}")
    return row.task, row.shots, row.metric, f"{row.questions:,}", *shares, f"{points} points"


def is_exact(figures: Figures) -> bool:
    """Return whether every weight is identical to the source's, and so is every figure measured for both."""
    return figures.identical is True and not any(row.rms_error for row in (*figures.parity, *figures.parts))


def _differences(figures: Figures) -> Iterator[Numbers]:
    if figures.parity_by_category:
        heads = ("category", "text", "RMS of logits", "KL, nats", "same likeliest token", "acceptance length")
        rows = [
            (
                row.category or "none",
                row.text,
                f"{row.rms_error:.1e}",
                f"{row.kl:.1e}",
                f"{row.top1:.2%}",
                _difference(row.length_difference, row.length_difference_se),
            )
            for row in figures.parity_by_category
        ]
        yield Numbers("Parity by category", "", heads, rows)
    if any(row.by_step for row in figures.parity):
        heads = (
            "text",
            "step",
            "RMS of logits",
            "largest",
            "KL, nats",
            "same most likely token",
            "accepted up to here",
        )
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
        yield Numbers("Parity by draft step", "", heads, rows)
    if figures.parts:
        if any(row.rms_error > 0 for row in figures.parts):
            rows = [(r.part, r.text, f"{r.rms_error:.1e}", f"{r.relative_error:.1e}") for r in figures.parts]
            yield Numbers("Error by part", "", ("part", "text", "RMS", "largest"), rows)
        else:
            yield Numbers("Error by part", NO_PART_DIFFERS)


def _engine(found: EngineFigures) -> Numbers:
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
    note = (
        f"{found.engine} ({by}), {found.prompts} prompts continued greedily by {found.new_tokens} tokens, "
        f"K={found.steps}: {found.same_output} of {found.prompts} outputs equal those of {found.reference}."
    )
    return Numbers("Engine", note, ("who", "drafts", "accepted up to each position", "acceptance length"), rows)


def _quantization(noise: NoiseFigures | None, text: PerplexityFigures | None) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    if noise:
        rows += [("tensors in NVFP4", f"{noise.tensors:,}")]
    if noise and noise.exact:
        rows += [("cast, without noise", f"{noise.exact:,}")]
    if noise and noise.median is not None:
        rows += [
            ("signal over noise, median", f"{noise.median:.1f} dB"),
            ("at worst", f"{noise.worst:.1f} dB ({noise.worst_tensor})"),
        ]
    if text:
        error = "" if text.log_ratio_se is None else f" ± {text.log_ratio_se:.2%}"
        rows += [
            ("perplexity on held-out text", f"{text.output:.4f}"),
            ("the source's", f"{text.source:.4f}"),
            ("difference", f"{math.expm1(text.log_ratio):+.2%}{error}"),
            ("same most likely token", f"{text.top1:.2%} of {text.tokens:,} positions in {text.prompts} texts"),
            ("activations", "rounded as an engine does, where a layer has an input_scale"),
        ]
    return rows


def verdict_words(verdict: Verdict) -> str:
    """Return a verdict in words, e.g. "FAIL: 1 error, 2 warnings"."""
    is_open = verdict.outcome == "undecided"
    found = [
        counted(verdict.errors, "error") if verdict.errors else "",
        f"needs {' and '.join(verdict.needs)}" if is_open else "",
        counted(verdict.undecided, "undecided") if verdict.undecided and not is_open else "",
        counted(verdict.warnings, "warning") if verdict.warnings else "",
    ]
    strict = " (strict)" if verdict.outcome == "fail" and not verdict.errors else ""
    said = ", ".join(filter(None, found))
    return verdict.outcome.upper() + strict + (f": {said}" if said else "")


def verdict_line(report: Report) -> str:
    """Return a report's result in one line."""
    counts = {severity: sum(f.severity == severity for f in report.findings) for severity in SEVERITIES}
    said = ", ".join(counted(count, what) for what, count in counts.items() if count or what not in STOPS)
    words, where = {"pass": ("No errors", ""), "fail": ("Do not serve it", "with"), "undecided": ("Undecided", "for")}[
        report.outcome
    ]
    own = [one.engine for one in report.verdicts if one.outcome == report.outcome]
    some = f" {where} {' or '.join(own)}" if where and len(own) < len(report.verdicts) else ""
    return f"**{words}{some}**: {said}."


def _acceptance(row: AcceptanceFigures) -> Sequence[object]:
    error = "" if row.standard_error is None else f"{row.standard_error:.4f}"
    return row.drafter, row.text, row.steps, f"{row.length:.4f}", error, row.drafts


def _parity(row: ParityFigures) -> Sequence[object]:
    lengths = f"{row.length_difference:+.4f}"
    if row.length_difference_se is not None:
        lengths += f" ± {row.length_difference_se:.4f}"
    return row.text, f"{row.rms_error:.1e}", f"{row.relative_error:.1e}", f"{row.kl:.1e}", f"{row.top1:.2%}", lengths


def _places(counts: Sequence[int] | None) -> str:
    return "" if counts is None else " / ".join(map(str, counts))


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _difference(value: float, error: float | None) -> str:
    return f"{value:+.4f}" + ("" if error is None else f" ± {error:.4f}")


WORDS = ((None, "none"), (True, "yes"), (False, "no"))


def plain(value: object) -> str:
    """Return a value of the provenance in readable form: names and values, no Python syntax."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {plain(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    return next((word for one, word in WORDS if value is one), str(value))
