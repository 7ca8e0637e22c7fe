"""vLLM loads what `kconv quantize` writes, and finds the held-out text as likely as its source does.

Of the CPU build's means: dense matrices through vLLM's own emulation, weights and activations in four bits. It has no
NVFP4 experts on a CPU ("NvFp4 MoE backend 'EMULATION' does not support ... current device cpu"), so the routed ones are
dequantized, as kconv reads them.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from itertools import chain
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support.families import write_target
from support.quantized_targets import make_form, with_plain_experts

import kconv.quantize
from kconv.checkpoint.folder import open_checkpoint
from kconv.cli import main
from kconv.engines.base import Serving
from kconv.engines.vllm import environment
from kconv.targets.config import parse_target_config
from kconv.targets.tokenizer import load_tokenizer
from kconv.targets.weights import stored_weights
from kconv.tiny.text import read_corpus

pytestmark = [pytest.mark.slow, pytest.mark.engine]

QUANTIZE = Path(kconv.quantize.__file__).parent
READER = Path(__file__).parent.parent / "support" / "vllm_logprobs.py"
PROMPTS, TOKENS = 24, 128
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/kernels/linear/scaled_mm/cpu.py#L242
AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()


@pytest.fixture(scope="module")
def source(tiny_target, tmp_path_factory) -> Path:
    return make_form(tiny_target, tmp_path_factory.mktemp("source") / "bf16", "bf16")


@pytest.fixture(scope="module")
def quantized(source, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("out") / "nvfp4"
    words = ["quantize", source, out, "--recipe", "nvfp4", "--input-scale", "data-free"]
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return out


def ask(engine_python, source, folder, models, prompts):
    """Return the log probabilities of each model's prompts, by its name, and what vLLM printed."""
    request = {
        "llm": {
            "dtype": "bfloat16",
            "enforce_eager": True,
            "max_model_len": 256,
            "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
        },
        "prompts": prompts,
        "models": models,
    }
    (folder / "request.json").write_text(json.dumps(request))
    done = subprocess.run(
        [engine_python, READER, folder / "request.json", folder / "answer.json"],
        env=os.environ | environment(Serving(engine_python, source)) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return json.loads((folder / "answer.json").read_text()), done.stdout


def test_perplexity_in_vllm_is_within_half_a_percent_of_the_sources(engine_python, source, quantized, tmp_path):
    tokenizer = load_tokenizer(source)
    texts = [text for text in read_corpus().held_out if len(text) > 300][:PROMPTS]
    models = {"source": str(source), "output": str(with_plain_experts(quantized, tmp_path / "dense"))}
    prompts = [tokenizer.encode(text)[:TOKENS] for text in texts]
    answer, printed = ask(engine_python, source, tmp_path, models, prompts)
    plain, packed = printed.split("== MODEL ")[1:]
    assert "NVFP4 GEMM" not in plain and "Using EmulationNvFp4LinearKernel for NVFP4 GEMM" in packed
    before, after = ([-x for x in chain(*answer[name])] for name in ("source", "output"))
    assert len(before) == len(after) > PROMPTS * TOKENS // 2
    # It is another computation, place by place, of the same likelihood.
    changes = [abs(b - a) for a, b in zip(before, after, strict=True)]
    assert sum(changes) / len(changes) > 0.01
    perplexities = [math.exp(sum(losses) / len(losses)) for losses in (before, after)]
    print(f"\nperplexity {perplexities[0]:.3f}, in NVFP4 {perplexities[1]:.3f}")
    assert abs(perplexities[1] / perplexities[0] - 1) < 0.005, perplexities


def test_compressed_tensors_form_is_read_as_the_same_model(engine_python, tiny_target, tmp_path):
    """A dense target: vLLM's NVFP4 experts are not for a CPU in this form either.

    Its output matrix is its embedding: vLLM builds one before it ties it, and no tensor says that it is unquantized.
    """
    source = write_target(tmp_path / "llama", "llama", tiny_target, None, tie_word_embeddings=True)
    recipe = (QUANTIZE / "recipes" / "nvfp4.yaml").read_text()
    (tmp_path / "packed.yaml").write_text(f"{recipe}format: compressed-tensors\n")
    for out, name in (("modelopt", "nvfp4"), ("packed", tmp_path / "packed.yaml")):
        words = ["quantize", source, tmp_path / out, "--recipe", name, "--input-scale", "data-free"]
        done = CliRunner().invoke(main, [str(word) for word in words])
        assert done.exit_code == 0, done.output
    tokenizer = load_tokenizer(source)
    texts = [text for text in read_corpus().held_out if len(text) > 300][:8]
    models = {name: str(tmp_path / name) for name in ("llama", "modelopt", "packed")}
    answer, printed = ask(engine_python, source, tmp_path, models, [tokenizer.encode(t)[:TOKENS] for t in texts])
    assert "quantization=modelopt" in printed and "quantization=compressed-tensors" in printed.split("== MODEL ")[3]
    plain, theirs, ours = (torch.tensor([*chain(*answer[name])]) for name in models)
    # The scales of a whole module are reciprocals, so that the last bit of few weights differs.
    assert (ours - theirs).abs().mean() < 0.05 * (theirs - plain).abs().mean()


@pytest.mark.skipif(not AMX, reason="vLLM has FP8 products on a CPU only with AMX tiles")
def test_fp8_attention_beside_nvfp4_is_read_as_the_same_model(engine_python, tiny_target, tmp_path):
    """A dense target whose attention is FP8 in ModelOpt's blocks."""
    source = write_target(tmp_path / "llama", "llama", tiny_target, None, hidden_size=256, head_dim=128)
    recipe = "{name: mixed, quantize: [model.layers.*.mlp.*_proj], fp8: [model.layers.*.self_attn.*_proj]}"
    (tmp_path / "mixed.yaml").write_text(recipe)
    (tmp_path / "mlp.yaml").write_text("{name: mlp, quantize: [model.layers.*.mlp.*_proj]}")
    for name in ("mlp", "mixed"):
        words = ["quantize", source, tmp_path / name, "--recipe", tmp_path / f"{name}.yaml"]
        done = CliRunner().invoke(main, [str(word) for word in (*words, "--input-scale", "data-free")])
        assert done.exit_code == 0, done.output
    # The same with attention plain, dequantized as kconv reads it.
    mixed = open_checkpoint(tmp_path / "mixed")
    weights = stored_weights(mixed, parse_target_config(mixed.config))
    shutil.copytree(tmp_path / "mlp", tmp_path / "read")
    for file in (tmp_path / "read").glob("*.safetensors"):
        tensors = load_file(file)
        tensors |= {name: weights[name].read() for name in tensors if ".self_attn." in name}
        save_file(tensors, file)
    tokenizer = load_tokenizer(source)
    texts = [text for text in read_corpus().held_out if len(text) > 300][:8]
    models = {name: str(tmp_path / name) for name in ("llama", "mlp", "read", "mixed")}
    answer, printed = ask(engine_python, source, tmp_path, models, [tokenizer.encode(t)[:TOKENS] for t in texts])
    assert "quantization=modelopt_mixed" in printed.split("== MODEL ")[4]
    _, mlp, read, ours = (torch.tensor([*chain(*answer[name])]) for name in models)
    far, apart = ((one - read).abs().mean() for one in (mlp, ours))
    print(f"\nof FP8's change of {far:.4f} nats, {apart:.4f} are vLLM's arithmetic")
    assert apart < 0.25 * far
