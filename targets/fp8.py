"""FP8 in blocks, as DeepSeek-V3 and Kimi-K2-Instruct have it.

A weight [out, in] is F8_E4M3 beside `weight_scale_inv` [ceil(out/128), ceil(in/128)]; a value is the product of the
two in float32, rounded to bf16, as DeepSeek's `weight_dequant` has it:
https://github.com/deepseek-ai/DeepSeek-V3/blob/06231633430c449a1f6a8c0b5a1d6f99860b8eb2/inference/kernel.py#L78-L81
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

SCALE = "weight_scale_inv"


@dataclass(frozen=True)
class Fp8:
    """A weight in blocks of FP8 that share a scale.

    Attributes:
        weight: F8_E4M3 [out, in].
        scale: [ceil(out / block rows), ceil(in / block columns)].
        block: rows and columns that share a scale.
    """

    weight: TensorInfo
    scale: TensorInfo
    block: tuple[int, int]
    form = "fp8"
    dtype = "BF16"

    @property
    def name(self) -> str:
        """Its name on disk."""
        return self.weight.name

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]."""
        return self.weight.shape

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        """The values and their scales."""
        return self.weight, self.scale

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yield it in consecutive blocks of rows, in bf16."""
        scale = read_tensor(self.scale).float()
        height = self.block[0]
        for begin, end in spans(self.shape, height):
            yield dequantize_fp8(
                read_span(self.weight, begin, end), scale[begin // height : -(-end // height)], self.block
            )

    def read(self) -> torch.Tensor:
        """Return it whole, in bf16."""
        return torch.cat(list(self.blocks()))


def dequantize_fp8(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return FP8 values as numbers, bit for bit as DeepSeek's own kernel does.

    Args:
        weight: F8_E4M3 [rows, columns].
        scale: float32 [ceil(rows / block rows), ceil(columns / block columns)].
        block: rows and columns that share a scale.

    Returns:
        bf16 [rows, columns].
    """
    rows, columns = weight.shape
    spread = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return weight.float().mul_(spread).bfloat16()


def block_of(quantization: dict, where: object) -> tuple[int, int]:
    """Return the rows and columns that share a scale, as a config says.

    Raises:
        SourceFormatUnknown: this is FP8 of another kind.
    """
    match quantization:
        case {"weight_block_size": [int(rows), int(columns)]} if rows > 0 and columns > 0:
            pass
        case _:
            raise SourceFormatUnknown(
                f"this FP8 checkpoint has the weight_block_size {quantization.get('weight_block_size')!r}",
                where=where,
                fix="kconv reads FP8 in blocks, as Kimi-K2-Instruct and DeepSeek-V3 have it.",
            )
    if quantization.get("fmt", "e4m3") != "e4m3":
        raise SourceFormatUnknown(
            f"this FP8 checkpoint is {quantization['fmt']!r}", where=where, fix="kconv reads e4m3."
        )
    return rows, columns


def fp8_of(base: str, tensors: dict[str, TensorInfo], block: tuple[int, int]) -> Fp8:
    """Return the weight of a module whose scales were found.

    Raises:
        SourceFormatUnknown: the weight is missing, or of another dtype.
        TensorShape: the scales are not one for each block.
    """
    weight, scale = tensors.get(f"{base}.weight"), tensors[f"{base}.{SCALE}"]
    if weight is None or weight.dtype != "F8_E4M3" or scale.dtype not in ("F32", "BF16"):
        held = "missing" if weight is None else weight.dtype
        raise SourceFormatUnknown(
            f"{base}.weight is {held}, and has scales in {scale.dtype}",
            where=scale.file,
            fix="Fetch the shard again; an FP8 weight is F8_E4M3 with scales in F32.",
        )
    wanted = tuple(-(-count // size) for count, size in zip(weight.shape, block, strict=False))
    if len(weight.shape) != 2 or scale.shape != wanted:
        raise TensorShape(
            f"{scale.name} is {list(scale.shape)}, and {list(weight.shape)} in blocks of {list(block)} has "
            f"{list(wanted)}",
            where=scale.file,
            fix="Check that config.json and the weights are of the same model.",
        )
    return Fp8(weight, scale, block)
