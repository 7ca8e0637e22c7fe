"""Measure memory and time of one training step at Kimi-K2's head dims, as the row of tokens grows.

The attention is Kimi-K2's (64 heads of 192 and 128 dims, its latent ranks); the stream and the vocabulary are narrow,
so that a CPU can hold it. A step is the loss of three draft steps and its gradients, fp32, one thread. Each runs in its
own process; the figure is the peak resident memory minus the memory before the step.

    .venv/bin/python scripts/bench train-memory [--size small] [--markdown]
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench_parts.machine import apart
from bench_parts.page import closing, write_section

DOCUMENT = 128  # tokens of each in a packed row
# Eager attention at the longer ones takes more than a machine of 24 GiB may have.
LENGTHS = {"full": {"eager": (512, 1024), "sdpa": (512, 1024, 2048, 4096), "packed": (512, 1024, 2048, 4096)},
           "small": {"eager": (128,), "sdpa": (128, 256), "packed": (256,)}}  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 512, "vocab_size": 1024,
    "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64, "intermediate_size": 1344,
    "moe_intermediate_size": 128, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "rope_theta": 50000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
    "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip


# Of what --dry-run says, the parts that a step adds to weights and states; the optimizer's come with its first step.
STEP = ("gradients", "activations", "recomputed at once")


def measure(side: str, rows: int, length: int) -> tuple[float, float, float, float]:
    """Return a step's peak memory in MiB, its seconds of the processor, its loss, and what --dry-run says in MiB."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    from kconv.targets.config import parse_target_config
    from kconv.targets.model import build_target
    from kconv.train.module import build_module, run_eagle
    from kconv.train.plan import plan_training
    from kconv.train.recipe import complete

    config = parse_target_config(CONFIG)
    torch.manual_seed(0)
    values = {
        "decoder": "mla",
        "seq": length,
        "batch": rows,
        "batches": 1,
        "steps": 1,
        "warmup": 0,
        "optimizer": "adamw",
    }
    values |= {"kernel": "eager" if side == "eager" else "sdpa", "pack": side == "packed"}
    recipe = complete(values, config, rows)
    target = build_target(replace(config, text=config.text | {"num_hidden_layers": 0}), torch.float32)
    target.config.num_hidden_layers = config.layers
    model = build_module(target, recipe)
    model.train()
    generator = torch.Generator().manual_seed(0)
    tokens = rows * length
    batch: dict[str, Any] = {
        "input_ids": torch.randint(3, 1024, (tokens,), generator=generator).view(rows, length),
        "loss_mask": torch.ones(rows, length, dtype=torch.bool),
        "base_model_outputs": {
            name: torch.randn(tokens, width, generator=generator).view(rows, length, width)
            for name, width in (("aux_hidden_states", 3 * 512), ("base_model_hidden_states", 512))
        },
    }
    if side == "packed":
        batch["documents"] = (torch.arange(length) // DOCUMENT).expand(rows, -1).int()
    before = memory("VmRSS")
    # Forgets the peak of what came before.
    Path("/proc/self/clear_refs").write_text("5")
    begin = time.process_time()
    loss = run_eagle(model, batch, recipe).loss
    loss.backward()
    peak, seconds = (memory("VmHWM") - before) / 1024, time.process_time() - begin
    planned = plan_training(recipe, config).memory
    return peak, seconds, float(loss.detach()), sum(planned.get(name, 0) for name in STEP) / 2**20


def memory(name: str) -> float:
    """Return a figure of /proc/self/status in KiB."""
    return float(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # pyright: ignore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--size", choices=LENGTHS, default="full", help="full: up to 4,096 tokens; small: a quick check"
    )
    parser.add_argument("--markdown", action="store_true", help="write the table into docs/evidence/benchmarks.md")
    wish = parser.parse_args()
    wanted, cells, worst = LENGTHS[wish.size], {}, 0.0
    for length in sorted({length for lengths in wanted.values() for length in lengths}):
        for side in [side for side, lengths in wanted.items() if length in lengths]:
            cells[length, side] = apart(measure, side, 1, length)
            print(length, side, *(f"{value:.4f}" for value in cells[length, side]), flush=True)
        if (length, "packed") in cells:
            # The same documents, each in a row of its own, by ModelOpt's own computation.
            alone = apart(measure, "eager", length // DOCUMENT, DOCUMENT)
            print(length, "a row each", *(f"{value:.4f}" for value in alone), flush=True)
            worst = max(worst, abs(alone[2] - cells[length, "packed"][2]) / alone[2])
        if (length, "eager") in cells:
            worst = max(worst, abs(cells[length, "eager"][2] / cells[length, "sdpa"][2] - 1))
    lines = report(cells, worst)
    print("\n".join(lines))
    if wish.markdown:
        write_section("train-memory", lines)


def report(cells: dict[tuple[int, str], tuple[float, float, float, float]], worst: float) -> Sequence[str]:
    """Return the result as Markdown."""

    def cell(length: int, side: str) -> str:
        found = cells.get((length, side))
        return f"{found[0]:,.0f} MiB, {found[1]:.1f} s" if found else "not run"

    def planned(length: int) -> str:
        return f"{cells[length, 'sdpa'][3]:,.0f} MiB" if (length, "sdpa") in cells else "not run"

    lengths = sorted({length for length, _ in cells})
    return [
        "## Memory of a training step",
        "",
        "Peak memory beyond weights and states, and processor time: Kimi-K2's attention (64 heads), 512 dims, a "
        "vocabulary of 1,024, fp32, one row. *packed*: "
        f"documents of {DOCUMENT} tokens. *planned*: by `--dry-run`, for one document. Where both ran, losses agree to "
        f"{worst:.0e}.",
        "",
        "| tokens | `kernel: eager` (ModelOpt's own) | `kernel: sdpa` | planned | `kernel: sdpa`, packed |",
        "|---|---|---|---|---|",
        *(
            f"| {length:,} | {cell(length, 'eager')} | {cell(length, 'sdpa')} | {planned(length)} | "
            f"{cell(length, 'packed')} |"
            for length in lengths
        ),
        "",
        *slope(cells),
        closing("bench train-memory"),
    ]


def slope(cells: dict[tuple[int, str], tuple[float, float, float, float]]) -> list[str]:
    """Say what another token takes between each two lengths."""
    lengths = sorted(length for length, side in cells if side == "sdpa")
    pairs = list(itertools.pairwise(lengths))
    found = [(cells[b, "sdpa"][0] - cells[a, "sdpa"][0]) / (b - a) for a, b in pairs]
    said = ", ".join(f"{each:.2f} MiB from {a:,} to {b:,}" for each, (a, b) in zip(found, pairs, strict=True))
    return [f"Another token of one document takes {said}.", ""] if pairs else []


if __name__ == "__main__":
    main()
