"""Convert between torch tensors and their bytes, whole or by rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..errors import ConfigUnsupported, CorruptHeader, NotACheckpoint
from .bytes import ROWS, Entry, row_bytes, stream
from .header import TensorInfo

TORCH = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
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
            f"{info.name} is {info.dtype}, which torch cannot read", where=info.file, fix="Use a bf16 export."
        )
    data = bytearray(info.size)
    at = 0
    for chunk in stream(info):
        data[at : at + len(chunk)] = chunk
        at += len(chunk)
    return from_bytes(data, info.dtype, info.shape)


def from_bytes(data: bytearray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor that has these bytes, without a copy."""
    if not data:
        return torch.empty(shape, dtype=TORCH[dtype])
    return torch.frombuffer(data, dtype=TORCH[dtype]).reshape(shape)


def to_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes, without a copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def entry(name: str, tensor: torch.Tensor) -> Entry:
    """Return a tensor as something `write_safetensors` can write."""
    return Entry(name, NAMES[tensor.dtype], tuple(tensor.shape), lambda: [to_bytes(tensor)])


def read_rows(info: TensorInfo, ids: torch.Tensor) -> torch.Tensor:
    """Read some rows of a matrix into memory of their own, without reading the rest.

    Returns:
        [n, columns], row k being the matrix's row `ids[k]`.

    Raises:
        ConfigUnsupported: torch has no such dtype.
    """
    if info.dtype not in TORCH:
        raise ConfigUnsupported(
            f"{info.name} is {info.dtype}, which torch cannot read", where=info.file, fix="Use a bf16 export."
        )
    rows = torch.empty(len(ids), info.shape[1], dtype=TORCH[info.dtype])
    rows.view(torch.uint8).numpy()[:] = row_bytes(info, ids.numpy())
    return rows


def read_span(info: TensorInfo, begin: int, end: int) -> torch.Tensor:
    """Read consecutive rows, entries of the first dim, into memory of their own, without a memory map that would stay.

    Raises:
        ConfigUnsupported: torch has no such dtype.
        NotACheckpoint: the file cannot be read.
        CorruptHeader: the file is shorter than its header said.
    """
    if info.dtype not in TORCH:
        raise ConfigUnsupported(
            f"{info.name} is {info.dtype}, which torch cannot read", where=info.file, fix="Use a bf16 export."
        )
    count, *inner = info.shape
    width = info.size // count
    rows = torch.empty(end - begin, *inner, dtype=TORCH[info.dtype])
    view = rows.view(-1).view(torch.uint8).numpy().reshape(-1).data
    try:
        with info.file.open("rb", buffering=0) as file:
            file.seek(info.begin + begin * width)
            while view and (taken := file.readinto(view)):
                view = view[taken:]
    except OSError as fault:
        raise NotACheckpoint(
            f"{info.file.name} cannot be read: {fault.strerror}",
            where=info.file,
            fix="Check the disk, then run the command again.",
        ) from fault
    if view:
        raise CorruptHeader(
            f"{info.file.name} ended {len(view):,} bytes before the end of {info.name}",
            where=info.file,
            fix="The file changed while it was read; fetch it again.",
        )
    return rows


def row_blocks(info: TensorInfo, count: int = ROWS) -> Iterator[torch.Tensor]:
    """Yield a matrix in consecutive blocks of `count` rows; the last one may be shorter."""
    for begin in range(0, info.shape[0], count):
        yield read_rows(info, torch.arange(begin, min(begin + count, info.shape[0])))
