"""Which of a head's linear layers are quantized, and how.

The arithmetic is ModelOpt's own, bit for bit: FP8 has one scale per tensor, NVFP4 an e4m3 scale for each sixteen values
of a row and one for the tensor. Each scale is a multiplier: a value is the stored number times the scale.
https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/export/quant_utils.py#L869-L881

Only layers that every engine reading the head builds quantized are quantized. These stay unquantized:

- `fc`: SGLang and older TensorRT-LLM build it plain, and would silently read packed bytes as weights. It reads the
  target's raw states, whose few large values would set the scale for all; and it runs once per draft, not per token.
- an MLA head's attention, as in the published Kimi-K2 targets. TensorRT-LLM loads no `weight_scale` of the fused
  q_a_proj and kv_a_proj_with_mqa in FP8, SGLang cannot join theirs, and both want kv_b_proj plain.
- `lm_head` and the embedding, which are the target's or grew from there, and the norms.

https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/llama_eagle3.py
https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/kimi_k25_eagle3.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...checkpoint import formats
from ...checkpoint.formats import StoredFormat, fused_group
from ...drafters.slots import needs
from ...drafters.spec import Gqa, HeadSpec
from ...errors import TensorShape
from ..pack import pack


@dataclass(frozen=True)
class LinearFormat:
    """A format in which engines read a linear layer and its input.

    Attributes:
        stored: the tensors on disk.
        pack: converts a weight `[out, in]` and its scale to the stored tensors, by the suffix of their names.
        round: rounds an input `[..., in]` by its scale as an engine does, in the input's dtype.
        finer: the format to try if this one loses too much.
    """

    stored: StoredFormat
    pack: Callable[[Tensor, Tensor], dict[str, Tensor]]
    round: Callable[[Tensor, Tensor], Tensor]
    finer: LinearFormat | None = None

    @property
    def name(self) -> str:
        """ModelOpt's `quant_algo`."""
        return self.stored.name

    @property
    def option(self) -> str:
        """Its name for `kconv quantize-head --format`."""
        return self.name.lower()

    @property
    def largest(self) -> float:
        """The largest magnitude that a scale of 1 holds."""
        return self.stored.largest

    @property
    def scales(self) -> tuple[str, ...]:
        """Suffixes of the tensors stored with a weight."""
        return tuple(self.stored.scales)

    def scale(self, amax: float) -> Tensor:
        """Return the smallest scale with which a largest magnitude fits, fp32 []."""
        return torch.tensor(amax, dtype=torch.float32) / self.largest


def _pack_fp8(weight: Tensor, scale: Tensor) -> dict[str, Tensor]:
    # The quotient is first rounded to the weight's dtype, as in ModelOpt.
    return {formats.FP8.values: (weight / scale).to(torch.float8_e4m3fn), formats.FP8.scale: scale}


def _round_fp8(x: Tensor, scale: Tensor) -> Tensor:
    # Engines clip larger values; torch would make them NaN.
    stored = (x / scale).clamp(-formats.E4M3_MAX, formats.E4M3_MAX).to(torch.float8_e4m3fn)
    return stored.to(x.dtype) * scale


def _pack_nvfp4(weight: Tensor, scale: Tensor) -> dict[str, Tensor]:
    return pack(weight, float(scale)).stored(scale)


def _round_nvfp4(x: Tensor, scale: Tensor) -> Tensor:
    # The input's groups have their own scales, computed at run time: it is packed like a weight.
    return formats.NVFP4.unpack(_pack_nvfp4(x.flatten(0, -2), scale)).view(x.shape).to(x.dtype)


FP8 = LinearFormat(formats.FP8, _pack_fp8, _round_fp8)
NVFP4 = LinearFormat(formats.NVFP4, _pack_nvfp4, _round_nvfp4, finer=FP8)
FORMATS = {format_.option: format_ for format_ in (FP8, NVFP4)}

MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Choice:
    """Which linear layers of one kind of head are quantized.

    Attributes:
        exclude: entries of `ignore` that cover the rest. Engines number and name a draft's layers differently
            (`model.layers.61`, `model.midlayer`), so an entry omits the prefix. Each entry occurs twice: TensorRT-LLM
            matches it as a wildcard, SGLang's FP8 as a part of a name, and vLLM as both. None matches the bare word
            `kv_b_proj`, for which TensorRT-LLM would look up scales of FP8 blocks.
    """

    quantized: tuple[str, ...]
    exclude: tuple[str, ...]


GQA = Choice(("q_proj", "k_proj", "v_proj", "o_proj", *MLP), ("lm_head", "fc", "*.fc"))
MLA = Choice(MLP, (*GQA.exclude, "self_attn", "*.self_attn*"))


def choice_of(spec: HeadSpec) -> Choice:
    return GQA if isinstance(spec.attention, Gqa) else MLA


def groups_of(spec: HeadSpec, format_: LinearFormat) -> list[tuple[str, ...]]:
    """Return the slots to quantize, grouped where engines fuse them and give them one scale."""
    known, found = needs(spec), dict[str, list[str]]()
    for layer in range(spec.layers):
        for name in choice_of(spec).quantized:
            slot = f"{layer}.{name}"
            columns = known[slot].shape[1]
            if columns % format_.stored.group:
                raise TensorShape(
                    f"{slot} has {columns} columns, but {format_.name} needs groups of {format_.stored.group}",
                    where=slot,
                    fix="Choose another format.",
                )
            found.setdefault(fused_group(slot), []).append(slot)
    return [tuple(group) for group in found.values()]
