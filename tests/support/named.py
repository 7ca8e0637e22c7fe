"""Heads under the very tensor names of their makers, small, with random weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support import heads
from support.configs import TORCHSPEC_MHA, cut

from kconv.checkpoint.folder import Checkpoint, open_checkpoint

MLA = replace(heads.MLA, captured=(1, 29, 57))
MHA = replace(heads.MHA, captured=(1, 29, 57), rope=MLA.rope)
GQA = replace(heads.GQA, captured=(1, 29, 57))
MLA_PARTS = {
    "q_a_proj": (24, 96), "q_a_layernorm": (24,), "q_b_proj": (80, 24), "kv_a_proj_with_mqa": (40, 96),
    "kv_a_layernorm": (32,), "kv_b_proj": (112, 32), "o_proj": (48, 64),
}  # fmt: skip
MHA_PARTS = {"q_proj": (32, 96), "k_proj": (32, 96), "v_proj": (32, 96), "o_proj": (48, 32)}
GQA_PARTS = {"q_proj": (64, 96), "k_proj": (32, 96), "v_proj": (32, 96), "o_proj": (48, 64)}
REST = {
    "input_layernorm": (48,), "hidden_norm": (48,), "post_attention_layernorm": (48,),
    "mlp.gate_proj": (40, 48), "mlp.up_proj": (40, 48), "mlp.down_proj": (48, 40),
}  # fmt: skip
OUTSIDE = {"fc.weight": (48, 144), "norm.weight": (48,)}
EMBED, LM_HEAD = {"embed_tokens.weight": (64, 48)}, {"lm_head.weight": (64, 48)}


Shapes = dict[str, tuple[int, ...]]


def layer(prefix: str, attention: Shapes) -> Shapes:
    """Return the shapes of a decoder layer by name."""
    shapes = {f"{prefix}.self_attn.{part}.weight": shape for part, shape in attention.items()}
    return shapes | {f"{prefix}.{part}.weight": shape for part, shape in REST.items()}


def fill(shapes: Shapes, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return random tensors of these shapes."""
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def maps(kept: int = 40, vocab: int = 64) -> dict[str, torch.Tensor]:
    """Return the two maps of a head that drafts every token from number `vocab - kept` on."""
    marks = torch.arange(vocab) >= vocab - kept
    return {"d2t": torch.full((kept,), vocab - kept, dtype=torch.int64), "t2d": marks}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Checkpoint:
    """Write a checkpoint folder and open it."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return a dict without some of its keys."""
    return {key: value for key, value in config.items() if key not in keys}


TORCHSPEC = layer("midlayer", MLA_PARTS) | OUTSIDE | LM_HEAD | EMBED
NVIDIA = layer("layers.0", MLA_PARTS) | OUTSIDE | LM_HEAD
SPEC_FORGE = layer("midlayer", GQA_PARTS) | OUTSIDE | EMBED | {"lm_head.weight": (40, 48)}
LLAMA = without(cut(TORCHSPEC_MHA, GQA), "use_sliding_window", "rope_scaling") | {
    "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
}  # fmt: skip
