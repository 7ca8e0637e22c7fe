"""NVFP4's arithmetic in torch, as ModelOpt's NVFP4QTensor has it.

https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/quantization/qtensor/nvfp4_tensor.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .formats import E2M1_MAX, E4M3_MAX, GROUP_SIZE

# The smallest e4m3; a block scale that rounded to zero would make its block infinite.
SMALLEST = 2.0**-9
# Numbers that are packed at a time: what comes between stays in a core's cache.
PART = 1 << 17


@dataclass(frozen=True)
class Packed:
    """A weight [out, in] in NVFP4: two nibbles to a byte, U8 [out, in/2], and block scales, e4m3 [out, in/16]."""

    weight: torch.Tensor
    weight_scale: torch.Tensor


def pack_plain(weight: torch.Tensor, weight_scale_2: float) -> Packed:
    """Pack a weight in torch; see `pack.pack` for the arguments."""
    rows, columns = weight.shape
    nibbles = torch.empty(rows, columns // 2, dtype=torch.uint8)
    scales = torch.empty(rows, columns // GROUP_SIZE, dtype=torch.float8_e4m3fn)
    shared = torch.tensor(weight_scale_2, dtype=torch.float32)
    step = max(PART // columns, 1)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        # In float32, whatever the weight is in.
        blocks = weight[part].float().unflatten(-1, (-1, GROUP_SIZE))
        scales[part] = _scales(blocks, shared)
        nibbles[part] = _nibbles((blocks / (scales[part].float() * shared).unsqueeze(-1)).flatten(-2))
    return Packed(nibbles, scales)


def _scales(blocks: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    largest = blocks.abs()
    for half in (8, 4, 2, 1):  # several times as fast as a reduction over a short dim
        largest = torch.maximum(largest[..., :half], largest[..., half:])
    scale = largest.squeeze(-1) / (E2M1_MAX * shared)
    scale[scale == 0] = 1.0
    return scale.clamp_(min=SMALLEST, max=E4M3_MAX).to(torch.float8_e4m3fn)


def _nibbles(scaled: torch.Tensor) -> torch.Tensor:
    """Round numbers [rows, in] to e2m1, two to a byte.

    The codes 0 to 7 mean 0, 0.5, 1, 1.5, 2, 3, 4, 6: in steps of 0.5 up to 2, of 1 up to 4, of 2 from there. So a
    magnitude's code is the least of what each of these steps would make of it, and a tie goes to the even one.
    """
    negative = (scaled < 0).view(torch.uint8)
    sizes = scaled.abs_()
    codes, ones, twos = (sizes * 2).round_(), sizes.round().add_(2), sizes.mul_(0.5).round_().add_(4)
    torch.minimum(torch.minimum(codes, ones, out=codes), twos, out=codes)
    # NaN (0 / 0, where a block scale times the shared one underflows) is above all bounds for ModelOpt too.
    bytes_ = codes.nan_to_num_(7.0).clamp_(max=7.0).to(torch.uint8).add_(negative, alpha=8)
    pairs = bytes_.view(torch.int16)
    return (pairs | pairs >> 4).to(torch.uint8)
