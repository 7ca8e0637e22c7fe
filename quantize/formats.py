"""NVFP4 as engines read it: tensors, fused modules, config blocks.

ModelOpt's names: https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/export/quant_utils.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

GROUP_SIZE = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0

# Engines take the reciprocal of an input_scale in float32; for a denormal number it may be infinite:
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/quantization/modelopt.py#L2097
SMALLEST_SCALE = 2.0**-126
# The next norm squares a product of an activation in float32; beyond this a square is infinite.
LARGEST_AMAX = 2.0**64

# Suffix: dtype, and the shape of the tensor for a weight [out, in].
TENSORS: dict[str, tuple[str, Callable[[int, int], tuple[int, ...]]]] = {
    "weight": ("U8", lambda rows, columns: (rows, columns // 2)),
    "weight_scale": ("F8_E4M3", lambda rows, columns: (rows, columns // GROUP_SIZE)),
    "weight_scale_2": ("F32", lambda rows, columns: ()),
    "input_scale": ("F32", lambda rows, columns: ()),
}
# Modules that engines fuse and for which only one weight_scale_2 survives, by the last part of their names.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
)
_FIRST = {member: members[0] for members in FUSED for member in members}
KV_CACHE_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}
PRODUCER = {"name": "modelopt", "version": "0.47.0"}


def is_scale(value: float) -> bool:
    """Return whether float32 can calculate with a scale of a whole module: weight_scale_2, or input_scale."""
    return SMALLEST_SCALE <= value < LARGEST_AMAX / (E2M1_MAX * E4M3_MAX)


def weight_tensors(module: str, shape: Sequence[int]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each tensor of a module in NVFP4, by its name.

    Args:
        module: e.g. "model.layers.1.mlp.experts.0.up_proj".
        shape: [out, in] of its weight.
    """
    rows, columns = shape
    return {f"{module}.{suffix}": (dtype, extent(rows, columns)) for suffix, (dtype, extent) in TENSORS.items()}


def fused_group(module: str) -> str:
    """Return a name that only the modules fused with this one share."""
    parent, _, last = module.rpartition(".")
    return f"{parent}.{_FIRST.get(last, last)}"


def quantization_config(*, weight_only: bool, kv_cache: str, exclude: Sequence[str]) -> dict[str, Any]:
    """Return config.json's `quantization_config`."""
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP_SIZE}
    group = {"input_activations": None if weight_only else numbers, "weights": numbers, "targets": ["Linear"]}
    scheme = {"kv_cache_scheme": KV_CACHE_SCHEME} if kv_cache == "fp8" else {}
    return {
        "config_groups": {"group_0": group},
        "ignore": list(exclude),
        "quant_algo": _algorithm(weight_only),
        **scheme,
        "producer": PRODUCER,
        "quant_method": "modelopt",
    }


def hf_quant_config(*, weight_only: bool, kv_cache: str, exclude: Sequence[str]) -> dict[str, Any]:
    """Return hf_quant_config.json."""
    return {
        "producer": PRODUCER,
        "quantization": {
            "quant_algo": _algorithm(weight_only),
            "kv_cache_quant_algo": "FP8" if kv_cache == "fp8" else None,
            "group_size": GROUP_SIZE,
            "exclude_modules": list(exclude),
        },
    }


def _algorithm(weight_only: bool) -> str:
    return "W4A16_NVFP4" if weight_only else "NVFP4"
