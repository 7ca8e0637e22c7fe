"""A run drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..charts import COLOURS, INK, chart


def draw_curves(file: Path, history: Sequence[Mapping[str, Any]], steps: int) -> None:
    """Draw the loss of each logged step, and what the looks at unseen text found.

    Args:
        file: the PNG to write.
        history: the Trainer's log.
        steps: K, draft steps.

    Raises:
        ImportError: matplotlib, of kconv[plots], is not installed.
    """

    def series(key: str) -> tuple[list[int], list[float]]:
        rows = [row for row in history if key in row]
        return [row["step"] for row in rows], [row[key] for row in rows]

    with chart(file, panels=2, width=9.0) as (_, [left, right]):
        left.plot(*series("loss"), color=INK, linewidth=0.8, label="trained on")
        left.plot(*series("eval_loss"), color=COLOURS[0], marker="o", markersize=3, label="held out")
        left.set(xlabel="step", ylabel="loss, nats, over the draft steps")
        right.plot(*series("eval_acceptance"), color=COLOURS[0], marker="o", markersize=3, label="acceptance length")
        for k in range(1, steps + 1):
            colour = COLOURS[k % len(COLOURS)]
            right.plot(*series(f"eval_rate_{k}"), color=colour, linewidth=0.8, label=f"accepted up to place {k}")
        right.set(xlabel="step", ylabel=f"sampled, held out, K = {steps}")
        for axes in (left, right):
            axes.legend()
