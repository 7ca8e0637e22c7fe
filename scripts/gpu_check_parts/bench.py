"""Where the checks run."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Kimi-K2's published text config, as far as a head goes by it.
KIMI = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 64,
    "num_key_value_heads": 64, "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 163840, "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 163584, "eos_token_id": 163585, "pad_token_id": 163839,
    "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0,
                     "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
TINY = KIMI | {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "vocab_size": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """How large each check is: `batches` are rows x tokens of training, the first that fits is taken."""

    config: dict[str, Any]
    square: int
    copied: int
    packed: tuple[int, int]
    batches: tuple[tuple[int, int], ...]
    steps: int
    rows: int
    latent: int
    parity_vocab: int
    parity_tokens: int


SIZES = {
    "cuda": Size(
        KIMI, 8192, 4 << 30, (14336, 18432), ((2, 4096), (1, 4096), (1, 2048), (1, 512)), 16, 16384, 512, 32768, 256
    ),
    "cpu": Size(TINY, 256, 1 << 20, (64, 128), ((2, 24),), 8, 512, 16, 256, 24),
}


@dataclass(frozen=True)
class Bench:
    """Where the checks run, how large they are, and what the card was seen to do at most."""

    device: torch.device
    size: Size
    flops: float  # of dense bf16 products, per second
    bandwidth: float  # bytes read and written per second

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], runs: int = 10) -> float:
        """Return the mean time of a piece of work, after three warm-ups."""
        for _ in range(3):
            work()
        self.wait()
        begin = time.perf_counter()
        for _ in range(runs):
            work()
        self.wait()
        return (time.perf_counter() - begin) / runs

    def peak(self) -> float | None:
        """Return the most memory in use since the check began, in GiB."""
        return round(torch.cuda.max_memory_allocated() / 2**30, 2) if self.device.type == "cuda" else None


def measure_ceilings(device: torch.device, size: Size) -> Bench:
    """Return a bench that knows what the card does at most, on random data."""
    blank = Bench(device, size, 1.0, 1.0)
    one, other = (torch.randn(size.square, size.square, device=device).bfloat16() for _ in range(2))
    flops = 2 * size.square**3 / blank.seconds(lambda: one @ other)
    source = torch.empty(size.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Bench(device, size, flops, 2 * size.copied / blank.seconds(lambda: target.copy_(source)))


def part(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a piece of work, or its fault."""
    try:
        return work()
    except Exception as fault:
        traceback.print_exc()
        return {"fault": f"{type(fault).__name__}: {str(fault).strip()[:500]}"}


def faults(value: Any) -> list[str]:
    """Return each fault in a check's figures, however deep."""
    if not isinstance(value, dict):
        return []
    return [value["fault"]] if "fault" in value else [one for held in value.values() for one in faults(held)]


def clear() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
