"""A run drawn. What belongs here: loss and acceptance over its steps, as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_curves(file: Path, history: Sequence[Mapping[str, Any]], steps: int) -> None:
    """Draw the loss of each logged step, and what the looks at unseen text found.

    Args:
        file: the PNG to write.
        history: the Trainer's log.
        steps: K, draft steps.

    Raises:
        ImportError: matplotlib, of kconv[plots], is not installed.
    """
    from matplotlib.figure import Figure

    def series(key: str) -> tuple[list[int], list[float]]:
        rows = [row for row in history if key in row]
        return [row["step"] for row in rows], [row[key] for row in rows]

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(*series("loss"), color="#9aa5b1", linewidth=0.8, label="trained on")
    left.plot(*series("eval_loss"), color="#1f6feb", marker="o", markersize=3, label="held out")
    left.set(xlabel="step", ylabel="loss, nats, over the draft steps")
    right.plot(*series("eval_acceptance"), color="#1f6feb", marker="o", markersize=3, label="acceptance length")
    for k in range(1, steps + 1):
        right.plot(*series(f"eval_rate_{k}"), linewidth=0.8, label=f"accepted up to place {k}")
    right.set(xlabel="step", ylabel=f"sampled, held out, K = {steps}")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, frameon=False)
    figure.savefig(file, dpi=130)
