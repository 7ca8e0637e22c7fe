"""Tensors as torch sees them, in and out of their bytes."""

from __future__ import annotations

import torch

from ..errors import ConfigUnsupported
from .bytes import Entry, stream
from .header import TensorInfo

TORCH = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in TORCH.items()}


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """Read one tensor into memory of its own.

    Raises:
        ConfigUnsupported: torch has no such dtype.
        CorruptHeader: the file is shorter than its header said.
    """
    if info.dtype not in TORCH:
        raise ConfigUnsupported(
            f"{info.name} is {info.dtype}, which torch cannot read", where=info.file, fix="Give a bf16 export."
        )
    data = bytearray(info.size)
    at = 0
    for chunk in stream(info):
        data[at : at + len(chunk)] = chunk
        at += len(chunk)
    if not data:
        return torch.empty(info.shape, dtype=TORCH[info.dtype])
    return torch.frombuffer(data, dtype=TORCH[info.dtype]).reshape(info.shape)


def entry(name: str, tensor: torch.Tensor) -> Entry:
    """Return a tensor as something `write_safetensors` can write."""
    flat = tensor.detach().contiguous().reshape(-1)
    return Entry(
        name,
        NAMES[tensor.dtype],
        tuple(tensor.shape),
        lambda: [flat.view(torch.uint8).numpy().data],
    )
