"""Quantizes a target data-free. Run as a program, so that it can be killed, or be one rank of several.

Usage: python quantize_once.py SOURCE OUT SHARD_BYTES JOBS SECONDS_PER_FILE.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from kconv.checkpoint.bytes import Written, write_safetensors
from kconv.checkpoint.folder import open_checkpoint
from kconv.quantize import stream
from kconv.quantize.calibration import data_free
from kconv.quantize.plan import plan_quantize
from kconv.quantize.recipe import load_recipe
from kconv.quantize.run import quantize, read_world
from kconv.targets.config import parse_target_config


def main(source: Path, out: Path, shard: int, jobs: int, slow: float) -> None:
    """Quantize, each file taking some seconds more in the middle of its writing."""

    def write_slowly(file: Path, entries: list, **options) -> Written:
        return write_safetensors(file, paused(entries), **options)

    def paused(entries: list):
        for i, entry in enumerate(entries):
            if i == len(entries) // 2:
                time.sleep(slow)
            yield entry

    if slow:
        stream.write_safetensors = write_slowly
    checkpoint = open_checkpoint(source)
    decided = plan_quantize(
        checkpoint, parse_target_config(checkpoint.config), load_recipe("nvfp4"), data_free(), shard=shard
    )
    quantize(decided, out, world=read_world(), jobs=jobs)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
