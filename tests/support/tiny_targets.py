"""Tiny targets of the families that heads are published for, trained a little by transformers' own classes.

Their tokenizer is the tiny Kimi-K2's. A few dozen steps make a target whose greedy text wanders, so that which layers a
head reads, and whether it is read rightly, shows in what is accepted.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.recipe import TinyRecipe
from kconv.tiny.target import initialize, pack, train
from kconv.tiny.text import read_corpus

LAYERS, VOCAB = 7, 512
# The head dim is one that vLLM's attention on CPU takes.
DIMS: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
STEPS = TinyRecipe(steps=60, batch=4, seq=64, warmup=5, lr=3e-3)


def _llama() -> Any:
    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 128}  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**DIMS, rope_parameters=scaling))


def _qwen3() -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**DIMS, rope_parameters={"rope_type": "default", "rope_theta": 1e6}))


def _qwen3_moe() -> Any:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**DIMS, **EXPERTS, num_experts=4, moe_intermediate_size=64))


def _gpt_oss() -> Any:
    dims = DIMS | {"intermediate_size": 64}
    return GptOssForCausalLM(GptOssConfig(**dims, **EXPERTS, num_local_experts=4, sliding_window=128))


def _qwen3_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
              "deepstack_visual_indexes": [0]}  # fmt: skip
    text = DIMS | {"rope_parameters": rope}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision))


MODELS = {"llama": _llama, "qwen3": _qwen3, "qwen3_moe": _qwen3_moe, "gpt_oss": _gpt_oss, "qwen3_vl": _qwen3_vl}


def write_target(folder: Path, kind: str, tokenizer: Path, recipe: TinyRecipe | None = STEPS) -> Path:
    """Write a target as transformers saves it.

    Args:
        folder: where; it may not be there.
        kind: a key of `MODELS`.
        tokenizer: a folder that has one of `VOCAB` tokens.
        recipe: steps, batch and rate of its training; None for the weights that it is born with.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[kind]().float()
        if recipe is not None:
            initialize(model)
            train(model, pack(load_tokenizer(tokenizer).inner, read_corpus().train), recipe, lambda *_: None)
        with contextlib.redirect_stderr(io.StringIO()):
            model.save_pretrained(folder)
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, folder)
    ids = {name: json.loads((tokenizer / "config.json").read_text())[name] for name in ("bos_token_id", "eos_token_id")}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | ids, indent=1))
    return folder
