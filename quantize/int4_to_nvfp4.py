"""Convert INT4 to NVFP4 without dequantizing.

A group of sixteen INT4 values shares one bf16 scale. Its NVFP4 depends only on that scale and on the largest magnitude
among its nibbles, the level, which has nine values. For each such pair the packer computes once what each of the
sixteen nibbles becomes. A group is then sixteen look-ups, which a processor does in one instruction (int4.c). The bits
are the packer's by construction.
"""

from __future__ import annotations

import ctypes
from functools import cache, reduce
from typing import Protocol, TypeGuard

import numpy as np
import torch

from ..checkpoint.formats import NVFP4, Int4
from ..targets.weights import Quantized, Seen, StoredWeight, unseen
from .pack import Packed, load_native, pack

# The magnitude of each nibble's value, nibble - 8, and the larger of the two in a byte.
MAGNITUDES = np.abs(np.arange(16) - 8).astype(np.uint8)
BYTES = np.arange(256)
LARGER = np.maximum(MAGNITUDES[BYTES & 15], MAGNITUDES[BYTES >> 4])
LEVELS = 9


class Loops(Protocol):
    """The two loops over all groups."""

    def tops(self, halves: np.ndarray, bits: np.ndarray) -> np.ndarray:
        """Return the largest magnitude, as bits, of the scales of each level, [9], of halves [n, 8] and bits as below.

        A scale's level is the largest of its groups'; a level that no scale has gives 0.
        """
        ...

    def pack(self, halves: np.ndarray, bits: np.ndarray, tables: Tables) -> tuple[np.ndarray, np.ndarray]:
        """Return nibbles [n, 8] and e4m3 scales [n] of halves [n, 8] with scales' bits [n / groups per scale]."""
        ...


class Tables:
    """Results of the packer for INT4 under one weight_scale_2, as far as computed.

    Attributes:
        slots: [65536] for the bits of each scale, its first row in the other two; -1 if not computed yet.
        codes: [rows, 16] the code of each nibble, for a scale and a level.
        scales: [rows] bits of the e4m3 scale.
    """

    def __init__(self, weight_scale_2: float) -> None:
        self._weight_scale_2 = weight_scale_2
        self.slots = np.full(1 << 16, -1, np.int32)
        self.codes = np.empty((0, 16), np.uint8)
        self.scales = np.empty(0, np.uint8)

    def learn(self, bits: np.ndarray) -> None:
        """Compute the scales that have not occurred before."""
        new = self.slots[bits] < 0
        if not new.any():
            return
        unknown = np.unique(bits[new])
        self.slots[unknown] = len(self.codes) + np.arange(unknown.size, dtype=np.int32) * LEVELS
        scales = torch.from_numpy(unknown).view(torch.bfloat16)
        # For each scale and level the sixteen values, without those above the level: [scales, levels, 16].
        values = torch.arange(16).sub(8).repeat(LEVELS, 1)
        values[values.abs() > torch.arange(LEVELS).unsqueeze(-1)] = 0
        rows = (values.bfloat16() * scales[:, None, None]).reshape(-1, NVFP4.group)
        made = pack(rows, self._weight_scale_2)
        halves = made.weight.numpy()
        self.codes = np.concatenate([self.codes, np.stack([halves & 15, halves >> 4], axis=-1).reshape(-1, 16)])
        self.scales = np.concatenate([self.scales, made.weight_scale.view(torch.uint8).numpy().reshape(-1)])


class Int4Packer:
    """Packs the INT4 weights that share one weight_scale_2, by default with the fastest loops available."""

    def __init__(self, weight_scale_2: float, loops: Loops | None = None) -> None:
        self._tables = Tables(weight_scale_2)
        self._loops = loops or fastest()

    def pack(self, packed: torch.Tensor, scale: torch.Tensor) -> Packed:
        """Return rows of an INT4 weight as NVFP4, bit for bit what the packer gives for the dequantized rows.

        Args:
            packed: I32 [rows, in/8], as stored.
            scale: bf16 [rows, in/group], all finite; the group is a multiple of sixteen.
        """
        rows = packed.shape[0]
        halves = packed.contiguous().view(torch.uint8).numpy().reshape(-1, NVFP4.group // 2)
        bits = scale.contiguous().view(torch.uint16).numpy().reshape(-1)
        self._tables.learn(bits)
        nibbles, scales = self._loops.pack(halves, bits, self._tables)
        return Packed(
            torch.from_numpy(nibbles).view(rows, -1),
            torch.from_numpy(scales).view(torch.float8_e4m3fn).view(rows, -1),
        )


def amax_int4(weight: Quantized, loops: Loops | None = None, *, seen: Seen = unseen) -> float:
    """Return the largest magnitude of an INT4 weight's dequantized values; NaN for NaN scales."""
    loops = loops or fastest()
    tops = np.zeros(LEVELS, np.uint16)
    for stored in weight.stored(seen):
        halves = stored[Int4.values].view(torch.uint8).numpy().reshape(-1, NVFP4.group // 2)
        tops = np.maximum(tops, loops.tops(halves, stored[Int4.scale].view(torch.uint16).numpy().reshape(-1)))
    largest = torch.from_numpy(tops).view(torch.bfloat16)
    if not torch.isfinite(largest).all():
        return float("nan")
    # In bf16, since the product is rounded to it; rounding keeps the order.
    return float((torch.arange(LEVELS).bfloat16() * largest).max())


def fits(weight: StoredWeight) -> TypeGuard[Quantized]:
    """Return whether a weight can be packed this way."""
    if not isinstance(weight, Quantized) or not isinstance(weight.format, Int4):
        return False
    return weight.dtype == "BF16" and weight.format.group_of(weight.parts) % NVFP4.group == 0


class NumpyLoops:
    """The loops without a compiler, in numpy."""

    def levels(self, halves: np.ndarray) -> np.ndarray:
        """Return the level of each group."""
        larger = LARGER[halves]
        for half in (4, 2, 1):  # several times as fast as a reduction over a short dim
            larger = np.maximum(larger[:, :half], larger[:, half:])
        return larger[:, 0]

    def tops(self, halves: np.ndarray, bits: np.ndarray) -> np.ndarray:
        levels = self.levels(halves).reshape(len(bits), -1)
        level = reduce(np.maximum, levels.T)
        magnitudes = bits & np.uint16(0x7FFF)
        return np.array([magnitudes[level == i].max(initial=0) for i in range(LEVELS)], np.uint16)

    def pack(self, halves: np.ndarray, bits: np.ndarray, tables: Tables) -> tuple[np.ndarray, np.ndarray]:
        """Return nibbles and scales, using a table over both nibbles of a byte."""
        rows = np.repeat(tables.slots[bits], len(halves) // len(bits)) + self.levels(halves)
        both = tables.codes[:, BYTES & 15] | (tables.codes[:, BYTES >> 4] << 4)
        return both.reshape(-1)[rows[:, None] * np.int32(256) + halves], tables.scales[rows]


class NativeLoops:
    """The loops of int4.c."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._tops, self._pack = library.int4_tops, library.int4_pack
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._tops.argtypes = [pointer, pointer, size, size, pointer]
        self._pack.argtypes = [pointer, pointer, size, size, *[pointer] * 5]
        self._tops.restype = self._pack.restype = None

    def tops(self, halves: np.ndarray, bits: np.ndarray) -> np.ndarray:
        found = np.zeros(LEVELS, np.uint16)
        self._tops(halves.ctypes.data, bits.ctypes.data, len(bits), len(halves) // len(bits), found.ctypes.data)
        return found

    def pack(self, halves: np.ndarray, bits: np.ndarray, tables: Tables) -> tuple[np.ndarray, np.ndarray]:
        nibbles, scales = np.empty_like(halves), np.empty(len(halves), np.uint8)
        self._pack(
            halves.ctypes.data,
            bits.ctypes.data,
            len(bits),
            len(halves) // len(bits),
            tables.slots.ctypes.data,
            tables.codes.ctypes.data,
            tables.scales.ctypes.data,
            nibbles.ctypes.data,
            scales.ctypes.data,
        )
        return nibbles, scales


@cache
def fastest() -> Loops:
    """Return int4.c's loops if there is a compiler and they agree with numpy's; otherwise numpy's."""
    library = load_native("int4.c")
    if library is None:
        return NumpyLoops()
    native, plain = NativeLoops(library), NumpyLoops()
    random = np.random.default_rng(0)
    halves = random.integers(0, 256, (513, 8)).astype(np.uint8)
    halves[:256] = np.arange(256)[:, None] & 0xFF  # every level, the lowest among them
    bits = random.integers(0x3C00, 0x3C40, 171).astype(np.uint16)
    tables = Tables(2.0**-12)
    tables.learn(bits)
    agree = np.array_equal(native.tops(halves, bits), plain.tops(halves, bits)) and all(
        np.array_equal(*both)
        for both in zip(native.pack(halves, bits, tables), plain.pack(halves, bits, tables), strict=True)
    )
    return native if agree else plain
