"""A calibration between two layers.

A run that was killed goes on behind the last layer that it finished: what flows to the next is kept as it is, so that
the amaxes are those of one quiet run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..checkpoint.folder import Checkpoint
from ..errors import InputScalesInvalid, OutputFailed


@dataclass(frozen=True)
class Between:
    """Where a calibration stands.

    Attributes:
        layers: how many are done.
        hidden: what flows to the next one, [1, T, hidden] of each sequence.
        amaxes: what was seen, by module.
    """

    layers: int
    hidden: Sequence[torch.Tensor] = field(repr=False)
    amaxes: Mapping[str, float] = field(repr=False)


def partial_of(out: Path, target: Checkpoint, sequences: Sequence[torch.Tensor], dtype: torch.dtype) -> Path:
    """Return where a calibration is kept while it runs; one of another target, text or dtype is kept elsewhere."""
    facts = {
        "config": target.config,
        "stamps": [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in target.files],
        "sequences": [ids.tolist() for ids in sequences],
        "dtype": str(dtype),
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return out.with_name(f".{out.name[:40]}-{key}.partial")


def keep(file: Path, between: Between) -> None:
    """Write where a calibration stands, in the place of what was written before.

    Raises:
        OutputFailed: it cannot be written; what was written before stays.
    """
    said = {"layers": str(between.layers), "amaxes": json.dumps(dict(between.amaxes))}
    temporary = file.with_name(f"{file.name}.new")
    try:
        save_file({str(i): states.contiguous() for i, states in enumerate(between.hidden)}, temporary, metadata=said)
        with temporary.open("rb") as whole:
            os.fsync(whole.fileno())
        temporary.replace(file)
    except (OSError, SafetensorError) as fault:  # of a full disk safetensors tells in its own words
        temporary.unlink(missing_ok=True)
        raise OutputFailed(
            f"{file.name} could not be written: {fault}",
            where=file.parent,
            fix="Free some space, or choose an output on another disk; then it goes on behind the last layer.",
        ) from fault


def find(file: Path, layers: int) -> Between | None:
    """Read what `keep` wrote; None if there is nothing.

    Args:
        file: where it was written.
        layers: of the target.

    Raises:
        InputScalesInvalid: it cannot be read, or stands behind more layers than there are.
    """
    if not file.exists():
        return None
    try:
        with safe_open(file, framework="pt") as held:
            said, count = held.metadata(), len(held.keys())
            hidden = [held.get_tensor(str(i)) for i in range(count)]
        done = int(said["layers"])
        if not 0 <= done <= layers:
            raise ValueError(f"it stands behind layer {done} of {layers}")
        return Between(done, hidden, json.loads(said["amaxes"]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as fault:
        raise InputScalesInvalid(
            f"what an interrupted run left in {file.name} cannot be read: {fault}",
            where=file,
            fix="Delete it, and calibrate from the first layer on.",
        ) from fault
