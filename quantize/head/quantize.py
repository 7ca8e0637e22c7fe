"""Quantize and measure a head's linear layers.

The measured head has the weights as stored, and inputs rounded as engines round them, so the figure covers everything
that the format loses, not only the weights.

From the second draft step on a head reads its own output, so the input scales cover all steps of the drafting chain.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from ...checkpoint.formats import INPUT_SCALE
from ...drafters.chain import count_chains
from ...drafters.forward import DraftHead
from ...drafters.spec import HeadSpec
from ...errors import CalibrationInvalid, TensorValue
from ...measure.batches import PARTS, STEPS, Calibration, Part, check_batches
from ...measure.compare import compare
from ...measure.retention import MIN_RETENTION, Retention, check_retention
from ...measure.trace import WatchedInputs, trace
from ..calibration import check_amax
from ..pack import amax
from .formats import LinearFormat, groups_of


@torch.no_grad()
def input_amaxes(head: DraftHead, calibration: Calibration, slots: Iterable[str]) -> dict[str, float]:
    """Return the largest input magnitude of each linear layer, over all draft steps of text that is not held out."""
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
    """Refuse states that do not belong to a head, or leave nothing for calibrating or for measuring.

    Return the rows that set the scales: chains times draft steps.
    """
    rows: Counter[Part] = Counter()
    held_out = 0
    for part, (texts, length) in zip(calibration.part_of_each(), check_batches(calibration, spec), strict=True):
        rows[part] += texts * count_chains(length, STEPS) * STEPS
        held_out += texts * (part == "held-out")
    calibrated = rows["fit"] + rows["choose"]
    # A single one has no standard error.
    if not calibrated or held_out < 2:
        raise CalibrationInvalid(
            f"the states give {calibrated:,} rows for calibration and {held_out:,} sequences for measuring, "
            "which needs 2",
            where=calibration.name,
            fix=f"Create states of more prompts, {2 * PARTS} or more. One prompt in {PARTS} is kept for measuring.",
        )
    return calibrated


@dataclass(frozen=True)
class QuantizedLinears:
    """A quantized head.

    Attributes:
        linears: for each, by slot, the stored tensors by suffix: `weight`, its scales, `input_scale`.
        rows: the number of rows that set the scales: chains times draft steps.
        held_out: figures on text that did not set the scales.
    """

    format: LinearFormat
    linears: Mapping[str, Mapping[str, Tensor]]
    input_amax: Mapping[str, float]
    rows: int
    held_out: Retention

    @property
    def method(self) -> str:
        """What was done, as one sentence."""
        return f"{len(self.linears)} linear layers in {self.format.name}, weights and inputs, with one scale per tensor"


def quantize_linears(
    spec: HeadSpec,
    weights: Mapping[str, Tensor],
    format_: LinearFormat,
    calibration: Calibration,
    *,
    min_retention: float = MIN_RETENTION,
    say: Callable[[str], None] = lambda _: None,
) -> QuantizedLinears:
    """Quantize a head's linear layers.

    Args:
        weights: each tensor by slot, in its stored dtype; including the target's lm_head and embedding.
        calibration: states of the head's target. Its fit and choosing parts set the scales; the rest gives the figures.
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
        say(f"measuring {finer.name} too")
        kept = measure(head, finer, _pack(weights, largest, amaxes, finer), calibration).kept
        instead = f"In {finer.name} it retains {kept:.2%}: --format {finer.option}." if kept >= min_retention else ""
    check_retention(figures, min_retention, instead)
    return QuantizedLinears(format_, linears, amaxes, rows, figures)


def measure(
    head: DraftHead, format_: LinearFormat, linears: Mapping[str, Mapping[str, Tensor]], calibration: Calibration
) -> Retention:
    """Compare a head, given in fp32, with its quantized form, computed as an engine does, on the held-out part."""
    served = DraftHead(
        head.spec, dict(head.weights) | {slot: format_.stored.unpack(one) for slot, one in linears.items()}
    )

    def rounded(slot: str, x: Tensor) -> Tensor:
        return format_.round(x, linears[slot][INPUT_SCALE])

    # By the multiplied weights: the original's inputs stay unchanged.
    with WatchedInputs({slot: served.weights[slot] for slot in linears}, rounded):
        return compare(head, served, calibration)


def _largest_of(group: Sequence[str], weights: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest magnitude in the weights of a fused group, one value for all of them."""
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
    """Return the stored tensors, by slot and suffix."""
    return {
        slot: format_.pack(weights[slot], format_.scale(found)) | {INPUT_SCALE: format_.scale(amaxes[slot])}
        for slot, found in largest.items()
    }
