"""A report's figures as PNG. What belongs here: three charts and their captions; matplotlib is imported by need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OutputFailed
from .figures import AcceptanceFigures
from .report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Two that tell apart in print and to the colour-blind (Okabe and Ito), then two more for further drafters.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
DPI, PANEL = 110, (4.0, 3.0)
LEFT_OUT = "The plots are left out, as matplotlib is not installed: pip install 'kconv[plots]'."


def draw_plots(report: Report, folder: Path) -> list[str]:
    """Draw what a report's figures give, and return the lines of Markdown that show it.

    Args:
        report: the report.
        folder: where the PNGs go; made if it is not there.

    Returns:
        Nothing where nothing was measured; without matplotlib a line that says so.

    Raises:
        OutputFailed: the folder cannot be written to.
    """
    wanted = [(name, caption, draw) for name, caption, draw, has in PLOTS if has(report)]
    if not wanted:
        return []
    try:
        import matplotlib
    except ImportError:
        return ["## Plots", "", LEFT_OUT]
    lines = ["## Plots", ""]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Settings of the user's own matplotlibrc would make another picture on each machine.
        with matplotlib.rc_context(matplotlib.rcParamsDefault):
            for name, caption, draw in wanted:
                draw(report, folder / name)
                lines += [f"![{caption}]({name})", "", caption + ".", ""]
    except OSError as fault:
        raise OutputFailed(
            f"the plots cannot be written: {fault.strerror}", where=folder, fix="Give --out another folder."
        ) from fault
    return lines[:-1]


def _by_category(report: Report, file: Path) -> None:
    rows = report.figures.acceptance_by_category
    categories = list(dict.fromkeys(row.category for row in rows))
    with _panels(rows, file, wide=max(1.0, len(categories) / 6)) as panels:
        for axes, own in panels:
            for place, (drafter, bars) in enumerate(_by_drafter(own)):
                values = {row.category: row for row in bars}
                shown = [values[name] for name in categories if name in values]
                places = [categories.index(row.category) for row in shown]
                errors = [row.standard_error or 0.0 for row in shown]
                _bars(axes, places, [row.length for row in shown], errors, place, len(_by_drafter(own)), drafter)
            axes.set_xticks(range(len(categories)), [name or "none" for name in categories], rotation=30, ha="right")
            axes.set_ylim(1.0, None)
            axes.set_ylabel("acceptance length")


def _by_step(report: Report, file: Path) -> None:
    rows = report.figures.acceptance
    with _panels(rows, file) as panels:
        for axes, own in panels:
            for place, (drafter, [row]) in enumerate(_by_drafter(own)):
                steps = list(range(1, row.steps + 1))
                errors = [error or 0.0 for error in row.rate_errors] or [0.0] * row.steps
                axes.errorbar(
                    steps, row.rates, yerr=errors, label=drafter, color=COLOURS[place % len(COLOURS)], marker="o",
                    capsize=3, linestyle="-" if place == 0 else "--",
                )  # fmt: skip
            axes.set_xticks(range(1, own[0].steps + 1))
            axes.set_xlabel("draft step")
            axes.set_ylim(0.0, 1.0)
            axes.set_ylabel("accepted up to here")


def _by_part(report: Report, file: Path) -> None:
    rows = report.figures.parts
    parts = list(dict.fromkeys(row.part for row in rows))
    kinds = list(dict.fromkeys(row.text for row in rows))
    from matplotlib.figure import Figure

    figure = Figure(figsize=PANEL, dpi=DPI, layout="constrained")
    axes = figure.subplots()
    for place, kind in enumerate(kinds):
        values = {row.part: row.rms_error for row in rows if row.text == kind}
        shown = [part for part in parts if part in values]
        places, heights = [parts.index(part) for part in shown], [values[part] for part in shown]
        _bars(axes, places, heights, None, place, len(kinds), kind)
    axes.set_xticks(range(len(parts)), parts)
    # Linear around zero: a part that is bit for bit the source's stands there.
    axes.set_yscale("symlog", linthresh=min(row.rms_error for row in rows if row.rms_error > 0))
    axes.set_ylim(0.0, None)
    axes.set_ylabel("RMS error, relative")
    figure.legend(loc="outside lower center", ncols=len(kinds), fontsize=8)
    figure.savefig(file, metadata={"Software": None})


class _panels:
    """A figure with one panel for each kind of text, saved when the last is drawn."""

    def __init__(self, rows: Sequence[AcceptanceFigures], file: Path, *, wide: float = 1.0) -> None:
        from matplotlib.figure import Figure

        kinds = list(dict.fromkeys(row.text for row in rows))
        self._file = file
        self._figure = Figure(figsize=(PANEL[0] * wide * len(kinds), PANEL[1]), dpi=DPI, layout="constrained")
        axes = self._figure.subplots(1, len(kinds), squeeze=False)[0]
        self._panels = [(own, [row for row in rows if row.text == kind]) for own, kind in zip(axes, kinds, strict=True)]
        for own, kind in zip(axes, kinds, strict=True):
            own.set_title(f"{kind} text", fontsize=10)
            own.grid(axis="y", alpha=0.3)

    def __enter__(self) -> Iterator[tuple[Axes, list[AcceptanceFigures]]]:
        return iter(self._panels)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            handles, labels = self._panels[0][0].get_legend_handles_labels()
            self._figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
            self._figure.savefig(self._file, metadata={"Software": None})


def _by_drafter(rows: Sequence[AcceptanceFigures]) -> list[tuple[str, list[AcceptanceFigures]]]:
    names = dict.fromkeys(row.drafter for row in rows)
    return [(name, [row for row in rows if row.drafter == name]) for name in names]


def _bars(axes: Any, places: list[int], heights: list[float], errors: list[float] | None, n: int, of: int, label: str):
    width = 0.8 / of
    axes.bar(
        [place - 0.4 + (n + 0.5) * width for place in places], heights, width, yerr=errors, label=label,
        color=COLOURS[n % len(COLOURS)], error_kw={"capsize": 2, "linewidth": 1},
    )  # fmt: skip


Draw = Callable[[Report, Path], None]
# File, caption, how it is drawn, and whether a report has what it takes.
PLOTS: tuple[tuple[str, str, Draw, Callable[[Report], bool]], ...] = (
    (
        "acceptance-by-category.png",
        "Acceptance length by category, bonus token included, with standard errors over sequences",
        _by_category,
        lambda report: bool(report.figures.acceptance_by_category),
    ),
    (
        "acceptance-by-step.png",
        "Share of drafts accepted up to each step, with standard errors over sequences",
        _by_step,
        lambda report: bool(report.figures.acceptance),
    ),
    (
        "error-by-part.png",
        "RMS error of each part of the head on the source's own inputs, relative to the source's output",
        _by_part,
        lambda report: any(row.rms_error > 0 for row in report.figures.parts),
    ),
)
