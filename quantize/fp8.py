"""Store linear layers as FP8 in blocks of 128 by 128, ModelOpt's FP8_PB_WO: bit for bit as it exports them.

A layer that is FP8 in the same blocks already keeps its bytes; its scales only get ModelOpt's name and dims.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..checkpoint.formats import FP8_BLOCKS, FP8_PB_WO
from ..targets.weights import Quantized, Seen, StoredWeight, unseen

HEIGHT, WIDTH = FP8_PB_WO.height, FP8_PB_WO.width


def kept(weight: StoredWeight) -> Quantized | None:
    """Return a weight whose bytes stay; None if it has to be rounded."""
    return weight if isinstance(weight, Quantized) and weight.format == FP8_BLOCKS else None


def scales_of(weight: StoredWeight, seen: Seen = unseen) -> Tensor:
    """Return the scale of each block, float32 `[rows, 1, columns, 1]` as ModelOpt stores it; NaN and Inf stay."""
    if same := kept(weight):
        scales = torch.cat([stored[same.format.scale].float() for stored in same.stored(seen)])
    else:
        parts = [_amaxes(rows) for rows in _in_blocks(weight.blocks(seen))]
        scales = torch.cat(parts) / FP8_PB_WO.largest
        # A block of zeros stays one with any scale.
        scales[scales == 0] = 1.0
    return scales[:, None, :, None]


def values_of(weight: StoredWeight, scales: Tensor) -> Iterator[Tensor]:
    """Yield a weight's FP8 values, in consecutive blocks of rows; `scales` are from `scales_of`."""
    if same := kept(weight):
        yield from (stored[same.format.values] for stored in same.stored())
        return
    begin = 0
    for rows in _in_blocks(weight.blocks()):
        own = scales[begin : begin + -(-len(rows) // HEIGHT), 0, :, 0]
        tall = own.repeat_interleave(HEIGHT, 0)[: len(rows)]
        yield (rows / tall.repeat_interleave(WIDTH, 1)[:, : rows.shape[1]]).to(torch.float8_e4m3fn)
        begin += len(own)


def _amaxes(rows: Tensor) -> Tensor:
    height, width = -len(rows) % HEIGHT, -rows.shape[1] % WIDTH
    padded = torch.nn.functional.pad(rows, (0, width, 0, height)).float().abs()
    return padded.unflatten(0, (-1, HEIGHT)).unflatten(2, (-1, WIDTH)).amax((1, 3))


def _in_blocks(parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the rows of consecutive parts again, each time a multiple of a block's height, except for the last."""
    left: Tensor | None = None
    for part in parts:
        rows = part if left is None else torch.cat([left, part])
        whole = len(rows) // HEIGHT * HEIGHT
        if whole:
            yield rows[:whole]
        left = rows[whole:]
    if left is not None and len(left):
        yield left
