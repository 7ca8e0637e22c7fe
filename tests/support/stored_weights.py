"""One weight as each form stores it, of several spans of rows: what Kimi's own are, and the tiny target's are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from kconv.checkpoint.formats import FP8_BLOCKS, NVFP4, Int4, StoredFormat
from kconv.checkpoint.header import read_header
from kconv.targets.weights import Plain, Quantized, StoredWeight

from .quantized_targets import quantize_fp8, quantize_int4

Tensors = dict[str, torch.Tensor]
# Two blocks of FP8 and a part of a third.
ROWS, COLUMNS = 300, 192
FORMATS: dict[str, StoredFormat | None] = {"plain": None, "int4": Int4((32,)), "fp8": FP8_BLOCKS, "nvfp4": NVFP4}


def store_weight(form: str, folder: Path) -> tuple[StoredWeight, torch.Tensor]:
    """Store a weight, and return it as it is found on disk beside the numbers that it stands for, all made at once.

    Its rows grow by two powers of ten from the first to the last: with another row's scale it is another weight.

    Args:
        form: one of `STORES`.
        folder: where to write a file.
    """
    plain = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    plain = (plain * torch.logspace(-1, 1, ROWS)[:, None]).bfloat16()
    format_, tensors = FORMATS[form], STORES[form](plain)
    file = folder / "x.safetensors"
    save_file({f"x.{suffix}": tensor for suffix, tensor in tensors.items()}, file)
    found = read_header(file)
    if format_ is None:
        return Plain(found["x.weight"]), tensors["weight"]
    whole = format_.unpack(tensors)
    return Quantized(format_, format_.parts("x", found)), whole.bfloat16() if form == "nvfp4" else whole


def _store_fp8(plain: torch.Tensor) -> Tensors:
    weight, scale = quantize_fp8(plain.float())
    return {"weight": weight, "weight_scale_inv": scale}


def _store_nvfp4(plain: torch.Tensor) -> Tensors:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    scale_2 = plain.abs().amax().float() / (6.0 * 448.0)
    packed, scale, _ = NVFP4QTensor.quantize(plain, 16, None, scale_2, try_tensorrt=False)
    return {"weight": packed._quantized_data, "weight_scale": scale, "weight_scale_2": scale_2}


STORES: dict[str, Callable[[torch.Tensor], Tensors]] = {
    "plain": lambda plain: {"weight": plain},
    "int4": quantize_int4,
    "fp8": _store_fp8,
    "nvfp4": _store_nvfp4,
}
