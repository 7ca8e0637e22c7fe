"""How long a plan will take on this machine."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

import torch
from blake3 import blake3

from ..checkpoint.bytes import digest
from .plan import QuantizePlan
from .stream import pack_stored, shared_scale
from .units import Group

# Source bytes that are timed, about: a second's work.
SAMPLE = 256 << 20


@dataclass(frozen=True)
class Estimate:
    """What a sample of the work took.

    Attributes:
        rate: source bytes a second and process, reading, packing and hashing included, writing not.
        seconds: for the whole plan on the processes that were asked for.
    """

    rate: float
    seconds: float


def estimate(plan: QuantizePlan, processes: int) -> Estimate:
    """Pack a sample of a plan's modules into memory, and say how long all of it will take.

    Raises:
        TensorValue, CorruptHeader, NotACheckpoint: see `make_unit`.
    """
    begin, done = time.perf_counter(), 0
    for unit in plan.units:
        for group in unit.groups:
            _make(group)
            done += sum(info.size for module in group.modules for info in module.weight.infos)
            if done >= SAMPLE:
                break
        if done >= SAMPLE:
            break
    rate = done / (time.perf_counter() - begin)
    return Estimate(rate, plan.bytes_in / rate / processes)


def _make(group: Group) -> None:
    whole, tensor = hashlib.sha256(), blake3()
    scale = shared_scale(group)
    for module in group.modules:
        for info in module.weight.infos:
            tensor.update(bytes.fromhex(digest(info)))
        for part in pack_stored(module.weight, scale):
            for made in (part.weight, part.weight_scale):
                view = made.contiguous().view(torch.uint8).numpy().data
                whole.update(view)
                tensor.update(view)
