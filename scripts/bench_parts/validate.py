"""Measure `kconv validate --headers-only` on a synthetic NVFP4 target of Kimi-K2's real size.

Run it with the interpreter in which kconv is installed:

    .venv/bin/python scripts/bench validate [--size small] [--runs 3] [--markdown] [--json]

61 layers, 384 experts, more than 200,000 tensors over a hundred shards. Their headers are real; the data is
a hole in the file. They are in a temporary folder, which is removed at the end.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench_parts.machine import KCONV, apart
from bench_parts.page import closing, spread, write_section

HIDDEN, EXPERT, DENSE, VOCAB, HEADS = 7168, 2048, 18432, 163840, 64
Q_LORA, KV_LORA, NOPE, ROPE, V = 1536, 512, 128, 64, 128
Stored = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True)
class Size:
    """How much of Kimi-K2 is made."""

    layers: int
    experts: int
    shards: int


SIZES = {"full": Size(61, 384, 100), "small": Size(7, 16, 4)}


@dataclass(frozen=True)
class Target:
    """The synthetic target: its folder, tensors, shards, and the bytes that it seems to have."""

    folder: Path
    tensors: int
    shards: int
    size: int


@dataclass(frozen=True)
class Run:
    """One run: seconds of the wall clock and of the processors, the peak resident memory in MiB, the exit code."""

    wall: float
    cpu: float
    peak: float
    code: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="full", help="small: a quick check of this script")
    parser.add_argument("--runs", type=int, default=3, help="timed runs (3)")
    parser.add_argument("--dir", type=Path, default=None, help="where the temporary folder goes")
    parser.add_argument("--markdown", action="store_true", help="write the result into docs/evidence/benchmarks.md")
    parser.add_argument("--json", action="store_true", help="print the runs as JSON")
    wish = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-validate-", dir=wish.dir) as name:
        target: Target = apart(make_target, Path(name), SIZES[wish.size])
        measure(target)
        runs = [measure(target) for _ in range(wish.runs)]
    if wish.json:
        print(json.dumps({"target": asdict(replace(target, folder=None)), "runs": [asdict(run) for run in runs]}))
        return
    lines = report(target, runs)
    print("\n".join(lines))
    if wish.markdown:
        write_section("validate", lines)


def make_target(folder: Path, size: Size) -> Target:
    """Write the headers of a target, and holes in the place of its data."""
    from kconv.checkpoint.header import build_header, byte_size

    stored = list(tensors(size))
    weight_map, total = {}, 0
    for shard in range(size.shards):
        part = stored[shard :: size.shards]
        name = f"model-{shard + 1:05d}-of-{size.shards:05d}.safetensors"
        header = build_header(part, {"format": "pt"})
        data = sum(byte_size(dtype, shape) for _, dtype, shape in part)
        with (folder / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + data)
        weight_map |= {tensor: name for tensor, _, _ in part}
        total += data
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )
    (folder / "config.json").write_text(json.dumps(config(size)))
    return Target(folder, len(stored), size.shards, total)


def tensors(size: Size) -> Iterator[Stored]:
    """Yield name, dtype and shape of each tensor of a Kimi-K2 whose routed experts are NVFP4."""
    yield "model.embed_tokens.weight", "BF16", (VOCAB, HIDDEN)
    yield "lm_head.weight", "BF16", (VOCAB, HIDDEN)
    yield "model.norm.weight", "BF16", (HIDDEN,)
    for layer in range(size.layers):
        p = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{p}.{norm}.weight", "BF16", (HIDDEN,)
        yield f"{p}.self_attn.q_a_proj.weight", "BF16", (Q_LORA, HIDDEN)
        yield f"{p}.self_attn.q_a_layernorm.weight", "BF16", (Q_LORA,)
        yield f"{p}.self_attn.q_b_proj.weight", "BF16", (HEADS * (NOPE + ROPE), Q_LORA)
        yield f"{p}.self_attn.kv_a_proj_with_mqa.weight", "BF16", (KV_LORA + ROPE, HIDDEN)
        yield f"{p}.self_attn.kv_a_layernorm.weight", "BF16", (KV_LORA,)
        yield f"{p}.self_attn.kv_b_proj.weight", "BF16", (HEADS * (NOPE + V), KV_LORA)
        yield f"{p}.self_attn.o_proj.weight", "BF16", (HIDDEN, HEADS * V)
        if layer == 0:
            yield from mlp(f"{p}.mlp", DENSE)
            continue
        yield f"{p}.mlp.gate.weight", "BF16", (size.experts, HIDDEN)
        yield f"{p}.mlp.gate.e_score_correction_bias", "F32", (size.experts,)
        yield from mlp(f"{p}.mlp.shared_experts", EXPERT)
        for expert in range(size.experts):
            for name, _, shape in mlp(f"{p}.mlp.experts.{expert}", EXPERT):
                yield from nvfp4(name.removesuffix(".weight"), *shape)


def mlp(prefix: str, width: int) -> Iterator[Stored]:
    for part, shape in (("gate", (width, HIDDEN)), ("up", (width, HIDDEN)), ("down", (HIDDEN, width))):
        yield f"{prefix}.{part}_proj.weight", "BF16", shape


def nvfp4(prefix: str, rows: int, columns: int) -> Iterator[Stored]:
    yield f"{prefix}.weight", "U8", (rows, columns // 2)
    yield f"{prefix}.weight_scale", "F8_E4M3", (rows, columns // 16)
    yield f"{prefix}.weight_scale_2", "F32", ()
    yield f"{prefix}.input_scale", "F32", ()


def config(size: Size) -> dict:
    """Return the target's config: Kimi-K2's own figures."""
    four_bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group = {"input_activations": four_bits, "weights": four_bits, "targets": ["Linear"]}
    excluded = ["lm_head", *(f"model.layers.{i}.self_attn*" for i in range(size.layers)), "model.layers.0.mlp*"]
    excluded += [f"model.layers.{i}.mlp.{part}" for i in range(1, size.layers) for part in ("gate", "shared_experts*")]
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": HIDDEN,
        "intermediate_size": DENSE,
        "moe_intermediate_size": EXPERT,
        "num_hidden_layers": size.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "n_routed_experts": size.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "q_lora_rank": Q_LORA,
        "kv_lora_rank": KV_LORA,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": V,
        "vocab_size": VOCAB,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "config_groups": {"group_0": group},
            "ignore": excluded,
            "quant_algo": "NVFP4",
            "producer": {"name": "modelopt", "version": "0.47.0"},
            "quant_method": "modelopt",
        },
    }


def measure(target: Target) -> Run:
    """Run `kconv validate --headers-only` to its end."""
    command = [str(KCONV), "validate", str(target.folder), "--headers-only", "--json"]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, process.returncode)


def report(target: Target, runs: list[Run]) -> list[str]:
    """Return the result as Markdown."""
    return [
        "## `kconv validate --headers-only` on a target of Kimi-K2's size",
        "",
        f"A synthetic NVFP4 target of {target.tensors:,} tensors over {target.shards} shards, which seem to hold "
        f"{target.size / 1e9:,.0f} GB: the headers are real, the data is a hole. Median of {len(runs)} runs: "
        f"{spread([run.wall for run in runs], unit=' s')}, {spread([run.cpu for run in runs], unit=' s')} of processor "
        f"time, {max(run.peak for run in runs):.0f} MiB at most.",
        "",
        closing("bench validate"),
    ]


if __name__ == "__main__":
    main()
