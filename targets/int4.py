"""compressed-tensors' pack-quantized INT4, as Kimi-K2-Thinking and K2.5 have it.

A weight [out, in] is three tensors: `weight_packed` I32 [out, in/8], whose lowest four bits are the first of eight
columns, each value plus 8; `weight_scale` [out, in/group]; `weight_shape` [2]. A value is (nibble - 8) * scale, the
product rounded to the scale's dtype:
https://github.com/vllm-project/compressed-tensors/blob/0.17.0/src/compressed_tensors/compressors/pack_quantized/base.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..checkpoint.header import TensorInfo
from ..checkpoint.rows import read_span
from ..checkpoint.tensors import read_tensor
from ..errors import SourceFormatUnknown, TensorShape
from .stored import spans

SUFFIXES = ("weight_packed", "weight_scale", "weight_shape")
SCALES = ("BF16", "F16", "F32")
# What a config group's `weights` must say; a key that is absent has compressed-tensors' default.
DEMANDS = {
    "num_bits": (4,), "type": ("int",), "symmetric": (True,), "strategy": ("group",), "dynamic": (False,),
    "actorder": (None, False), "block_structure": (None,),
}  # fmt: skip


@dataclass(frozen=True)
class Int4:
    """A weight in groups of INT4 that share a scale."""

    packed: TensorInfo
    scale: TensorInfo
    extent: TensorInfo
    form = "int4"

    @property
    def name(self) -> str:
        """As a plain weight."""
        return self.packed.name.removesuffix("_packed")

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]; nibbles that only fill up the last I32 of a row are not counted."""
        return self.packed.shape[0], self.scale.shape[1] * self.group

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.packed.shape[1] * 8 // self.scale.shape[1]

    @property
    def dtype(self) -> str:
        """The scale's."""
        return self.scale.dtype

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        """The packed values, their scales and the shape."""
        return self.packed, self.scale, self.extent

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yield it in consecutive blocks of rows, in the scale's dtype."""
        self.check()
        for packed, scale in self.packed_blocks():
            yield dequantize_int4(packed, scale)

    def packed_blocks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield it in consecutive blocks of rows as it is stored: I32 [rows, in/8] and scales [rows, in/group]."""
        for begin, end in spans(self.shape):
            yield read_span(self.packed, begin, end), read_span(self.scale, begin, end)

    def read(self) -> torch.Tensor:
        """Return it whole, in the scale's dtype."""
        return torch.cat(list(self.blocks()))

    def check(self) -> None:
        """Raise TensorShape if `weight_shape` says another shape than the packed values and the scales have."""
        said = tuple(read_tensor(self.extent).flatten().tolist())
        if said != self.shape:
            raise TensorShape(
                f"{self.extent.name} says {list(said)}, and the packed values are {list(self.shape)}",
                where=self.extent.file,
                fix="Fetch the shard again; compare its sha256 with the publisher's.",
            )


def dequantize_int4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return INT4 values as numbers, bit for bit as compressed-tensors does.

    Args:
        packed: I32 [rows, columns/8].
        scale: [rows, columns/group].

    Returns:
        [rows, columns] in the scale's dtype; the product is rounded to it once.
    """
    # Little-endian: the low nibble of each byte is the even column.
    halves = packed.view(torch.uint8)
    values = torch.empty(halves.shape[0], halves.shape[1], 2, dtype=torch.int8)
    torch.bitwise_and(halves, 15, out=values[:, :, 0].view(torch.uint8))
    torch.bitwise_right_shift(halves, 4, out=values[:, :, 1].view(torch.uint8))
    grouped = values.sub_(8).to(scale.dtype).view(*scale.shape, -1)
    return grouped.mul_(scale.unsqueeze(-1)).view(halves.shape[0], -1)


def check_int4(quantization: dict, where: object) -> None:
    """Raise SourceFormatUnknown unless a compressed-tensors config is the INT4 that is read here."""
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _unknown("its config_groups are missing", where)
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise _unknown(f"{name} has no weights", where)
        for key, allowed in DEMANDS.items():
            if key in weights and weights[key] not in allowed:
                raise _unknown(f"{name} has {key} {weights[key]!r}, and kconv reads {allowed[0]!r}", where)
        if weights.get("num_bits") != 4 or weights.get("strategy") != "group":
            raise _unknown(f"{name} does not say that it is 4 bits in groups", where)


def int4_of(base: str, tensors: dict[str, TensorInfo]) -> Int4:
    """Return the weight of a module whose packed values were found.

    Args:
        base: the module's name on disk.
        tensors: the checkpoint's tensors.

    Raises:
        SourceFormatUnknown: the scales or the shape are missing, or of another dtype.
        TensorShape: the scales do not divide the packed values into groups.
    """
    found = [tensors.get(f"{base}.{suffix}") for suffix in SUFFIXES]
    if None in found or f"{base}.weight_zero_point" in tensors or f"{base}.weight_g_idx" in tensors:
        raise _unknown(f"{base} has not the three tensors {', '.join(SUFFIXES)}", base)
    packed, scale, extent = (info for info in found if info is not None)
    if packed.dtype != "I32" or scale.dtype not in SCALES or extent.dtype not in ("I32", "I64"):
        raise _unknown(f"{base} is {packed.dtype} with scales in {scale.dtype}", packed.file)
    columns = packed.shape[-1] * 8
    sound = len(packed.shape) == len(scale.shape) == 2 and packed.shape[0] == scale.shape[0] and extent.shape == (2,)
    if not sound or not scale.shape[1] or columns % scale.shape[1]:
        raise TensorShape(
            f"{packed.name} is {list(packed.shape)} and its scales {list(scale.shape)}, which make no whole groups",
            where=packed.file,
            fix="Fetch the shard again; compare its sha256 with the publisher's.",
        )
    return Int4(packed, scale, extent)


def _unknown(what: str, where: object) -> SourceFormatUnknown:
    return SourceFormatUnknown(
        f"this compressed-tensors checkpoint cannot be read: {what}",
        where=where,
        fix="kconv reads pack-quantized symmetric INT4 in groups, as Kimi-K2-Thinking, K2.5 and K2.6 have it.",
    )
