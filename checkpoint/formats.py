"""How quantized weights are stored: the one description of NVFP4, FP8 and INT4.

A module's weight `[rows, columns]` is stored as several tensors, `<module>.<suffix>`: its values and its scales.
Each scale is a multiplier. ModelOpt's names and numbers:
https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/export/quant_utils.py
compressed-tensors' INT4:
https://github.com/vllm-project/compressed-tensors/blob/0.17.0/src/compressed_tensors/compressors/pack_quantized/base.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

Shape = tuple[int, ...]

# Where a config describes the quantization; ModelOpt's exporter also writes the second one, as a file.
CONFIG_KEY, SIDE_FILE = "quantization_config", "hf_quant_config.json"
PRODUCER = {"name": "modelopt", "version": "0.47.0"}
KV_CACHE_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}

# The largest magnitude of each float type.
E2M1_MAX, E4M3_MAX = 6.0, 448.0
GROUP_SIZE = 16  # columns of an NVFP4 group
BLOCK = 128  # rows and columns of DeepSeek's FP8 block


@dataclass(frozen=True)
class FormatTensor:
    """One of the tensors that make up a quantized weight.

    Attributes:
        dtypes: the safetensors dtypes it may have; the first is what kconv writes.
        shapes: the shapes it may have, from the weight's rows and columns; the first is what kconv writes.
        is_needed: whether reading the weight requires it.
    """

    dtypes: tuple[str, ...]
    shapes: Callable[[int, int], tuple[Shape, ...]]
    is_needed: bool = True

    @property
    def dtype(self) -> str:
        """What kconv writes."""
        return self.dtypes[0]


@dataclass(frozen=True)
class StoredFormat:
    """How a quantized weight is stored.

    Attributes:
        name: ModelOpt's `quant_algo`, if it has one.
        tensors: by suffix; values first.
        columns: how many columns one stored element holds.
        group: how many columns share a scale; 1 if rows are not split into groups.
        largest: the largest magnitude with scales of 1.
        numbers: the description of weights and inputs in config.json's `config_groups`.
    """

    name: str
    tensors: Mapping[str, FormatTensor]
    columns: int = 1
    group: int = 1
    largest: float = 0.0
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def values(self) -> FormatTensor:
        """The values."""
        return next(iter(self.tensors.values()))

    @property
    def scales(self) -> dict[str, FormatTensor]:
        """The tensors other than the values, by suffix."""
        return dict(list(self.tensors.items())[1:])


def _scalar(rows: int, columns: int) -> tuple[Shape, ...]:
    return (), (1,)


_INPUT_SCALE = FormatTensor(("F32",), _scalar, is_needed=False)

NVFP4 = StoredFormat(
    "NVFP4",
    {
        # The low nibble of a byte holds the even column.
        "weight": FormatTensor(("U8",), lambda rows, columns: ((rows, columns // 2),)),
        "weight_scale": FormatTensor(("F8_E4M3",), lambda rows, columns: ((rows, columns // GROUP_SIZE),)),
        "weight_scale_2": FormatTensor(("F32",), _scalar),
        "input_scale": _INPUT_SCALE,
    },
    columns=2,
    group=GROUP_SIZE,
    largest=E2M1_MAX * E4M3_MAX,
    numbers={"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP_SIZE},
)
FP8 = StoredFormat(
    "FP8",
    {
        "weight": FormatTensor(("F8_E4M3",), lambda rows, columns: ((rows, columns),)),
        "weight_scale": FormatTensor(("F32",), lambda rows, columns: ((), (1,), (rows, 1), (rows,))),
        "input_scale": _INPUT_SCALE,
    },
    largest=E4M3_MAX,
    numbers={"dynamic": False, "num_bits": 8, "type": "float"},
)


def fp8_blocks(height: int = BLOCK, width: int = BLOCK) -> StoredFormat:
    """Return DeepSeek's FP8; one block of this many rows and columns shares a scale."""
    return StoredFormat(
        "FP8, in blocks",
        {
            "weight": FormatTensor(("F8_E4M3",), lambda rows, columns: ((rows, columns),)),
            "weight_scale_inv": FormatTensor(
                ("F32", "BF16"), lambda rows, columns: ((ceil(rows / height), ceil(columns / width)),)
            ),
        },
        group=width,
        largest=E4M3_MAX,
    )


def int4(group: int) -> StoredFormat:
    """Return compressed-tensors' INT4; one group of this many columns shares a scale."""
    return StoredFormat(
        "INT4",
        {
            # The lowest four bits hold the first of eight columns; each is stored as its value plus 8.
            "weight_packed": FormatTensor(("I32",), lambda rows, columns: ((rows, ceil(columns / 8)),)),
            "weight_scale": FormatTensor(
                ("BF16", "F16", "F32"), lambda rows, columns: ((rows, ceil(columns / group)),)
            ),
            "weight_shape": FormatTensor(("I64", "I32"), lambda rows, columns: ((2,),)),
        },
        columns=8,
        group=group,
        largest=8.0,
    )


def quantization_config(
    format_: StoredFormat, exclude: Sequence[str], *, weight_only: bool = False, kv_cache: str = ""
) -> dict[str, Any]:
    """Return config.json's `quantization_config` as ModelOpt writes it, which vLLM and SGLang read.

    Args:
        format_: NVFP4 or FP8.
        exclude: names or name patterns of modules that stay unquantized.
        weight_only: whether engines leave the inputs unquantized.
        kv_cache: "fp8" for an FP8 KV cache.
    """
    numbers = dict(format_.numbers)
    group = {"input_activations": None if weight_only else numbers, "weights": numbers, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": group},
        "ignore": list(exclude),
        "quant_algo": _algorithm(format_, weight_only),
        **({"kv_cache_scheme": KV_CACHE_SCHEME} if kv_cache == "fp8" else {}),
        "producer": PRODUCER,
        "quant_method": "modelopt",
    }


def hf_quant_config(
    format_: StoredFormat, exclude: Sequence[str], *, weight_only: bool = False, kv_cache: str = ""
) -> dict[str, Any]:
    """Return hf_quant_config.json, which TensorRT-LLM reads; options as for `quantization_config`."""
    group = {"group_size": format_.group} if format_.group > 1 else {}
    return {
        "producer": PRODUCER,
        "quantization": {
            "quant_algo": _algorithm(format_, weight_only),
            "kv_cache_quant_algo": "FP8" if kv_cache == "fp8" else None,
            **group,
            "exclude_modules": list(exclude),
        },
    }


def _algorithm(format_: StoredFormat, weight_only: bool) -> str:
    return f"W4A16_{format_.name}" if weight_only else format_.name
