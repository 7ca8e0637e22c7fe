"""NVFP4 as ModelOpt exports it, and as kconv writes it.

A weight [out, in] is U8 [out, in/2], whose low nibble is the even column; `weight_scale` F8_E4M3 [out, in/16];
`weight_scale_2` F32. A value is e2m1(nibble) * (weight_scale * weight_scale_2), in float32.
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

GROUP = 16
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
# Both values of each byte: [256, 2].
PAIRS = torch.stack([E2M1.repeat(16), E2M1.repeat_interleave(16)], dim=-1)
ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
# Beside a weight, for the engines alone: no part of its value.
BESIDE = ("input_scale", "k_scale", "v_scale")


@dataclass(frozen=True)
class Nvfp4:
    """A weight in groups of sixteen e2m1 values that share an e4m3 scale."""

    weight: TensorInfo
    scale: TensorInfo
    scale_2: TensorInfo
    form = "nvfp4"
    dtype = "BF16"

    @property
    def name(self) -> str:
        """Its name on disk."""
        return self.weight.name

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]."""
        return self.weight.shape[0], self.weight.shape[1] * 2

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        """The values and both scales."""
        return self.weight, self.scale, self.scale_2

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yield it in consecutive blocks of rows, in bf16."""
        scale_2 = read_tensor(self.scale_2).reshape(())
        for begin, end in spans(self.shape):
            packed, scale = read_span(self.weight, begin, end), read_span(self.scale, begin, end)
            yield dequantize_nvfp4(packed, scale, scale_2).bfloat16()

    def read(self) -> torch.Tensor:
        """Return it whole, in bf16."""
        return torch.cat(list(self.blocks()))


def dequantize_nvfp4(packed: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """Return NVFP4 values as numbers, bit for bit as ModelOpt does.

    Args:
        packed: U8 [rows, columns/2].
        scale: F8_E4M3 [rows, columns/16].
        scale_2: F32 [].

    Returns:
        float32 [rows, columns].
    """
    values = PAIRS.to(packed.device)[packed.int()].view(*scale.shape, GROUP)
    return values.mul_((scale.float() * scale_2).unsqueeze(-1)).view(packed.shape[0], -1)


def check_nvfp4(quantization: dict, where: object) -> None:
    """Raise SourceFormatUnknown unless a ModelOpt config is the NVFP4 that is read here."""
    algorithm = quantization.get("quant_algo")
    if algorithm not in ALGORITHMS:
        raise SourceFormatUnknown(
            f"this ModelOpt checkpoint has the quant_algo {algorithm!r}",
            where=where,
            fix=f"kconv reads {' and '.join(ALGORITHMS)}.",
        )


def nvfp4_of(base: str, tensors: dict[str, TensorInfo]) -> Nvfp4:
    """Return the weight of a module whose `weight_scale_2` was found.

    Raises:
        SourceFormatUnknown: a part is missing, or of another dtype.
        TensorShape: the scales are not one for each sixteen values.
    """
    parts = {suffix: tensors.get(f"{base}.{suffix}") for suffix in ("weight", "weight_scale", "weight_scale_2")}
    held = {suffix: info.dtype if info else "missing" for suffix, info in parts.items()}
    if held != {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32"}:
        raise SourceFormatUnknown(
            f"{base} is no NVFP4 weight: " + ", ".join(f"{suffix} is {dtype}" for suffix, dtype in held.items()),
            where=base,
            fix="Export or quantize the target again.",
        )
    weight, scale, scale_2 = (info for info in parts.values() if info)
    fits = len(weight.shape) == 2 and scale.shape == (weight.shape[0], weight.shape[1] * 2 // GROUP)
    if not fits or weight.shape[1] * 2 % GROUP or scale_2.shape not in ((), (1,)):
        raise TensorShape(
            f"{scale.name} is {list(scale.shape)}, which is not one for each {GROUP} of {list(weight.shape)} x 2",
            where=scale.file,
            fix="Export or quantize the target again.",
        )
    return Nvfp4(weight, scale, scale_2)
