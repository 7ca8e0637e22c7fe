"""The tiny target as a folder like the hub's."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from ..checkpoint.staging import staged
from ..errors import OutputExists
from ..targets.config import parse_target_config
from ..targets.model import build_target
from .cache import recipe_key
from .recipe import TinyRecipe
from .text import Corpus, read_corpus
from .tokenizer import pack, save_tokenizer, train_tokenizer
from .training import Progress, held_out_loss, initialize, train, unigram_loss

KIND = "tiny-kimi-k2"
# Raise it with each change to tiny/ that alters what a recipe makes.
SOURCE = "2"

# What a tiny target shares with Kimi-K2.5's text_config to the letter.
FIXED = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "moe_layer_freq": 1,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 50000.0,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "float32",
    "use_cache": True,
}  # fmt: skip
TRAINING_ONLY = ("steps", "batch", "seq", "lr", "ends_lr", "warmup", "balance", "seed")


def make_target(recipe: TinyRecipe, cache: Path, progress: Progress = lambda *_: None) -> Path:
    """Train a tiny target from scratch, or find the one that this recipe made before.

    Args:
        recipe: what to make.
        cache: the folder under which targets are kept.
        progress: called after each training step.

    Returns:
        A folder with config.json, generation_config.json, model.safetensors (fp32, one tensor per expert),
        the tokenizer, and training.json, which says how it was made and how well it predicts.

    Raises:
        TrainingFailed: the loss is no longer a number, or this Python has no text to train on.
        OutputFailed: the cache is not writable.
    """
    out = kept_at(recipe, cache)
    if out.exists():
        return out
    try:
        with staged(out) as folder:
            _write(folder, recipe, progress)
    except OutputExists:
        # Another process made the same target meanwhile, and its rename came first.
        return out
    return out


def kept_at(recipe: TinyRecipe, cache: Path) -> Path:
    """Return the folder that a recipe's target is kept in, made already or not."""
    return cache / f"{KIND}-{recipe_key(recipe, source=SOURCE)}"


def kimi_config(recipe: TinyRecipe, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the target's config.json, spelled as Kimi-K2's own."""
    dims = {key: value for key, value in dataclasses.asdict(recipe).items() if key not in TRAINING_ONLY}
    return FIXED | dims | {
        "num_key_value_heads": recipe.num_attention_heads,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip


def _write(folder: Path, recipe: TinyRecipe, progress: Progress) -> None:
    corpus = read_corpus()
    tokenizer = train_tokenizer(corpus.train, recipe.vocab_size, FIXED["max_position_embeddings"])
    streams = pack(tokenizer, corpus.train), pack(tokenizer, corpus.held_out)
    config = kimi_config(recipe, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = build_target(parse_target_config(config), torch.float32)
        initialize(model)
        train(model, streams[0], recipe, progress)
    model.save_pretrained(folder)  # unfuses the experts into the hub's names
    save_tokenizer(tokenizer, folder)
    # transformers writes its own spelling, which no engine would read as Kimi-K2.
    _write_json(folder / "config.json", config)
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **tokens})
    _write_json(folder / "training.json", {
        "recipe": dataclasses.asdict(recipe),
        "steps": recipe.steps,
        "held_out_loss_nats": held_out_loss(model, streams[1], recipe.seq),
        "unigram_loss_nats": unigram_loss(*streams, recipe.vocab_size),
        "corpus": _describe(corpus, *map(len, streams)),
    })  # fmt: skip


def _describe(corpus: Corpus, train_tokens: int, held_out_tokens: int) -> dict[str, Any]:
    digest = hashlib.sha256("\0".join((*corpus.train, *corpus.held_out)).encode()).hexdigest()
    return {
        "source": "docstrings of the standard library, and pydoc_data.topics",
        "documents": [len(corpus.train), len(corpus.held_out)],
        "tokens": [train_tokens, held_out_tokens],
        "sha256": digest,
    }


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
