"""Synthetic heads."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kconv.head.spec import HeadSpec, Mla, Rope, Yarn

from .machine import BLOCK

FULL = HeadSpec(
    attention=Mla(64, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    hidden=7168,
    target_hidden=7168,
    intermediate=18432,
    layers=1,
    vocab=163840,
    draft_vocab=163840,
    rope=Rope(50000.0, Yarn(64.0, 4096, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)),
    captured=(1, 29, 57),
    eps=1e-5,
    dtype="BF16",
    max_positions=262144,
)
SIZES = {
    "full": FULL,
    "small": replace(FULL, hidden=1024, target_hidden=1024, intermediate=2560, vocab=40960, draft_vocab=40960),
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
