"""Bar charts of acceptance, as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..charts import chart
from ..errors import MissingExtra


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
    width = 0.8 / len(series)
    try:
        with chart(file, width=max(6.0, 0.45 * len(labels) * len(series) + 2.0), height=3.6) as (figure, [axes]):
            for number, (name, values) in enumerate(series):
                places = [at + (number - (len(series) - 1) / 2) * width for at, v in enumerate(values) if v is not None]
                heights = [value for value in values if value is not None]
                bars = axes.bar(places, heights, 0.92 * width, label=name)
                axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
            slanted = {"rotation": 30, "ha": "right"} if len(labels) > 4 else {}
            axes.set_xticks(range(len(labels)), labels, **slanted)
            axes.set_ylabel("tokens per verify step")
            axes.set_title(title, loc="left")
            axes.set_ylim(1.0, top)
            axes.grid(False, axis="x")
            if len(series) > 1:
                figure.legend(loc="outside lower left", ncols=min(3, len(series)))
    except ImportError as fault:
        raise MissingExtra(
            "drawing a chart takes matplotlib", fix="pip install 'kconv[plots]', or add --no-chart."
        ) from fault
