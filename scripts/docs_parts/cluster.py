"""Write docs/cluster.md: what states, training and quantizing of a 1T target would take on many machines.

    scripts/docs cluster            write it
    scripts/docs cluster --check    exit 1 where the page says something else

Every figure is computed from docs/evidence/benchmarks.md, which is measured, from the dims of Kimi-K2, and from
NVIDIA's published rates. None was measured on a cluster.
"""

import argparse
import math
import re
import sys
from math import prod
from pathlib import Path

from bench_parts.page import read_section
from support.heads import KIMI_MLA

from kconv.drafters.slots import needs
from kconv.targets.config import TargetConfig
from kconv.train.plan import NOT_TRAINED, plan_training
from kconv.train.recipe import EagleRecipe

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "cluster.md"
TOKENS, SEQ, STEPS_AHEAD, BATCH = 100_000_000, 4096, 3, 64
# Kimi-K2's own figures: https://github.com/MoonshotAI/Kimi-K2/blob/main/README.md#2-model-summary
ACTIVE, LAYERS = 32e9, 61
# An H200's bf16 without sparsity, and what a network card of its own moves: https://www.nvidia.com/en-us/data-center/h200/
PEAK, NETWORK, MEMORY = 989e12, 50e9, 141e9
# Of that peak: a cautious share, and what well-tuned programs come to.
SHARES = (0.15, 0.4)
GPUS, NODES, RANKS = (8, 16, 64), (1, 2, 8), 16
# What a file system of a cluster gives to all of its nodes together: assumed.
SHARED_DISK = 10e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where something would change")
    check = parser.parse_args().check
    new = "\n".join([*opening(), *states(), *training(), *quantizing()]) + "\n"
    if PAGE.exists() and PAGE.read_text() == new:
        return 0
    print(f"docs/cluster.md {'is not current' if check else 'written'}")
    if not check:
        PAGE.write_text(new)
    return 1 if check else 0


def measured() -> tuple[float, float, float, float]:
    """Return a disk's reading and writing rate, a rank's rate, each in bytes/s, and the source's bytes."""
    section = read_section("quantize")
    found = re.search(
        r"\| (?P<gb>[\d.]+) GB \| 2 \| cold.*?cold cache takes (?P<read>[\d.]+) s.*?as much (?P<write>[\d.]+) s"
        r".*?at (?P<rank>\d+) MB/s a rank.*?the (?P<whole>\d+) GB",
        section,
        re.DOTALL,
    )
    if found is None:
        sys.exit(
            "error: docs/evidence/benchmarks.md has no such figures of quantize: run scripts/bench --only quantize"
        )
    gb, read, write, rank, whole = map(float, found.groups())
    return gb * 1e9 / read, gb * 1e9 / write, rank * 1e6, whole * 1e9


def state_bytes() -> int:
    """Return the bytes of a token's states in bf16: of each captured layer, and of the final one."""
    return 2 * KIMI_MLA.target_hidden * (len(KIMI_MLA.captured) + 1)


def opening() -> list[str]:
    return [
        "# Toward a cluster, on paper",
        "",
        "<!-- scripts/docs cluster writes this page. -->",
        "",
        "Nothing here was measured on a cluster. Each figure is computed from [Benchmarks](evidence/benchmarks.md),"
        f" Kimi-K2's dims, and an H200's published rates ({PEAK / 1e12:.0f} TFLOP/s in bf16, {MEMORY / 1e9:.0f} GB,"
        f" {NETWORK / 1e9:.0f} GB/s of network), at {SHARES[0]:.0%} to {SHARES[1]:.0%} of the peak.",
        "",
    ]


def states() -> list[str]:
    """Return the section of the states."""
    _, write, _, whole = measured()
    size, flops = TOKENS * state_bytes(), 2 * ACTIVE
    lines = [
        f"## States of {TOKENS / 1e6:.0f} million tokens",
        "",
        f"A token has {state_bytes():,} bytes of states ({len(KIMI_MLA.captured)} captured layers and the final state,"
        f" bf16), all tokens **{size / 1e12:.2f} TB**. A prefill takes {flops / 1e9:.0f} GFLOP per token"
        f" ({ACTIVE / 1e9:.0f} B active parameters).",
        "",
        f"| GPUs | prefill | GPU hours | states per second | at {write / 1e9:.2f} GB/s of disk | at"
        f" {SHARED_DISK / 1e9:.0f} GB/s |",
        "|---|---|---|---|---|---|",
    ]
    for gpus in GPUS[:2]:
        rates = [share * PEAK * gpus / flops for share in SHARES]
        hours = [TOKENS / rate / 3600 for rate in rates]
        flow = [rate * state_bytes() / 1e9 for rate in rates]
        lines.append(
            f"| {gpus} | {between(hours, 'h')} | {between([gpus * one for one in hours], '')} | {between(flow, 'GB/s')}"
            f" | {size / write / 3600:.1f} h | {size / SHARED_DISK / 3600:.2f} h |"
        )
    return [
        *lines,
        "",
        "One disk writes the states more slowly than eight GPUs compute them: use several, or train beside the server."
        f" In four bits the target's weights need {math.ceil(whole / MEMORY)} GPUs, so use a node of eight or more.",
        "",
    ]


def step_flops() -> tuple[float, int]:
    """Return FLOP of a token in training, all draft steps, and how many weights are trained."""
    shapes = {name: need.shape for name, need in needs(KIMI_MLA).items() if name not in (*NOT_TRAINED, "lm_head")}
    trained = sum(map(prod, shapes.values()))
    every = trained - prod(shapes["fc"])
    mla = KIMI_MLA.attention
    # Half of a row is seen on average; the gradient takes twice the forward, and the forward is computed again for it.
    scores = 4 * 2 * SEQ / 2 * mla.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)  # pyright: ignore
    # The output matrix is not trained: forward, and the gradient of what goes in; the target's once for all steps.
    logits = (STEPS_AHEAD * (2 + 2) + 2) * KIMI_MLA.vocab * KIMI_MLA.hidden
    return 6 * prod(shapes["fc"]) + STEPS_AHEAD * (6 * every + scores) + logits, trained


def training() -> list[str]:
    """Return the section of the training."""
    read, *_ = measured()
    flops, trained = step_flops()
    recipe = EagleRecipe(
        attention=KIMI_MLA.attention, intermediate=KIMI_MLA.intermediate, captured=KIMI_MLA.captured,
        rope=KIMI_MLA.rope, batch=BATCH, seq=SEQ,
        batches=TOKENS // (BATCH * SEQ), steps=TOKENS // (BATCH * SEQ),
        optimizer="adamw", kernel="sdpa", compute="BF16",
    )  # fmt: skip
    lines = [
        f"## Training on {GPUS[0]} to {GPUS[-1]} GPUs",
        "",
        f"An MLA head of {trained / 1e9:.2f} B trained parameters, one pass over {TOKENS / 1e6:.0f} million tokens,"
        f" {STEPS_AHEAD} draft steps, steps of {BATCH} rows of {SEQ:,} tokens, `kernel: sdpa`, `compute: BF16`. A token"
        f" takes {flops / 1e9:.0f} GFLOP. Each step exchanges {trained * 4 / 1e9:.1f} GB of gradients.",
        "",
        "| GPUs | a pass | GPU hours | a step | exchange of gradients | states read |"
        " memory of a GPU, whole / sharded |",
        "|---|---|---|---|---|---|---|",
    ]
    for gpus in GPUS:
        rates = [share * PEAK * gpus / flops for share in SHARES]
        hours = [TOKENS / rate / 3600 for rate in rates]
        # A ring sends and receives twice what there is, but for one share of it.
        exchange = 2 * (gpus - 1) / gpus * trained * 4 / NETWORK
        memory = [
            sum(plan_training(recipe, config(), processes=gpus, shard=shard).memory.values()) for shard in (False, True)
        ]
        lines.append(
            f"| {gpus} | {between(hours, 'h')} | {between([gpus * one for one in hours], '')} |"
            f" {between([BATCH * SEQ / rate for rate in rates], 's')} | {exchange:.2f} s |"
            f" {between([rate * state_bytes() / 1e9 for rate in rates], 'GB/s')} |"
            f" {memory[0] / 1e9:.0f} / {memory[1] / 1e9:.0f} GB |"
        )
    limit = read / state_bytes()
    return [
        *lines,
        "",
        f"One disk reads {read / 1e9:.2f} GB/s, or {limit:,.0f} tokens per second, so a pass takes"
        f" {TOKENS / limit / 3600:.1f} h or more. {SHARED_DISK / 1e9:.0f} GB/s allow {SHARED_DISK / state_bytes():,.0f}"
        " tokens per second. The exchange assumes the network card alone. Its share of a step grows with the GPUs, so"
        " accumulate gradients, or use larger batches, before you add nodes.",
        "",
    ]


def quantizing() -> list[str]:
    """Return the section of quantizing."""
    read, write, rank, whole = measured()
    alone = 1 / (1 / read + 1 / write)
    lines = [
        "## Quantizing on many nodes",
        "",
        f"INT4 to NVFP4, {whole / 1e9:.0f} GB, {RANKS} ranks per node, each on one core at {rank / 1e6:.0f} MB/s. A"
        f" node's own disk reads and writes at {alone / 1e9:.2f} GB/s; a shared file system gives all nodes"
        f" {SHARED_DISK / 1e9:.0f} GB/s.",
        "",
        "| nodes | the ranks alone | own disks | bound by | shared file system | bound by |",
        "|---|---|---|---|---|---|",
    ]
    for nodes in NODES:
        ranks = whole / (nodes * RANKS * rank)
        own, shared = whole / (nodes * alone), 2 * whole / SHARED_DISK
        lines.append(
            f"| {nodes} | {ranks:.0f} s | {max(ranks, own):.0f} s | {'disk' if own > ranks else 'ranks'} |"
            f" {max(ranks, shared):.0f} s | {'file system' if shared > ranks else 'ranks'} |"
        )
    return [
        *lines,
        "",
        "More nodes help until the file system is the limit. With its own disk a node is bound by that disk.",
    ]


def config() -> TargetConfig:
    """Return Kimi-K2's config, as far as a plan asks."""
    from kconv.targets.config import parse_target_config

    return parse_target_config(
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "kimi_k2",
            "hidden_size": KIMI_MLA.hidden,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 64,
            "vocab_size": KIMI_MLA.vocab,
            "max_position_embeddings": KIMI_MLA.max_positions,
            "rope_theta": 50000.0,
            "torch_dtype": "bfloat16",
        }
    )


def between(values: list[float], unit: str) -> str:
    """Return a range in words, the lower end first."""
    low, high = sorted(values)
    digits = 0 if low >= 100 else 1 if low >= 1 else 2
    return f"{low:,.{digits}f}–{high:,.{digits}f} {unit}".strip()


if __name__ == "__main__":
    sys.exit(main())
