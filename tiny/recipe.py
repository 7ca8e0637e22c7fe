"""Recipes of tiny targets, and the cache that keeps their results."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from dataclasses import dataclass
from typing import Any

from ..checkpoint.staging import cache_root as cache_root  # results of recipes are kept there
from ..installed import version


@dataclass(frozen=True)
class TinyRecipe:
    """A tiny Kimi-K2: its dimensions, named as in its config.json, and its training.

    It counts steps, not seconds, so that a recipe gives the same target on a slow machine.

    The latent and rotary dims stay Kimi-K2's own: vLLM's MLA on CPU accepts only `kv_lora_rank + qk_rope_head_dim` of
    576, and Eagle3's default capture has three distinct layers only with 7 or more layers.

    Attributes:
        batch, seq: sequences per step, and tokens per sequence.
        parts: equal parts of a batch whose gradients are taken beside each other, on as many cores as there are, and
            then added in their order: so the target is the same on any number of cores.
        lr: peak learning rate of AdamW; it warms up for `warmup` steps and falls to 0 along a cosine.
        ends_lr: the same for the embedding and the output matrix, each of whose rows belongs to few tokens.
        balance: how far a router's `e_score_correction_bias` moves per step towards equal loads (DeepSeek-V3, arXiv
            2412.19437, section 2.1.2).
    """

    vocab_size: int = 512
    hidden_size: int = 128
    num_hidden_layers: int = 7
    first_k_dense_replace: int = 1
    num_attention_heads: int = 4
    q_lora_rank: int = 64
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 64
    v_head_dim: int = 32
    intermediate_size: int = 384
    moe_intermediate_size: int = 96
    n_routed_experts: int = 4
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    routed_scaling_factor: float = 2.827
    initializer_range: float = 0.08
    steps: int = 700
    batch: int = 8
    parts: int = 2
    seq: int = 128
    lr: float = 1.5e-3
    ends_lr: float = 2e-2
    warmup: int = 20
    balance: float = 1e-3
    seed: int = 0


DEMO = TinyRecipe()
TEST = TinyRecipe(
    hidden_size=64, num_attention_heads=2, q_lora_rank=32, intermediate_size=128, moe_intermediate_size=32,
    steps=150, batch=4, parts=1, warmup=10,
)  # fmt: skip


# What a recipe's result depends on besides the recipe: the text comes from Python, the numbers from the libraries.
LIBRARIES = ("torch", "transformers", "tokenizers")


def recipe_key(recipe: Any, *, source: str) -> str:
    """Return 16 hex digits that identify the result of a recipe, a dataclass of JSON values, on this installation.

    `source` is a constant that is raised when the code that follows the recipe changes its result.
    """
    parts = {
        "recipe": dataclasses.asdict(recipe),
        "source": source,
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in LIBRARIES},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]
