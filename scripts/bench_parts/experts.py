"""Synthetic INT4 experts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

HIDDEN, INNER, EXPERTS, LAYERS, GROUP = 7168, 2048, 384, 61, 32
SHAPES = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
EXPERT_BYTES = sum(rows * columns // 2 + rows * columns // GROUP * 2 for rows, columns in SHAPES.values())
PER_SHARD = 40  # experts, a gigabyte
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS, "vocab_size": 163840, "num_attention_heads": 64, "max_position_embeddings": 262144,
    "n_routed_experts": EXPERTS, "moe_intermediate_size": INNER, "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}}},
    },
}  # fmt: skip


def make_source(folder: Path, experts: int) -> None:
    """Write INT4 experts: random nibbles, and scales as a trained weight has them."""
    import numpy as np

    from kconv.checkpoint.header import build_header

    generator = np.random.default_rng(0)
    folder.mkdir()
    nibbles = generator.integers(0, 256, INNER * HIDDEN // 2, dtype=np.uint8)
    scales = (generator.uniform(0.002, 0.006, INNER * HIDDEN // GROUP).astype(np.float32).view(np.uint32) >> 16).astype(
        "<u2"
    )
    weight_map = {}
    for shard, first in enumerate(range(0, experts, PER_SHARD), 1):
        file = f"model-{shard:05d}-of-{-(-experts // PER_SHARD):06d}.safetensors"
        names = [
            (f"model.layers.{1 + number // EXPERTS}.mlp.experts.{number % EXPERTS}.{part}", rows, columns)
            for number in range(first, min(first + PER_SHARD, experts))
            for part, (rows, columns) in SHAPES.items()
        ]
        entries = [
            entry
            for base, rows, columns in names
            for entry in (
                (f"{base}.weight_packed", "I32", (rows, columns // 8)),
                (f"{base}.weight_scale", "BF16", (rows, columns // GROUP)),
                (f"{base}.weight_shape", "I64", (2,)),
            )
        ]
        with (folder / file).open("wb") as out:
            out.write(build_header(entries, {"format": "pt"}))
            for i, (_, rows, columns) in enumerate(names):
                out.write((nibbles ^ np.uint8((3 * first + i) % 256)).data)
                out.write(np.roll(scales, first + i).data)
                out.write(np.array([rows, columns], "<i8").data)
            os.fsync(out.fileno())
        weight_map |= {name: file for name, _, _ in entries}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))


def packing_rates() -> dict[str, float]:
    """Return million elements a second on one core: ModelOpt from bf16, and the INT4 road, unpacking included."""
    import torch
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    from kconv.checkpoint.formats import Int4
    from kconv.quantize.int4_to_nvfp4 import Int4Packer, fastest

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(-(2**31), 2**31, (INNER, HIDDEN // 8), generator=generator).int()
    scale = torch.empty(INNER, HIDDEN // GROUP).uniform_(0.002, 0.006, generator=generator).bfloat16()
    bits = scale.view(torch.uint16).numpy().reshape(-1)
    plain = Int4((GROUP,)).unpack({Int4.values: packed, Int4.scale: scale})
    scale_2 = plain.abs().amax().float() / (6 * 448)

    def modelopt() -> None:
        NVFP4QTensor.quantize(plain, 16, None, scale_2, try_tensorrt=False)

    def ours() -> None:
        fastest().tops(packed.view(torch.uint8).numpy().reshape(-1, 8), bits)  # for the amax
        Int4Packer(float(scale_2)).pack(packed, scale)

    def best(call: Callable[[], None], times: int) -> float:
        call()
        seconds = []
        for _ in range(times):
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        return INNER * HIDDEN / min(seconds) / 1e6

    return {"modelopt": best(modelopt, 3), "int4": best(ours, 5)}
