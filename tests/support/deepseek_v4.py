"""A tiny target as NVIDIA publishes DeepSeek-V4: NVFP4 experts amid FP8, MTP in its source's MXFP4; and the source.

The config is what ModelOpt's script makes of the source's; the names are those that vLLM maps:
https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/examples/deepseek/deepseek_v4/quantize_to_nvfp4.py
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/models/deepseek_v4/nvidia/model.py#L1712-L1764
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, EXPERT, LAYERS, EXPERTS = 256, 128, 3, 2
PRODUCER = {"name": "modelopt", "version": "dsv4-nvfp4-experts"}
FP4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
MOE: dict[str, Any] = {
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_quant_algo": None,
    "group_size": 16,
    "quantized_layers": {f"layers.{i}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16} for i in range(LAYERS)},
}
EXCLUDES = ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"]
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "expert_dtype": "fp4",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": EXPERT,
    "n_routed_experts": EXPERTS,
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 2,
    "q_lora_rank": 128,
    "vocab_size": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "moe_quant_algo": "NVFP4",
        "producer": PRODUCER,
        "config_groups": {"group_0": {"input_activations": FP4, "weights": FP4, "targets": ["Linear"]}},
        "ignore": EXCLUDES,
        **MOE,
    },
}
# What the source's config states of its quantization.
OF_SOURCE = ("activation_scheme", "fmt", "scale_fmt", "quant_method", "weight_block_size")
# Rows and columns, below a layer.
ATTENTION = {
    "wq_a": (128, HIDDEN), "wq_b": (256, 128), "wkv": (128, HIDDEN), "wo_a": (128, 256), "wo_b": (HIDDEN, 128),
    "indexer.wq_b": (128, 128),
}  # fmt: skip
PLAIN = {
    "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn.q_norm": (128,), "attn.kv_norm": (128,),
    "attn.compressor.wkv": (128, HIDDEN), "attn.compressor.wgate": (128, HIDDEN),
    "attn.indexer.weights_proj": (2, HIDDEN), "ffn.gate": (EXPERTS, HIDDEN),
}  # fmt: skip
MLP = {"w1": (EXPERT, HIDDEN), "w3": (EXPERT, HIDDEN), "w2": (HIDDEN, EXPERT)}
Tensors = dict[str, torch.Tensor]


def fp8(rows: int, columns: int) -> Tensors:
    scale = torch.ones(-(-rows // 128), -(-columns // 128)).to(torch.float8_e8m0fnu)
    return {"weight": torch.ones(rows, columns).to(torch.float8_e4m3fn), "scale": scale}


def mxfp4(rows: int, columns: int) -> Tensors:
    generator = torch.Generator().manual_seed(rows + columns)
    scale = torch.randint(118, 126, (rows, columns // 32), generator=generator, dtype=torch.uint8)
    packed = torch.randint(-128, 128, (rows, columns // 2), generator=generator, dtype=torch.int8)
    return {"weight": packed, "scale": scale.view(torch.float8_e8m0fnu)}


def nvfp4(rows: int, columns: int) -> Tensors:
    return {
        "weight": torch.ones(rows, columns // 2, dtype=torch.uint8),
        "weight_scale": torch.ones(rows, columns // 16).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.01),
        "input_scale": torch.tensor(0.5),
    }


def write_source(folder: Path) -> Path:
    """Write what DeepSeek publishes of it into a folder that is not there yet."""
    _write(folder, mxfp4)
    block = {key: value for key, value in CONFIG["quantization_config"].items() if key in OF_SOURCE}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": block}))
    return folder


def write_deepseek_v4(folder: Path) -> Path:
    """Write it into a folder that is not there yet."""
    _write(folder, nvfp4)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    side = {"producer": PRODUCER, "quantization": {**MOE, "exclude_modules": EXCLUDES}}
    (folder / "hf_quant_config.json").write_text(json.dumps(side))
    return folder


def _write(folder: Path, experts: Callable[[int, int], Tensors]) -> None:
    made: dict[str, Tensors] = {}
    for layer in (*(f"layers.{i}" for i in range(LAYERS)), "mtp.0"):
        made |= {f"{layer}.{name}": {"weight": torch.ones(shape).bfloat16()} for name, shape in PLAIN.items()}
        made |= {f"{layer}.attn.{name}": fp8(*shape) for name, shape in ATTENTION.items()}
        made |= {f"{layer}.ffn.shared_experts.{name}": fp8(*shape) for name, shape in MLP.items()}
        expert = mxfp4 if layer.startswith("mtp") else experts
        made |= {f"{layer}.ffn.experts.{i}.{name}": expert(*MLP[name]) for i in range(EXPERTS) for name in MLP}
    made |= {f"mtp.0.{name}": fp8(HIDDEN, HIDDEN) for name in ("e_proj", "h_proj")}
    made |= {f"mtp.0.{name}": {"weight": torch.ones(HIDDEN).bfloat16()} for name in ("enorm", "hnorm", "norm")}
    made |= {name: {"weight": torch.ones(64, HIDDEN).bfloat16()} for name in ("embed", "head")}
    made["norm"] = {"weight": torch.ones(HIDDEN).bfloat16()}
    folder.mkdir()
    tensors = {f"{name}.{suffix}": tensor for name, parts in made.items() for suffix, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors")
