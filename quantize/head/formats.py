"""Which of a head's linears are quantized, and how.

What is done is ModelOpt's own arithmetic, bit for bit: FP8 is one scale for a whole tensor, NVFP4 an e4m3 scale for
each sixteen values of a row and one for the tensor. Each scale is a multiplier: a value is the stored number times it.
https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/export/quant_utils.py#L869-L881

Only what every engine that reads the head builds quantized. Left as they are:

- `fc`: SGLang and older TensorRT-LLM build it plain, and would read packed bytes as weights in silence. It reads the
  target's raw states, whose few large values would set the scale of all; and it runs once per draft, not per token.
- an MLA head's attention, as in the published Kimi-K2 targets. TensorRT-LLM loads no `weight_scale` of the fused
  q_a_proj and kv_a_proj_with_mqa in FP8, SGLang cannot join theirs, and both want kv_b_proj plain.
- `lm_head` and the embedding, which are the target's or grew from there, and the norms.

https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/llama_eagle3.py
https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/kimi_k25_eagle3.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...checkpoint import formats
from ...checkpoint.formats import StoredFormat
from ...errors import TensorShape
from ...head.slots import needs
from ...head.spec import Gqa, HeadSpec
from ...targets.weights import dequantize_nvfp4
from ..formats import fused_group
from ..pack import pack


@dataclass(frozen=True)
class LinearFormat:
    """A format in which engines read a linear and its input.

    Attributes:
        stored: the tensors on disk.
        pack: a weight `[out, in]` and its scale to the tensors that are stored, by the suffix of their names.
        unpack: these tensors to the weight that they stand for, fp32 `[out, in]`.
        round: an input `[..., in]` and its scale to what an engine makes of it, in the input's dtype.
        finer: the format to try where this one loses too much.
    """

    stored: StoredFormat
    pack: Callable[[Tensor, Tensor], dict[str, Tensor]]
    unpack: Callable[[Mapping[str, Tensor]], Tensor]
    round: Callable[[Tensor, Tensor], Tensor]
    finer: LinearFormat | None = None

    @property
    def name(self) -> str:
        """ModelOpt's `quant_algo`."""
        return self.stored.name

    @property
    def option(self) -> str:
        """What `kconv quantize-head --format` calls it."""
        return self.name.lower()

    @property
    def largest(self) -> float:
        """The largest magnitude that a scale of 1 holds."""
        return self.stored.largest

    @property
    def scales(self) -> tuple[str, ...]:
        """Suffixes of the tensors beside a weight."""
        return tuple(self.stored.scales)

    def scale(self, amax: float) -> Tensor:
        """Return the scale, fp32 [], by which a largest magnitude just fits."""
        return torch.tensor(amax, dtype=torch.float32) / self.largest


def _pack_fp8(weight: Tensor, scale: Tensor) -> dict[str, Tensor]:
    # The quotient is rounded to the weight's dtype on its way, as in ModelOpt.
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def _unpack_fp8(stored: Mapping[str, Tensor]) -> Tensor:
    return stored["weight"].float() * stored["weight_scale"]


def _round_fp8(x: Tensor, scale: Tensor) -> Tensor:
    # Engines cut off what is larger; torch makes NaN of it.
    stored = (x / scale).clamp(-formats.E4M3_MAX, formats.E4M3_MAX).to(torch.float8_e4m3fn)
    return stored.to(x.dtype) * scale


def _pack_nvfp4(weight: Tensor, scale: Tensor) -> dict[str, Tensor]:
    packed = pack(weight, float(scale))
    return {"weight": packed.weight, "weight_scale": packed.weight_scale, "weight_scale_2": scale}


def _unpack_nvfp4(stored: Mapping[str, Tensor]) -> Tensor:
    return dequantize_nvfp4(stored["weight"], stored["weight_scale"], stored["weight_scale_2"])


def _round_nvfp4(x: Tensor, scale: Tensor) -> Tensor:
    # The input's groups have scales of their own, found while it is computed with: it is packed as a weight is.
    return _unpack_nvfp4(_pack_nvfp4(x.flatten(0, -2), scale)).view(x.shape).to(x.dtype)


FP8 = LinearFormat(formats.FP8, _pack_fp8, _unpack_fp8, _round_fp8)
NVFP4 = LinearFormat(formats.NVFP4, _pack_nvfp4, _unpack_nvfp4, _round_nvfp4, finer=FP8)
FORMATS = {format_.option: format_ for format_ in (FP8, NVFP4)}

MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Choice:
    """What becomes of the linears of one kind of head.

    Attributes:
        quantized: names in each layer.
        exclude: entries of `ignore` that cover the rest. Engines number and name a draft's layers each their own way
            (`model.layers.61`, `model.midlayer`), so an entry says nothing of what stands before it. It is there twice:
            TensorRT-LLM tests it as a wildcard, SGLang's FP8 as a part of a name, and vLLM as both. None matches the
            bare word `kv_b_proj`, for which TensorRT-LLM would look up scales of FP8 blocks.
    """

    quantized: tuple[str, ...]
    exclude: tuple[str, ...]


GQA = Choice(("q_proj", "k_proj", "v_proj", "o_proj", *MLP), ("lm_head", "fc", "*.fc"))
MLA = Choice(MLP, (*GQA.exclude, "self_attn", "*.self_attn*"))


def choice_of(spec: HeadSpec) -> Choice:
    """Return what becomes of a head's linears."""
    return GQA if isinstance(spec.attention, Gqa) else MLA


def groups_of(spec: HeadSpec, format_: LinearFormat) -> list[tuple[str, ...]]:
    """Return the slots that are quantized, those together that engines fuse and give one scale.

    Raises:
        TensorShape: a weight's rows cannot be cut into the format's groups.
    """
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
