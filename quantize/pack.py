"""A weight packed as NVFP4, with the arithmetic of ModelOpt's NVFP4QTensor bit for bit."""

from __future__ import annotations

from typing import Any

import torch

from ..targets.nvfp4 import dequantize_nvfp4
from .formats import E2M1_MAX, E4M3_MAX, GROUP_SIZE
from .pack_native import fastest
from .pack_plain import Packed


def amax(weight: torch.Tensor) -> float:
    """Return the largest magnitude; NaN if there is a NaN."""
    return float(torch.stack(torch.aminmax(weight)).abs().max())


def scale_2(largest: float) -> torch.Tensor:
    """Return the weight_scale_2, float32 [], of a largest magnitude."""
    return torch.tensor(largest, dtype=torch.float32) / (E2M1_MAX * E4M3_MAX)


def pack(weight: torch.Tensor, weight_scale_2: float) -> Packed:
    """Pack a weight.

    Args:
        weight: [out, in], in a multiple of sixteen; finite. On a GPU ModelOpt's own operations do it.
        weight_scale_2: above 0.

    Returns:
        The nibbles and the block scales, on the weight's device.
    """
    if weight.is_cuda:
        return _pack_with_modelopt(weight, weight_scale_2)
    return fastest()(weight, weight_scale_2)


def unpack(packed: Packed, weight_scale_2: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that a packed weight stands for, [out, in], computed in float32 and rounded once."""
    shared = torch.tensor(weight_scale_2, dtype=torch.float32)
    return dequantize_nvfp4(packed.weight, packed.weight_scale, shared).to(dtype)


def _pack_with_modelopt(weight: torch.Tensor, weight_scale_2: float) -> Packed:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    shared = torch.tensor(weight_scale_2, dtype=torch.float32, device=weight.device)
    made: Any = NVFP4QTensor.quantize(weight, GROUP_SIZE, None, shared, try_tensorrt=False)
    return Packed(made[0]._quantized_data, made[1])
