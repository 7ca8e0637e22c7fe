"""The formats of a head's linears.

What is done is ModelOpt's own arithmetic, bit for bit: FP8 is one scale for a whole tensor, NVFP4 an e4m3 scale for
each sixteen values of a row and one for the tensor. Each scale is a multiplier: a value is the stored number times it.
https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/export/quant_utils.py#L869-L881
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...targets.weights import dequantize_nvfp4
from ..formats import E2M1_MAX, E4M3_MAX, GROUP_SIZE, PRODUCER
from ..pack import pack


@dataclass(frozen=True)
class Format:
    """A format in which engines read a linear and its input.

    Attributes:
        name: ModelOpt's `quant_algo`.
        scales: suffixes of the tensors beside a weight.
        largest: the largest magnitude that a scale of 1 holds.
        columns: what the number of a weight's columns must be a multiple of.
        numbers: how config.json describes weights and inputs.
        pack: a weight `[out, in]` and its scale to the tensors that are stored, by the suffix of their names.
        unpack: these tensors to the weight that they stand for, fp32 `[out, in]`.
        round: an input `[..., in]` and its scale to what an engine makes of it, in the input's dtype.
        finer: the format to try where this one loses too much.
    """

    name: str
    scales: tuple[str, ...]
    largest: float
    columns: int
    numbers: Mapping[str, Any]
    pack: Callable[[Tensor, Tensor], dict[str, Tensor]]
    unpack: Callable[[Mapping[str, Tensor]], Tensor]
    round: Callable[[Tensor, Tensor], Tensor]
    finer: Format | None = None

    @property
    def option(self) -> str:
        """What `kconv quantize-head --format` calls it."""
        return self.name.lower()

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
    stored = (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return stored.to(x.dtype) * scale


def _pack_nvfp4(weight: Tensor, scale: Tensor) -> dict[str, Tensor]:
    packed = pack(weight, float(scale))
    return {"weight": packed.weight, "weight_scale": packed.weight_scale, "weight_scale_2": scale}


def _unpack_nvfp4(stored: Mapping[str, Tensor]) -> Tensor:
    return dequantize_nvfp4(stored["weight"], stored["weight_scale"], stored["weight_scale_2"])


def _round_nvfp4(x: Tensor, scale: Tensor) -> Tensor:
    # The input's groups have scales of their own, found while it is computed with: it is packed as a weight is.
    return _unpack_nvfp4(_pack_nvfp4(x.flatten(0, -2), scale)).view(x.shape).to(x.dtype)


FP8 = Format(
    "FP8",
    ("weight_scale", "input_scale"),
    E4M3_MAX,
    1,
    {"dynamic": False, "num_bits": 8, "type": "float"},
    _pack_fp8,
    _unpack_fp8,
    _round_fp8,
)
NVFP4 = Format(
    "NVFP4",
    ("weight_scale", "weight_scale_2", "input_scale"),
    E2M1_MAX * E4M3_MAX,
    GROUP_SIZE,
    {"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP_SIZE},
    _pack_nvfp4,
    _unpack_nvfp4,
    _round_nvfp4,
    finer=FP8,
)
FORMATS = {format_.option: format_ for format_ in (FP8, NVFP4)}


def config_block(format_: Format, exclude: Sequence[str]) -> dict[str, Any]:
    """Return config.json's `quantization_config`, which vLLM and SGLang read."""
    numbers = dict(format_.numbers)
    return {
        "config_groups": {"group_0": {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}},
        "ignore": list(exclude),
        "quant_algo": format_.name,
        "producer": PRODUCER,
        "quant_method": "modelopt",
    }


def side_file(format_: Format, exclude: Sequence[str]) -> dict[str, Any]:
    """Return hf_quant_config.json, which TensorRT-LLM reads."""
    group = {"group_size": format_.numbers["group_size"]} if "group_size" in format_.numbers else {}
    details = {"quant_algo": format_.name, "kv_cache_quant_algo": None, **group, "exclude_modules": list(exclude)}
    return {"producer": PRODUCER, "quantization": details}
