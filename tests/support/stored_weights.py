"""One weight as each form stores it, of several spans of rows: what Kimi's own are, and the tiny target's are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from kconv.checkpoint.header import TensorInfo, read_header
from kconv.targets.weights import (
    Plain,
    StoredWeight,
    dequantize_fp8,
    dequantize_int4,
    dequantize_nvfp4,
    fp8_of,
    int4_of,
    nvfp4_of,
)

from .quantized_targets import quantize_fp8, quantize_int4

Tensors = dict[str, torch.Tensor]
# Two blocks of FP8 and a part of a third.
ROWS, COLUMNS = 300, 192
BLOCK = (128, 128)


def store_weight(form: str, folder: Path) -> tuple[StoredWeight, torch.Tensor]:
    """Store a weight, and return it as it is found on disk beside the numbers that it stands for, all made at once.

    Its rows grow by two powers of ten from the first to the last: with another row's scale it is another weight.

    Args:
        form: one of `STORES`.
        folder: where to write a file.
    """
    plain = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    plain = (plain * torch.logspace(-1, 1, ROWS)[:, None]).bfloat16()
    store, find, dequantize = STORES[form]
    tensors = store(plain)
    file = folder / "x.safetensors"
    save_file({f"x.{suffix}": tensor for suffix, tensor in tensors.items()}, file)
    return find(read_header(file)), dequantize(tensors)


def _store_fp8(plain: torch.Tensor) -> Tensors:
    weight, scale = quantize_fp8(plain.float())
    return {"weight": weight, "weight_scale_inv": scale}


def _store_nvfp4(plain: torch.Tensor) -> Tensors:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    scale_2 = plain.abs().amax().float() / (6.0 * 448.0)
    packed, scale, _ = NVFP4QTensor.quantize(plain, 16, None, scale_2, try_tensorrt=False)
    return {"weight": packed._quantized_data, "weight_scale": scale, "weight_scale_2": scale_2}


STORES: dict[
    str,
    tuple[
        Callable[[torch.Tensor], Tensors],
        Callable[[dict[str, TensorInfo]], StoredWeight],
        Callable[[Tensors], torch.Tensor],
    ],
] = {
    "plain": (
        lambda plain: {"weight": plain},
        lambda found: Plain(found["x.weight"]),
        lambda held: held["weight"],
    ),
    "int4": (
        quantize_int4,
        lambda found: int4_of("x", found),
        lambda held: dequantize_int4(held["weight_packed"], held["weight_scale"]),
    ),
    "fp8": (
        _store_fp8,
        lambda found: fp8_of("x", found, BLOCK),
        lambda held: dequantize_fp8(held["weight"], held["weight_scale_inv"], BLOCK),
    ),
    "nvfp4": (
        _store_nvfp4,
        lambda found: nvfp4_of("x", found),
        lambda held: dequantize_nvfp4(held["weight"], held["weight_scale"], held["weight_scale_2"]).bfloat16(),
    ),
}
