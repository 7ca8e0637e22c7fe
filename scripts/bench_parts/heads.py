"""Synthetic heads."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.heads import KIMI_MLA as KIMI_MLA
from support.heads import small

from kconv.drafters.spec import HeadSpec

from .machine import BLOCK

SIZES = {
    "full": KIMI_MLA,
    "small": small(KIMI_MLA, 1024, 40960, intermediate=2560, captured=KIMI_MLA.captured),
}


@dataclass(frozen=True)
class Head:
    """The synthetic head: its folder, and how large it is."""

    folder: Path
    tensors: int
    parameters: int

    @property
    def file(self) -> Path:
        return self.folder / "model.safetensors"

    @property
    def size(self) -> int:
        return self.file.stat().st_size


def make_head(folder: Path, spec: HeadSpec, names: str = "torchspec") -> Head:
    """Write a head under a trainer's names, each of which `to-vllm` renames: finite random bf16, fast."""
    from kconv.checkpoint.header import build_header, byte_size
    from kconv.engines import BY_NAME
    from kconv.engines.layout import stored

    rows = stored(BY_NAME[names], spec).values()
    shapes = {row.name: row.expected.shape for row in rows}
    size = sum(byte_size("BF16", shape) for shape in shapes.values())
    folder.mkdir()
    free = shutil.disk_usage(folder).free
    if free < 2.2 * size:
        sys.exit(f"error: {folder} has {free / 1e9:.1f} GB free, and this takes {2.2 * size / 1e9:.1f} GB")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(build_header([(name, "BF16", shape) for name, shape in shapes.items()], {"format": "pt"}))
        for block in blocks(size):
            file.write(block)
        os.fsync(file.fileno())
    config = BY_NAME["trtllm"].write_config(spec)
    (folder / "config.json").write_text(json.dumps(config))
    return Head(folder, len(shapes), sum(math.prod(shape) for shape in shapes.values()))


def blocks(size: int) -> Iterator[memoryview]:
    """Yield `size` bytes of bf16 values, none of them NaN or Inf, and no two blocks alike."""
    import numpy as np

    # Without the exponent's highest bit a value is below 2.
    values = np.random.default_rng(0).integers(0, 1 << 16, BLOCK // 2, dtype=np.uint16) & np.uint16(0xBFFF)
    for turn in range(math.ceil(size / BLOCK)):
        block = (values ^ np.uint16(turn % 128)).view(np.uint8).data
        yield block[: min(BLOCK, size - turn * BLOCK)]
