"""A quantized head against the head it was made from, linear by linear.

Linears that one head stores with scales and the other without have no bits in common. What was rounded is near its
source all the same; what has another's scale, nibbles in another order or another weight's values is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from torch import Tensor

from ..convert.quantized import BLOCK
from ..convert.read import Head, read_slot
from ..head.slots import needs
from ..targets.weights import dequantize_fp8, dequantize_nvfp4, spans
from .quantized import FLOOR, decibels
from .report import Finding

# An FP8 value is within a sixteenth of itself, three bits of mantissa: 24 dB. Four are left to values that the scale
# of a fused group makes too small for that.
FP8_FLOOR = 20.0


@dataclass(frozen=True)
class Form:
    """A form that linears are stored in.

    Attributes:
        name: what it is called.
        floor: signal over noise that rounding leaves at the least, dB.
        unpack: the stored weight, and its scales by suffix, to what they stand for: `[out, in]`.
    """

    name: str
    floor: float
    unpack: Callable[[Tensor, Mapping[str, Tensor]], Tensor]


def _unpack_nvfp4(weight: Tensor, scales: Mapping[str, Tensor]) -> Tensor:
    return dequantize_nvfp4(weight, scales["weight_scale"], scales["weight_scale_2"])


def _unpack_blocks(weight: Tensor, scales: Mapping[str, Tensor]) -> Tensor:
    return dequantize_fp8(weight, scales["weight_scale_inv"], (BLOCK, BLOCK))


def _unpack_fp8(weight: Tensor, scales: Mapping[str, Tensor]) -> Tensor:
    # One for all, or one for each row.
    return weight.float() * scales["weight_scale"].reshape(-1, 1)


# By a scale that tells it from those below.
FORMS = {
    "weight_scale_2": Form("NVFP4", FLOOR, _unpack_nvfp4),
    "weight_scale_inv": Form("FP8 in blocks", FP8_FLOOR, _unpack_blocks),
    "weight_scale": Form("FP8", FP8_FLOOR, _unpack_fp8),
}


def rounded(output: Head, source: Head) -> dict[str, Form]:
    """Return the linears, by slot, that an output stores with scales and its source without."""
    ours, theirs = needs(output.spec), needs(source.spec)
    # What differs in its shape, too, is another's.
    alike = sorted(slot for slot in ours.keys() & theirs.keys() if ours[slot].shape == theirs[slot].shape)
    found: dict[str, Form] = {}
    for suffix, form in FORMS.items():
        for slot in alike:
            if slot in source.places and f"{slot}.{suffix}" in output.places.keys() - source.places.keys():
                found.setdefault(slot, form)
    return found


def check_rounded(output: Head, source: Head, forms: Mapping[str, Form]) -> list[Finding]:
    """Hold each linear that was rounded against its source: those too far from it, or how near all are."""
    noise = {slot: _noise(output, source, slot, form) for slot, form in forms.items()}
    # NaN is no distance.
    far = [slot for slot, found in noise.items() if not found >= forms[slot].floor]
    if noise and not far:
        return [_summary(noise, forms)]
    return [_too_far(slot, noise[slot], forms[slot]) for slot in far]


def _noise(output: Head, source: Head, slot: str, form: Form) -> float:
    """Return the power of a weight over that of its change, in dB."""
    scales = {suffix: read_slot(output, f"{slot}.{suffix}") for suffix in FORMS if f"{slot}.{suffix}" in output.places}
    its, mine = read_slot(source, slot), form.unpack(read_slot(output, slot), scales)
    signal = change = 0.0
    # In blocks of rows, as doubles of the whole would be four times the weight.
    for begin, end in spans(tuple(its.shape)):
        one, other = its[begin:end].double(), mine[begin:end].double()
        signal += float(one.square().sum())
        change += float((other - one).square().sum())
    return decibels(signal, change)


def _too_far(slot: str, found: float, form: Form) -> Finding:
    return Finding(
        rule="K305",
        severity="error",
        where=slot,
        message=f"its signal over noise is {found:.1f} dB, and rounding to {form.name} leaves {form.floor} dB at the"
        " least",
        fix="Quantize the head again, and give the very head that it is made from.",
    )


def _summary(noise: Mapping[str, float], forms: Mapping[str, Form]) -> Finding:
    worst = min(noise, key=lambda slot: noise[slot])
    names = ", ".join(dict.fromkeys(form.name for form in forms.values()))
    return Finding(
        rule="K306",
        severity="info",
        where=worst,
        message=f"{len(noise)} linears are rounded to {names}: signal over noise {median(noise.values()):.1f} dB in the"
        f" middle, {noise[worst]:.1f} dB at worst; the scales of their inputs, which no source has, are not compared",
        fix="Nothing to do. What the head keeps of its acceptance is measured by kconv quantize-head.",
    )
