"""Heads of random weights, in any layout, for tests: written by safetensors' own writer, not by kconv's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from kconv.checkpoint.tensors import TORCH
from kconv.convert.layout import Layout, stored
from kconv.head.slots import needs
from kconv.head.spec import Gqa, HeadSpec, Mla, Rope, Yarn

YARN = Yarn(factor=64.0, original_max_positions=4096, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
MLA = HeadSpec(
    attention=Mla(4, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16),
    hidden=48,
    target_hidden=48,
    intermediate=40,
    layers=1,
    vocab=64,
    draft_vocab=64,
    rope=Rope(50000.0, YARN),
    captured=(1, 3, 5),
    eps=1e-5,
    dtype="BF16",
    max_positions=1024,
)
GQA = replace(MLA, attention=Gqa(4, kv_heads=2, head_dim=16), rope=Rope(10000.0))
MHA = replace(GQA, attention=Gqa(4, kv_heads=4, head_dim=8))


def random_slots(spec: HeadSpec, seed: int = 0, without: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Return a random tensor for each slot of a spec; d2t as a valid map, in offsets."""
    generator = torch.Generator().manual_seed(seed)
    slots: dict[str, torch.Tensor] = {}
    for name, need in needs(spec).items():
        if name == "d2t":
            kept = torch.randperm(spec.vocab, generator=generator)[: spec.draft_vocab].sort().values
            slots[name] = kept - torch.arange(spec.draft_vocab)
        elif name == "t2d":
            kept = slots["d2t"] + torch.arange(spec.draft_vocab)
            slots[name] = torch.zeros(spec.vocab, dtype=torch.bool).index_fill(0, kept, True)
        else:
            slots[name] = torch.randn(need.shape, generator=generator).to(TORCH[spec.dtype])
    return {name: tensor for name, tensor in slots.items() if name not in without}


def write_head(
    folder: Path, layout: Layout, spec: HeadSpec, slots: dict[str, torch.Tensor], config: dict | None = None
) -> Path:
    """Write slots as a checkpoint folder in a layout, with the layout's config or the given one."""
    folder.mkdir(parents=True)
    tensors = {
        name: row.move.pack([slots[slot] for slot in row.slots]).clone().contiguous()
        for name, row in stored(layout, spec).items()
        if all(slot in slots for slot in row.slots)
    }
    save_file(tensors, folder / "model.safetensors")
    if config is None:
        assert layout.write_config is not None
        config = layout.write_config(spec)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
