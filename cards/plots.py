"""Bar charts of acceptance, as PNG. What belongs here: how they look."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import MissingExtra

# Told apart by those who see few colours, and light enough for black figures on them.
COLOURS = ("#8ecae6", "#ffb703", "#95d5b2", "#cdb4db", "#f4a261", "#adb5bd")
INK, GRID = "#222222", "#dddddd"


def draw_bars(
    file: Path,
    title: str,
    labels: Sequence[str],
    series: Sequence[tuple[str, Sequence[float | None]]],
    top: float | None,
) -> None:
    """Draw a group of bars for each label.

    Args:
        file: the PNG to write.
        title: what is shown.
        labels: of the groups.
        series: a name and a value for each label, None where there is none.
        top: where the axis ends; K + 1 for acceptance lengths.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as fault:
        raise MissingExtra(
            "drawing a chart takes matplotlib", fix="pip install 'kconv[plots]', or add --no-chart."
        ) from fault
    width = 0.8 / len(series)
    figure = Figure(figsize=(max(6.0, 0.45 * len(labels) * len(series) + 2.0), 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (name, values) in enumerate(series):
        places = [at + (number - (len(series) - 1) / 2) * width for at, v in enumerate(values) if v is not None]
        heights = [value for value in values if value is not None]
        bars = axes.bar(places, heights, 0.92 * width, label=name, color=COLOURS[number % len(COLOURS)])
        axes.bar_label(bars, fmt="%.2f", fontsize=7, color=INK, padding=2)
    slanted = {"rotation": 30, "ha": "right"} if len(labels) > 4 else {}
    axes.set_xticks(range(len(labels)), labels, **slanted)
    axes.set_ylabel("tokens per verify step", color=INK)
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.set_ylim(1.0, top)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    if len(series) > 1:
        axes.legend(fontsize=7, frameon=False, ncols=min(3, len(series)), loc="lower left", bbox_to_anchor=(0, -0.45))
    # Neither the date nor the version: the same figures make the same file.
    figure.savefig(file, metadata={"Software": None})
