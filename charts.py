"""How charts look.

Charts are shown on white and on black: on a model's page, in a report, in these docs. So their background is
transparent, and their text and colors are neither light nor dark.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A contrast of at least 3 on both white and black, which WCAG 2.2 asks of graphics (1.4.11). The colors are close to
# those of Okabe and Ito, which people with color blindness can tell apart.
INK = "#808080"
COLOURS = ("#0082C8", "#C77700", "#009E73", "#CC79A7", "#8C7AE6", "#808080")
STYLE = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.3,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "font.size": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
}
DPI = 120


@contextmanager
def chart(
    file: Path, *, panels: int = 1, width: float = 6.0, height: float = 3.4, same_y: bool = False
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a figure of this size in inches and its panels, side by side, to draw into; write the PNG at the end.

    Raises:
        ImportError: matplotlib is not installed; it comes with kconv[plots].
        OSError: the file cannot be written.
    """
    import matplotlib
    from cycler import cycler
    from matplotlib.figure import Figure

    # The user's own matplotlibrc would change the picture from machine to machine.
    settings: dict[Any, Any] = {**matplotlib.rcParamsDefault, **STYLE, "axes.prop_cycle": cycler(color=COLOURS)}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
        yield figure, list(figure.subplots(1, panels, squeeze=False, sharey=same_y)[0])
        # No date and no version: the same figures make the same file.
        figure.savefig(file, metadata={"Software": None})
