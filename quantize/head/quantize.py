"""A head's linears quantized and measured.

What is measured has the weights as they are stored, and inputs rounded as engines round them, so the figure is of all
that the format loses and not of the weights alone.

What they read along the drafting chain: from the second draft step on a head reads its own output, so the scales are of
all steps of the chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from ...calibrate.batches import STEPS, Calibration, Part, check_batches
from ...calibrate.measure import WatchedInputs, compare, trace
from ...calibrate.retention import MIN_RETENTION, Retention, check_retention
from ...errors import CalibrationInvalid, TensorValue
from ...head.chain import count_chains
from ...head.forward import DraftHead
from ...head.spec import HeadSpec
from ..calibration import check_amax
from ..pack import amax
from .formats import LinearFormat, groups_of


@torch.no_grad()
def input_amaxes(head: DraftHead, calibration: Calibration, slots: Iterable[str]) -> dict[str, float]:
    """Return the largest magnitude that each linear reads, over all draft steps of the text that is not held out."""
    found = dict.fromkeys(slots, 0.0)

    def note(slot: str, x: Tensor) -> Tensor:
        largest = float(x.abs().max())
        found[slot] = found[slot] if largest <= found[slot] else largest  # NaN stays
        return x

    with WatchedInputs({slot: head.weights[slot] for slot in found}, note):
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
            f"the states give {calibrated:,} rows for calibration and {rows['held-out']:,} for measuring; both are "
            "needed",
            where=calibration.name,
            fix="Give states of more prompts. One prompt in ten is kept for measuring.",
        )
    return calibrated


@dataclass(frozen=True)
class QuantizedLinears:
    """A quantized head.

    Attributes:
        format: of its linears.
        linears: of each, by slot, the stored tensors by their suffix: `weight`, its scales, `input_scale`.
        input_amax: the largest magnitude that each read.
        rows: what the scales are of: chains times draft steps.
        held_out: figures on text that the scales are not of.
    """

    format: LinearFormat
    linears: Mapping[str, Mapping[str, Tensor]]
    input_amax: Mapping[str, float]
    rows: int
    held_out: Retention

    @property
    def method(self) -> str:
        """What was done, one sentence."""
        return f"{len(self.linears)} linears in {self.format.name}, weights and inputs, with one scale for each tensor"


def quantize_linears(
    spec: HeadSpec,
    weights: Mapping[str, Tensor],
    format_: LinearFormat,
    calibration: Calibration,
    *,
    min_retention: float = MIN_RETENTION,
    say: Callable[[str], None] = lambda _: None,
) -> QuantizedLinears:
    """Quantize a head's linears.

    Args:
        spec: what the head is.
        weights: each tensor by slot, in the dtype it is stored in; the target's lm_head and embedding among them.
        format_: what the linears become.
        calibration: states of the head's target. Scales are of its fit and its choosing part, the figures of the rest.
        min_retention: refuse a head that keeps less of the sampled acceptance length on held-out text.
        say: told what is going on.

    Raises:
        CalibrationInvalid: the states are not of this head's target, or too few.
        InputScalesInvalid: a linear reads NaN, only zeros, or more than a scale can hold.
        TensorShape: a weight cannot be cut into the format's groups.
        TensorValue: a weight is zero throughout, or holds NaN or Inf.
        ConversionInaccurate: the held-out loss is greater than allowed.
    """
    groups = groups_of(spec, format_)
    rows = check_states(calibration, spec)
    largest = {slot: found for group in groups for slot, found in _largest_of(group, weights).items()}
    head = DraftHead(spec, {name: w.float() if w.is_floating_point() else w for name, w in weights.items()})
    say(f"calibrating on {rows:,} rows")
    amaxes = input_amaxes(head, calibration, largest)
    for slot, found in amaxes.items():
        check_amax(slot, found)
    for group in groups:
        amaxes |= dict.fromkeys(group, max(amaxes[slot] for slot in group))

    linears = _pack(weights, largest, amaxes, format_)
    say("measuring on held-out text")
    figures = measure(head, format_, linears, calibration)
    instead, finer = "", format_.finer
    if finer is not None and not figures.kept >= min_retention:
        say(f"measuring {finer.name}, too")
        kept = measure(head, finer, _pack(weights, largest, amaxes, finer), calibration).kept
        instead = f"In {finer.name} it keeps {kept:.2%}: --format {finer.option}." if kept >= min_retention else ""
    check_retention(figures, min_retention, instead)
    return QuantizedLinears(format_, linears, amaxes, rows, figures)


def measure(
    head: DraftHead, format_: LinearFormat, linears: Mapping[str, Mapping[str, Tensor]], calibration: Calibration
) -> Retention:
    """Compare a head with its quantized form as an engine computes with it, on the held-out part of a calibration.

    Args:
        head: the original, in fp32.
        format_: of the linears.
        linears: stored tensors by slot and suffix.
        calibration: states of the head's target.
    """
    served = DraftHead(head.spec, dict(head.weights) | {slot: format_.unpack(one) for slot, one in linears.items()})

    def rounded(slot: str, x: Tensor) -> Tensor:
        return format_.round(x, linears[slot]["input_scale"])

    # By the weights that are multiplied with: the original's inputs stay as they are.
    with WatchedInputs({slot: served.weights[slot] for slot in linears}, rounded):
        return compare(head, served, calibration)


def _largest_of(group: Sequence[str], weights: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest magnitude of each weight of a fused group, which is one for all."""
    found = {slot: float(amax(weights[slot])) for slot in group}
    for slot, largest in found.items():
        if not 0 < largest < math.inf:
            raise TensorValue(
                f"{slot} is all zeros" if largest == 0 else f"{slot} holds NaN or Inf",
                where=slot,
                fix="Export the head again.",
            )
    return dict.fromkeys(group, max(found.values()))


def _pack(
    weights: Mapping[str, Tensor], largest: Mapping[str, float], amaxes: Mapping[str, float], format_: LinearFormat
) -> dict[str, dict[str, Tensor]]:
    """Return the tensors that are stored, by slot and suffix."""
    return {
        slot: format_.pack(weights[slot], format_.scale(found)) | {"input_scale": format_.scale(amaxes[slot])}
        for slot, found in largest.items()
    }
