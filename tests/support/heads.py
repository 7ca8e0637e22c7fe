"""Heads of random weights, in any layout, written by safetensors' own writer; and configs as their makers write them.

A maker's config is at full size, and can be cut down to a small spec.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kconv.checkpoint.header import byte_size
from kconv.checkpoint.manifest import Hints
from kconv.checkpoint.tensors import TORCH
from kconv.convert.config import ReadConfig, read_config
from kconv.drafters.eagle3 import EAGLE3
from kconv.drafters.slots import needs
from kconv.drafters.spec import Gqa, HeadSpec, Linear, Llama3, Mla, Norms, Rope, Tokens, Yarn
from kconv.engines import by_name
from kconv.engines.layout import Layout, stored

YARN = Yarn(factor=64.0, original_max_positions=4096, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
KIMI_MLA = HeadSpec(
    attention=Mla(64, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    hidden=7168,
    target_hidden=7168,
    intermediate=18432,
    layers=1,
    vocab=163840,
    draft_vocab=163840,
    rope=Rope(50000.0, YARN),
    captured=(1, 29, 57),
    eps=1e-5,
    dtype="BF16",
    max_positions=262144,
)
KIMI_MHA = replace(
    KIMI_MLA,
    attention=Gqa(64, 64, 128),
    intermediate=12288,
    eps=1e-6,
    rope=Rope(50000.0, replace(YARN, beta_fast=32.0)),
)


def small(base: HeadSpec, width: int, vocab: int, **changes: Any) -> HeadSpec:
    """Return a spec cut down to a width and a vocabulary, with further fields changed."""
    dims = {"hidden": width, "target_hidden": width, "vocab": vocab, "draft_vocab": vocab}
    return replace(base, **dims | {"captured": (1, 3, 5)} | changes)


MLP = ("gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def linear_modules(prefix: str, *, layers: int, experts: int) -> list[str]:
    """Return the names, a dense layer first; with a vision tower where there is a prefix."""
    names = [f"{prefix}lm_head"]
    for layer in range(layers):
        base = f"{prefix}model.layers.{layer}"
        names += [f"{base}.self_attn.{part}" for part in ATTENTION]
        if layer == 0:
            names += [f"{base}.mlp.{part}" for part in MLP]
        else:
            names += [f"{base}.mlp.gate", *(f"{base}.mlp.shared_experts.{part}" for part in MLP)]
            names += [f"{base}.mlp.experts.{i}.{part}" for i in range(experts) for part in MLP]
    if prefix:
        names += ["vision_tower.encoder.blocks.0.wqkv", "mm_projector.proj.0"]
    return names


def entry(dtype: str, shape: list, begin: int, end: int) -> dict[str, Any]:
    """Return one tensor's header entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


# A sound file.
GOOD = {
    "__metadata__": {"format": "pt"},
    "a": entry("F32", [2, 3], 0, 24),
    "b": entry("BF16", [4], 24, 32),
    "empty": entry("I64", [0, 7], 32, 32),
    "scalar": entry("BOOL", [], 32, 33),
}
DATA = bytes(range(33))


def write_raw(
    file: Path, header: dict[str, Any] | bytes, data: bytes = b"", *, length: int | None = None, space: str = " "
) -> Path:
    """Write a file from a header, as an object or as its very bytes, and data.

    `length` is what the file claims; `space` stands behind a header's commas and colons, where libraries write nothing.
    """
    separators = f",{space}", f":{space}"
    text = header if isinstance(header, bytes) else json.dumps(header, separators=separators).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file


MLA = small(KIMI_MLA, 48, 64, attention=Mla(4, 24, 32, 12, 8, 16), intermediate=40)
GQA = replace(MLA, attention=Gqa(4, kv_heads=2, head_dim=16), rope=Rope(10000.0), max_positions=1024)
# Norms of queries and keys are vLLM's alone.
QK = replace(GQA, norms=Norms(qk=True))
MHA = replace(GQA, attention=Gqa(4, kv_heads=4, head_dim=8))
# Heads that fit the tests' trained target.
FITTING_GQA = small(GQA, 64, 512, intermediate=96)
FITTING_MLA = replace(FITTING_GQA, attention=Mla(2, 32, 32, 32, 16, 32), rope=Rope(50000.0))
# The config of a target that the others are for.
TARGET = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 48, "num_hidden_layers": 9,
    "vocab_size": 64, "num_attention_heads": 4, "max_position_embeddings": 1024, "rope_theta": 10000.0,
}  # fmt: skip

# Heads that TensorRT-LLM and vLLM can both hold.
PORTABLE: dict[str, HeadSpec] = {
    "mla": MLA,
    "mha": MHA,
    "gqa": GQA,
    "mla, 2 layers": replace(MLA, layers=2),
    "gqa, 2 layers": replace(GQA, layers=2),
    "mha, 3 layers": replace(MHA, layers=3),
    "gqa, reduced vocabulary": replace(GQA, draft_vocab=40),
    "gqa, attention biases": replace(GQA, attention=replace(GQA.attention, bias=True), layers=2),
    "gqa, MLP biases": replace(GQA, mlp_bias=True),
    "gqa, one norm before fc": replace(GQA, norms=Norms(before_fc=True)),
    "gqa, a norm per state": replace(GQA, norms=Norms(fc=True, output=True)),
    "mla, a norm per state": replace(MLA, norms=Norms(fc=True, output=True)),
    "mla, four states": replace(MLA, captured=(0, 7, 23, 60)),
    "gqa, two states": replace(GQA, captured=(1, 2)),
    "gqa, a target of another width": replace(GQA, target_hidden=56),
    "mla, a target of another width": replace(MLA, target_hidden=40),
    "gqa, YaRN": replace(
        GQA, rope=Rope(5e4, replace(YARN, beta_fast=32.0, mscale=None, mscale_all_dim=None)), max_positions=262144
    ),
    "gqa, Llama-3 RoPE": replace(GQA, rope=Rope(5e5, Llama3(8.0, 1.0, 4.0, 8192))),
    "gqa, half of each head turned": replace(GQA, rope=Rope(1e4, Linear(2.0), 0.5)),
    "mha, fp32": replace(MHA, dtype="F32"),
    "mla, tokens": replace(MLA, tokens=Tokens(bos=60, eos=(61, 62), pad=0)),
}


def random_map(spec: HeadSpec, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return a valid map of a draft vocabulary: d2t in offsets, and t2d."""
    kept = torch.randperm(spec.vocab, generator=generator)[: spec.draft_vocab].sort().values
    t2d = torch.zeros(spec.vocab, dtype=torch.bool).index_fill(0, kept, True)
    return {"d2t": kept - torch.arange(spec.draft_vocab), "t2d": t2d}


def random_slots(spec: HeadSpec, seed: int = 0, without: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Return a random tensor for each slot of a spec; d2t as a valid map, in offsets."""
    generator = torch.Generator().manual_seed(seed)
    slots: dict[str, torch.Tensor] = {}
    for name, need in needs(spec).items():
        if name == "d2t":
            slots |= random_map(spec, generator)
        elif name != "t2d":
            slots[name] = torch.randn(need.shape, generator=generator).to(TORCH[spec.dtype])
    return {name: tensor for name, tensor in slots.items() if name not in without}


def write_head(
    folder: Path, layout: Layout, spec: HeadSpec, slots: dict[str, torch.Tensor], config: dict | None = None
) -> Path:
    """Write slots as a checkpoint folder in a layout, with the layout's config or the given one."""
    folder.mkdir(parents=True)
    tensors = {
        name: torch.cat([slots[slot] for slot in row.slots])
        for name, row in stored(layout, spec).items()
        if all(slot in slots for slot in row.slots)
    }
    save_file(tensors, folder / "model.safetensors")
    if config is None:
        assert layout.write_config is not None
        config = layout.write_config(spec)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_own_keys(grouped: Path, folder: Path) -> Path:
    """Write a trained GQA head as MHA: each head gets its group's key and value, a tenth apart from its neighbour's."""
    config, weights = json.loads((grouped / "config.json").read_text()), load_file(grouped / "model.safetensors")
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    generator = torch.Generator().manual_seed(0)
    for part in ("k_proj", "v_proj"):
        name = f"layers.0.self_attn.{part}.weight"
        shared = weights[name].unflatten(0, (groups, -1)).repeat_interleave(heads // groups, 0).flatten(0, 1)
        noise = torch.randn(shared.shape, generator=generator) * shared.std()
        weights[name] = shared + 0.1 * noise
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": heads}))
    return folder


def write_sparse(folder: Path, layout: Layout, spec: HeadSpec, config: dict, without: tuple[str, ...] = ()) -> int:
    """Write a head of any size, but for one value a tensor zeros that take no disk; return the bytes that it claims."""
    header, at = {}, 0
    for name, row in stored(layout, spec).items():
        if name not in without:
            end = at + byte_size(row.expected.dtypes[0], row.expected.shape)
            header[name] = entry(row.expected.dtypes[0], list(row.expected.shape), at, end)
            at = end
    folder.mkdir()
    write_raw(folder / "model.safetensors", header)
    file = folder / "model.safetensors"
    data = file.stat().st_size
    os.truncate(file, data + at)
    with file.open("r+b") as opened:
        for tensor in header.values():
            opened.seek(data + tensor["data_offsets"][0])
            opened.write(b"\1")
    (folder / "config.json").write_text(json.dumps(config))
    return at


def read_bytes(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bytes of each tensor of a folder, by the safetensors library alone."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return {
        name: (str(tensor.dtype), tuple(tensor.shape), bytes(tensor.reshape(-1).view(torch.uint8).numpy()))
        for name, tensor in tensors.items()
    }


_EAGLE = {
    "eagle_aux_hidden_state_layer_ids": [1, 29, 57],
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
_YARN = {
    "type": "yarn",
    "factor": 64.0,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}

TORCHSPEC_MLA: dict[str, Any] = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "torch_dtype": "bfloat16",
    "rope_theta": 50000.0,
    "rope_scaling": _YARN,
    "eagle_config": _EAGLE,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "pad_token_id": 0,
}
# States neither the captured layers nor the draft's vocabulary.
TORCHSPEC_MHA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 7168,
    "intermediate_size": 12288,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 262144,
    "vocab_size": 163840,
    "rope_theta": 50000.0,
    "rope_scaling": _YARN | {"beta_fast": 32.0},
    "attention_bias": False,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "torch_dtype": "bfloat16",
}
_MODELOPT_EAGLE = _EAGLE | {
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}
# ModelOpt 0.47's kimik2 template: keys of the target's mixture of experts, and no draft_vocab_size.
MODELOPT_KIMIK2: dict[str, Any] = {key: value for key, value in TORCHSPEC_MLA.items() if key != "draft_vocab_size"} | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "first_k_dense_replace": 1,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "rope_scaling": _YARN | {"rope_type": "yarn", "rope_theta": 50000.0},
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "transformers_version": "4.51.3",
    "eagle_config": _MODELOPT_EAGLE,
}
# ModelOpt 0.47's llama template, which injects a YaRN of its own.
MODELOPT_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.01,
    "intermediate_size": 14336,
    "max_position_embeddings": 262144,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": None,
    "use_cache": True,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048},
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_theta": 10000,
    "eagle_config": _MODELOPT_EAGLE,
}


def cut(config: dict[str, Any], spec: HeadSpec) -> dict[str, Any]:
    """Return a maker's config with a small spec's dims and captured layers in the keys that it has."""
    dims: dict[str, Any] = {
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "vocab_size": spec.vocab,
        "draft_vocab_size": spec.draft_vocab,
        "max_position_embeddings": spec.max_positions,
        "num_attention_heads": spec.attention.heads,
        "num_key_value_heads": spec.attention.heads,
    }
    if isinstance(spec.attention, Mla):
        dims |= {key: value for key, value in vars(spec.attention).items() if key != "heads"}
    else:
        dims |= {"num_key_value_heads": spec.attention.kv_heads, "head_dim": spec.attention.head_dim}
    small = config | {key: value for key, value in dims.items() if key in config}
    if "eagle_config" in config:
        ids = {"eagle_aux_hidden_state_layer_ids": list(spec.captured)}
        small["eagle_config"] = config["eagle_config"] | ids
    return small


def read(config: dict[str, Any], dtype: str = "BF16", tensors: Any = None, **hints: Any) -> ReadConfig:
    """Read a config as a head's, with no tensor to look at but the given ones."""
    return read_config(config, tensors or {}, drafter=EAGLE3, dtype=dtype, hints=Hints(**hints))


def written(spec: HeadSpec, **changes: Any) -> dict[str, Any]:
    """Return a sound vLLM config with keys changed; a key set to `...` is taken out."""
    config = by_name("vllm").write_config(spec) | changes
    return {key: value for key, value in config.items() if value is not ...}
