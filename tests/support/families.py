"""Tiny targets of other families than Kimi-K2's, each with a head that `kconv train` made for it.

An engine serves them, and what it accepts of each place of a draft is what kconv's own chain of the head says.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

import kconv
from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.execute import execute
from kconv.convert.plan import WriteOptions, plan
from kconv.convert.read import read_head
from kconv.convert.shared import SharedTensors
from kconv.engines import by_name
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.recipe import TinyRecipe
from kconv.tiny.target import initialize, pack, train
from kconv.tiny.text import read_corpus

from .normed import NORMS_OF_QK, write_normed

LAYERS, VOCAB = 7, 512
# The head dim is one that vLLM's attention on CPU takes.
DIMS: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
STEPS = TinyRecipe(steps=60, batch=4, seq=64, warmup=5, lr=3e-3)


def _llama(**dims: Any) -> Any:
    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 128}  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**DIMS | dims, rope_parameters=scaling))


def _qwen3() -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**DIMS, rope_parameters={"rope_type": "default", "rope_theta": 1e6}))


def _qwen3_moe() -> Any:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**DIMS, **EXPERTS, num_experts=4, moe_intermediate_size=64))


def _qwen2() -> Any:
    return Qwen2ForCausalLM(Qwen2Config(**{key: value for key, value in DIMS.items() if key != "head_dim"}))


def _mistral() -> Any:
    return MistralForCausalLM(MistralConfig(**DIMS, sliding_window=8))


def _olmo2() -> Any:
    return Olmo2ForCausalLM(Olmo2Config(**{key: value for key, value in DIMS.items() if key != "head_dim"}))


def _qwen3_windowed() -> Any:
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    return Qwen3ForCausalLM(Qwen3Config(**DIMS, **windows))


def _qwen3_next() -> Any:
    experts = {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
              "linear_value_head_dim": 16}  # fmt: skip
    return Qwen3NextForCausalLM(Qwen3NextConfig(**DIMS, **EXPERTS, **experts, **linear))


def _glm4_moe() -> Any:
    own = {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
    # transformers neither runs nor writes MTP layers, and its default promises one.
    groups = {"n_group": 1, "topk_group": 1, "use_qk_norm": True, "num_nextn_predict_layers": 0}
    return Glm4MoeForCausalLM(Glm4MoeConfig(**DIMS, **EXPERTS, **own, **groups))


def _gpt_oss() -> Any:
    dims = DIMS | {"intermediate_size": 64}
    return GptOssForCausalLM(GptOssConfig(**dims, **EXPERTS, num_local_experts=4, sliding_window=128))


def _qwen3_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
              "deepstack_visual_indexes": [0]}  # fmt: skip
    text = DIMS | {"rope_parameters": rope}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision))


MODELS = {
    "llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "qwen3_moe": _qwen3_moe, "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss, "qwen3_vl": _qwen3_vl, "mistral": _mistral, "olmo2": _olmo2,
    "qwen3, windowed": _qwen3_windowed, "qwen3_next": _qwen3_next,
}  # fmt: skip


def write_target(folder: Path, kind: str, tokenizer: Path, recipe: TinyRecipe | None = STEPS, **dims: Any) -> Path:
    """Write a target as transformers saves it.

    Args:
        folder: where; it may not be there.
        kind: a key of `MODELS`.
        tokenizer: a folder that has one of `VOCAB` tokens.
        recipe: steps, batch and rate of its training; None for the weights that it is born with.
        dims: of a "llama" that are others than `DIMS`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[kind](**dims).float()
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


# SGLang's attention on a CPU is a stand-in of kconv's, which has no sinks.
KINDS = {"vllm": ("llama", "qwen3", "gpt_oss"), "sglang": ("llama", "qwen3")}
QK = "norms of queries and keys"
RECIPE = """
attention: {heads: 4, kv_heads: 2, head_dim: 32}
rope: {theta: 10000}
intermediate: 128
captured: [1, 3, 5]
batches: 40
batch: 4
steps: 120
seq: 64
warmup: 5
"""


def train_families(cache: Path, tokenizer: Path) -> dict[str, Path]:
    """Return the folder of each kind, with target/ and head/; trained once, then found in the cache."""
    made, recipe = {}, Path(__file__).read_bytes() + RECIPE.encode()
    for kind in dict.fromkeys(kind for kinds in KINDS.values() for kind in kinds):
        key = hashlib.sha256(recipe + kind.encode()).hexdigest()[:16]
        made[kind] = cache / f"family-{kind}-{key}"
        with FileLock(cache / f".family-{kind}.lock"):
            if not made[kind].exists():
                shutil.rmtree(half := made[kind].with_suffix(".part"), ignore_errors=True)
                _train_both(kind, tokenizer, half)
                half.rename(made[kind])
    return made


def _train_both(kind: str, tokenizer: Path, out: Path) -> None:
    out.mkdir()
    write_target(out / "target", kind, tokenizer)
    (out / "recipe.yaml").write_text(RECIPE)
    (out / "train.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in read_corpus().train))
    kconv.train(out / "target", out / "head", recipe=out / "recipe.yaml", data=out / "train.jsonl")


def convert_families(trained: dict[str, Path], engine: str, root: Path) -> dict[str, dict[str, Path]]:
    """Convert each head for an engine, and for vLLM one with norms of queries and keys; by target's kind and name."""
    made: dict[str, dict[str, Path]] = {}
    for kind in KINDS[engine]:
        head = read_head(open_checkpoint(trained[kind] / "head"))
        options = WriteOptions(SharedTensors(kind, {}, layers=LAYERS, model_type=kind))
        execute(plan(head, by_name(engine), options), root / kind)
        made[kind] = {f"{kind} target": root / kind}
        if (engine, kind) == ("vllm", "qwen3"):
            whole = trained[kind]
            made[kind][f"{kind} target, {QK}"] = root / "qk"
            write_normed(whole / "head", whole / "target", NORMS_OF_QK, "vllm", root / "qk")
    return made
