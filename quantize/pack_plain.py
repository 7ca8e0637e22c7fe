"""NVFP4's arithmetic in torch, as ModelOpt's NVFP4QTensor has it. What belongs here: the way that needs no compiler.

https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/quantization/qtensor/nvfp4_tensor.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .formats import E2M1_MAX, E4M3_MAX, GROUP_SIZE

# Magnitudes between two codes, and whether one that lies on the bound goes up: a tie goes to the even code.
BOUNDS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
# The smallest e4m3; a block scale that rounded to zero would make its block infinite.
SMALLEST = 2.0**-9


@dataclass(frozen=True)
class Packed:
    """A weight [out, in] in NVFP4: two nibbles to a byte, U8 [out, in/2], and block scales, e4m3 [out, in/16]."""

    weight: torch.Tensor
    weight_scale: torch.Tensor


def pack_plain(weight: torch.Tensor, weight_scale_2: float) -> Packed:
    """Pack a weight in torch; see `pack.pack` for the arguments."""
    shared = torch.tensor(weight_scale_2, dtype=torch.float32, device=weight.device)
    blocks = weight.unflatten(-1, (-1, GROUP_SIZE))
    scale = blocks.abs().amax(-1).float() / (E2M1_MAX * shared)
    scale[scale == 0] = 1.0
    block_scale = scale.clamp(min=SMALLEST, max=E4M3_MAX).to(torch.float8_e4m3fn)
    # In float32, whatever the weight is in.
    scaled = (blocks / (block_scale.float() * shared).unsqueeze(-1)).flatten(-2)
    codes = (scaled < 0).to(torch.uint8) << 3
    magnitudes = scaled.abs_()
    for bound, up in BOUNDS:
        # NaN (0 / 0, where a block scale times the shared one underflows) is above all bounds for ModelOpt too.
        codes += ((magnitudes < bound) if up else (magnitudes <= bound)).logical_not_()
    return Packed((codes[:, 1::2] << 4) | codes[:, 0::2], block_scale)
