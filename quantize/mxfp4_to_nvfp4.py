"""Cast MXFP4 to NVFP4 without a rounding: the same nibbles, and each group's power of two as two e4m3 scales.

e4m3 holds the eighteen powers of two from 2^-9 to 2^8. So the largest of a weight becomes 2^8, the weight_scale_2 takes
the rest, and a weight whose powers are further apart cannot be cast. The bits are ModelOpt's.
https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/quantization/utils/numeric_utils.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeGuard

import torch

from ..checkpoint.formats import MXFP4, NVFP4, Mxfp4, is_scale
from ..errors import TensorValue
from ..targets.weights import Quantized, Seen, StoredWeight, unseen
from .pack import Packed

# The exponents of the powers of two that e4m3 holds.
LEAST, MOST = -9, 8
# What e8m0 says instead of a number.
NAN = 255


def is_mxfp4(weight: StoredWeight) -> TypeGuard[Quantized]:
    """Return whether a weight can be cast."""
    return isinstance(weight, Quantized) and isinstance(weight.format, Mxfp4)


def scale_2_of(weights: Iterable[Quantized], seen: Seen = unseen) -> float:
    """Return the weight_scale_2 that modules share.

    Raises:
        TensorValue: a scale is NaN, no value is there, or the powers of two are further apart than e4m3's.
    """
    ranges = {weight.name: (weight, *_exponents(weight, seen)) for weight in weights}
    top = max(most for _, _, most in ranges.values())
    shared = 2.0 ** (top - MOST)
    for name, (weight, least, most) in ranges.items():
        what = ""
        if not is_scale(shared) or most == NAN - MXFP4.bias:
            what = "holds NaN, or no numbers but zeros"
        elif least < top - MOST + LEAST:
            what = f"has scales of 2^{least} where 2^{top} is the largest, and e4m3 holds 2^{LEAST} to 2^{MOST}"
        if what:
            raise TensorValue(
                f"{name} {what}, so it cannot be cast to NVFP4 exactly",
                where=weight.infos[0].file,
                fix="Keep this module out of the recipe (keep: ...).",
            )
    return shared


def _exponents(weight: Quantized, seen: Seen) -> tuple[int, int]:
    """Return the smallest exponent of a group that is not zero, and the largest of all, as ModelOpt takes it."""
    least, most = NAN, 0
    for scales, packed in _bytes(weight, seen):
        filled = scales[_groups(packed).bitwise_and(0x77).ne(0).any(-1)]
        most = max(most, int(scales.max()))
        least = min(least, int(filled.min())) if filled.numel() else least
    return least - MXFP4.bias, most - MXFP4.bias


def _bytes(weight: Quantized, seen: Seen = unseen) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the groups' exponents and the nibbles of consecutive blocks of rows, uint8."""
    assert isinstance(weight.format, Mxfp4)
    for stored in weight.stored(seen):
        found = weight.format.as_bytes(stored)
        yield found[weight.format.scale], found[weight.format.values]


def _groups(packed: torch.Tensor) -> torch.Tensor:
    return packed.unflatten(-1, (-1, MXFP4.group // MXFP4.columns))


def cast(weight: Quantized, weight_scale_2: float) -> Iterator[Packed]:
    """Yield a weight as NVFP4, in consecutive blocks of rows; `weight_scale_2` is from `scale_2_of`."""
    shared = int(torch.frexp(torch.tensor(weight_scale_2))[1]) - 1
    for scales, nibbles in _bytes(weight):
        packed = nibbles.clone()
        # As in ModelOpt, no zero is negative.
        for half in (0x0F, 0xF0):
            packed[packed & half == 0x88 & half] &= 0xFF ^ half
        exponents = scales.int() - MXFP4.bias - shared
        # Those below are of groups of zeros, which any scale leaves zero.
        powers = torch.exp2(exponents.clamp(LEAST, MOST).float()).to(torch.float8_e4m3fn)
        blocks = powers.view(torch.uint8).repeat_interleave(MXFP4.group // NVFP4.group, -1)
        yield Packed(packed, blocks.view(torch.float8_e4m3fn))
