"""Rows of a stored matrix, read by their numbers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ..errors import ConfigUnsupported, CorruptHeader, NotACheckpoint
from .header import TensorInfo
from .tensors import TORCH

ROWS = 1024


def read_rows(info: TensorInfo, ids: torch.Tensor) -> torch.Tensor:
    """Read some rows of a matrix into memory of their own; the rest of it is not read.

    Args:
        info: a tensor of two dims.
        ids: [n] integers, each below its number of rows, in any order.

    Returns:
        [n, columns], row k being the matrix's row `ids[k]`.

    Raises:
        ConfigUnsupported: torch has no such dtype.
    """
    if info.dtype not in TORCH:
        raise ConfigUnsupported(
            f"{info.name} is {info.dtype}, which torch cannot read", where=info.file, fix="Give a bf16 export."
        )
    count, columns = info.shape
    stored = np.memmap(info.file, np.uint8, "r", info.begin, (count, info.size // count))
    rows = torch.empty(len(ids), columns, dtype=TORCH[info.dtype])
    rows.view(torch.uint8).numpy()[:] = stored[ids.numpy()]
    return rows


def read_span(info: TensorInfo, begin: int, end: int) -> torch.Tensor:
    """Read consecutive rows of a matrix into memory of their own, through no mapping that would stay resident.

    Args:
        info: a tensor of two dims.
        begin, end: the first row, and the one after the last.

    Returns:
        [end - begin, columns].

    Raises:
        ConfigUnsupported: torch has no such dtype.
        NotACheckpoint: the file cannot be read.
        CorruptHeader: the file is shorter than its header said.
    """
    if info.dtype not in TORCH:
        raise ConfigUnsupported(
            f"{info.name} is {info.dtype}, which torch cannot read", where=info.file, fix="Give a bf16 export."
        )
    count, columns = info.shape
    width = info.size // count
    rows = torch.empty(end - begin, columns, dtype=TORCH[info.dtype])
    view = rows.view(torch.uint8).numpy().reshape(-1).data
    try:
        with info.file.open("rb", buffering=0) as file:
            file.seek(info.begin + begin * width)
            while view and (taken := file.readinto(view)):
                view = view[taken:]
    except OSError as fault:
        raise NotACheckpoint(
            f"{info.file.name} cannot be read: {fault.strerror}", where=info.file, fix="Check the disk, and run again."
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
