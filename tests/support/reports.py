"""A report with every kind of figure; they are made up."""

from __future__ import annotations

from kconv.measure.figures import AcceptanceFigures, EngineFigures, Figures, ParityFigures, PartFigures, StepFigures
from kconv.validate.report import Report

KINDS = ("held-out", "sampled", "greedy")


def acceptance(kind, drafter: str, category: str = "") -> AcceptanceFigures:
    rates = (0.6, 0.3, 0.1) if drafter == "source" else (0.5, 0.2, 0.05)
    return AcceptanceFigures(
        drafter=drafter, text=kind, steps=3, drafts=100, length=1 + sum(rates), standard_error=0.05, rates=rates,
        note="", category=category, sequences=8, rate_errors=(0.02, 0.02, None),
    )  # fmt: skip


def parity(kind, category: str = "") -> ParityFigures:
    shared = {"relative_error": 0.1, "rms_error": 0.02, "kl": 0.003, "top1": 0.97}
    steps = tuple(StepFigures(step=n, **shared, rate_difference=-0.1 / n, rate_difference_se=0.01) for n in (1, 2, 3))
    return ParityFigures(
        text=kind, steps=3, **shared, length_difference=-0.25, length_difference_se=0.03, category=category,
        by_step=steps,
    )  # fmt: skip


ENGINE = EngineFigures(
    engine="vllm", url="", prompts=8, new_tokens=24, steps=3, same_output=7, reference="the same engine", drafts=90,
    accepted=120, per_position=(70, 40, 10), length=2.3333, expected_drafts=91, expected_per_position=(70, 39, 10),
    expected_length=2.3077,
)  # fmt: skip


def report(part_error: float = 0.01, **figures) -> Report:
    drafters = ("source", "output")
    full = {
        "acceptance": tuple(acceptance(kind, d) for kind in KINDS for d in drafters),
        "acceptance_by_category": tuple(
            acceptance(kind, d, c) for kind in KINDS for c in ("writing", "math") for d in drafters
        ),
        "parity": tuple(parity(kind) for kind in KINDS),
        "parity_by_category": tuple(parity(kind, c) for kind in KINDS for c in ("writing", "math")),
        "parts": tuple(
            PartFigures(part=part, text=kind, relative_error=error, rms_error=error)
            for kind in KINDS
            for part, error in (("fc", 0.0), ("attention", part_error), ("mlp", part_error / 10))
        ),
        "engine": ENGINE,
    }
    return Report(subject="head", figures=Figures(**(full | figures)))
