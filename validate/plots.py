"""A report's figures as PNG files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..charts import INK, chart
from ..errors import OutputFailed
from ..measure.figures import AcceptanceFigures
from .report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL = 4.0, 3.2  # inches
# Reports are published, so this text contains no path of this installation.
LEFT_OUT = (
    "The plots are missing, because matplotlib is not installed. `kconv --version` prints the command to install it."
)


def draw_plots(report: Report, folder: Path) -> list[str]:
    """Draw a report's figures, and return the Markdown lines that show them.

    Args:
        report: the report.
        folder: the folder for the PNGs; created if needed.

    Returns:
        Nothing if nothing was measured; without matplotlib a line that says so.

    Raises:
        OutputFailed: the folder cannot be written to.
    """
    wanted = [(name, caption, draw) for name, caption, draw, has in PLOTS if has(report)]
    if not wanted:
        return []
    lines = ["## Plots", ""]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, caption, draw in wanted:
            draw(report, folder / name)
            lines += [f"![{caption}]({name})", "", caption + ".", ""]
    except ImportError:
        return ["## Plots", "", LEFT_OUT]
    except OSError as fault:
        raise OutputFailed(
            f"the plots cannot be written: {fault.strerror}", where=folder, fix="Choose another folder for --out."
        ) from fault
    return lines[:-1]


def _by_category(report: Report, file: Path) -> None:
    rows = report.figures.acceptance_by_category
    categories = list(dict.fromkeys(row.category for row in rows))
    kinds = _by_text(rows)
    width = PANEL[0] * max(1.0, len(categories) / 6) * len(kinds)
    with chart(file, panels=len(kinds), width=width, height=PANEL[1]) as (figure, panels):
        for axes, (kind, own) in zip(panels, kinds.items(), strict=True):
            drafters = _by_drafter(own)
            for place, (drafter, bars) in enumerate(drafters.items()):
                values = {row.category: row for row in bars}
                shown = [values[name] for name in categories if name in values]
                places = [categories.index(row.category) for row in shown]
                errors = [row.standard_error or 0.0 for row in shown]
                _bars(axes, places, [row.length for row in shown], errors, place, len(drafters), drafter)
            axes.set_xticks(range(len(categories)), [name or "none" for name in categories], rotation=30, ha="right")
            axes.set_ylim(1.0, None)
            axes.set(title=f"{kind} text", ylabel="acceptance length")
        _legend(figure, panels[0])


def _by_step(report: Report, file: Path) -> None:
    kinds = _by_text(report.figures.acceptance)
    with chart(file, panels=len(kinds), width=PANEL[0] * len(kinds), height=PANEL[1]) as (figure, panels):
        for axes, (kind, own) in zip(panels, kinds.items(), strict=True):
            for place, (drafter, [row]) in enumerate(_by_drafter(own).items()):
                steps = list(range(1, row.steps + 1))
                errors = [error or 0.0 for error in row.rate_errors] or [0.0] * row.steps
                axes.errorbar(
                    steps, row.rates, yerr=errors, label=drafter, marker="o", capsize=3,
                    linestyle="-" if place == 0 else "--",
                )  # fmt: skip
            axes.set_xticks(range(1, own[0].steps + 1))
            axes.set_ylim(0.0, 1.0)
            axes.set(title=f"{kind} text", xlabel="draft step", ylabel="accepted up to here")
        _legend(figure, panels[0])


def _by_part(report: Report, file: Path) -> None:
    rows = report.figures.parts
    parts = list(dict.fromkeys(row.part for row in rows))
    kinds = list(dict.fromkeys(row.text for row in rows))
    with chart(file, width=PANEL[0], height=PANEL[1]) as (figure, [axes]):
        for place, kind in enumerate(kinds):
            values = {row.part: row.rms_error for row in rows if row.text == kind}
            shown = [part for part in parts if part in values]
            places, heights = [parts.index(part) for part in shown], [values[part] for part in shown]
            _bars(axes, places, heights, None, place, len(kinds), kind)
        axes.set_xticks(range(len(parts)), parts)
        # Linear around zero, where bit-identical parts are.
        axes.set_yscale("symlog", linthresh=min(row.rms_error for row in rows if row.rms_error > 0))
        axes.set_ylim(0.0, None)
        axes.set_ylabel("RMS error, relative")
        _legend(figure, axes)


def _by_text(rows: Sequence[AcceptanceFigures]) -> dict[str, list[AcceptanceFigures]]:
    return {kind: [row for row in rows if row.text == kind] for kind in dict.fromkeys(row.text for row in rows)}


def _by_drafter(rows: Sequence[AcceptanceFigures]) -> dict[str, list[AcceptanceFigures]]:
    return {name: [row for row in rows if row.drafter == name] for name in dict.fromkeys(row.drafter for row in rows)}


def _bars(axes: Axes, places: list[int], heights: list[float], errors: list[float] | None, n: int, of: int, label: str):
    width = 0.8 / of
    axes.grid(False, axis="x")
    axes.bar(
        [place - 0.4 + (n + 0.5) * width for place in places], heights, width, yerr=errors, label=label,
        error_kw={"capsize": 2, "linewidth": 1, "ecolor": INK},
    )  # fmt: skip


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


Draw = Callable[[Report, Path], None]
# File, caption, drawing function, and whether a report has the data for it.
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
