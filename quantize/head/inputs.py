"""What a head's linears read along the drafting chain.

From the second draft step on a head reads its own output, so the scales are of all steps of the chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...convert.attention.calibration import STEPS, Calibration, Part, check_batches
from ...convert.attention.trace import trace
from ...errors import CalibrationInvalid
from ...head.chain import count_chains
from ...head.forward import DraftHead
from ...head.spec import HeadSpec


class Inputs(TorchFunctionMode):
    """Calls a function with what each of some weights is multiplied with, and computes with what it returns.

    Args:
        weights: by slot; the very tensors that are multiplied with.
        see: slot and input `[..., in]` to the input that takes its place.
    """

    def __init__(self, weights: Mapping[str, Tensor], see: Callable[[str, Tensor], Tensor]) -> None:
        super().__init__()
        self._slots = {id(weight): slot for slot, weight in weights.items()}
        self._weights, self._see = weights, see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and (slot := self._slots.get(id(args[1]))) is not None:
            args = (self._see(slot, args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def input_amaxes(head: DraftHead, calibration: Calibration, slots: Iterable[str]) -> dict[str, float]:
    """Return the largest magnitude that each linear reads, over all draft steps of the text that is not held out."""
    found = dict.fromkeys(slots, 0.0)

    def note(slot: str, x: Tensor) -> Tensor:
        largest = float(x.abs().max())
        found[slot] = found[slot] if largest <= found[slot] else largest  # NaN stays
        return x

    with Inputs({slot: head.weights[slot] for slot in found}, note):
        for _ in trace(head, chain(calibration.part("fit"), calibration.part("choose"))):
            pass
    return found


def check_states(calibration: Calibration, spec: HeadSpec) -> int:
    """Refuse states that do not belong to a head, or leave nothing to calibrate or to measure on.

    Returns:
        Rows that the scales are of: chains times draft steps.

    Raises:
        CalibrationInvalid: they are of another target than the head's, have values that are no numbers, or are too few.
        PromptsInvalid: a text is too short to draft in.
    """
    rows: dict[Part, int] = {"fit": 0, "choose": 0, "held-out": 0}
    for part, (texts, length) in zip(calibration.part_of_each(), check_batches(calibration, spec), strict=True):
        rows[part] += texts * count_chains(length, STEPS) * STEPS
    calibrated = rows["fit"] + rows["choose"]
    if not calibrated or not rows["held-out"]:
        raise CalibrationInvalid(
            f"the states give {calibrated:,} rows to calibrate on and {rows['held-out']:,} to measure on, and both are "
            "needed",
            where=calibration.name,
            fix="Give states of more prompts: one in ten is kept from the calibration, to be measured on.",
        )
    return calibrated
