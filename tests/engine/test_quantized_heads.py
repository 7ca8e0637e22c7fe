"""vLLM serves heads that `kconv quantize-head` wrote, and drafts with them what kconv says of them.

Of the CPU build's means: FP8 through PyTorch, NVFP4 through vLLM's own emulation, both in bfloat16 alone, where kconv
computes in fp32: so it is near and not equal. A GQA head in FP8 is not served there: its MLP wants an operation that
the build has not (`silu_and_mul_quant`).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support.record_drafts import record_vllm

from kconv.checkpoint.folder import open_checkpoint
from kconv.cli import main
from kconv.convert.read import read_head
from kconv.drafters.chain import Acceptance, draft_tokens, greedy_acceptance, pool
from kconv.drafters.forward import DraftHead
from kconv.measure.trace import WatchedInputs
from kconv.quantize.head.formats import FORMATS
from kconv.targets.config import read_target_config
from kconv.targets.forward import run_target
from kconv.targets.model import load_target
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.target import pack
from kconv.tiny.text import read_corpus
from kconv.validate.parity import load_head

pytestmark = [pytest.mark.slow, pytest.mark.engine]

STEPS, PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 3, 24, 64, 20
SERVED = {"mla": "fp8", "gqa": "nvfp4"}
SCALE = {"fp8": "weight_scale", "nvfp4": "weight_scale_2"}


def run(*arguments) -> None:
    made = CliRunner().invoke(main, [str(a) for a in arguments])
    assert made.exit_code == 0, made.output


@pytest.fixture(scope="module")
def states(demo, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("states")
    lines = (json.dumps({"prompt": text}) for text in read_corpus().train[:60])
    (root / "train.jsonl").write_text("\n".join(lines) + "\n")
    run("states", demo / "target", root / "out", "--prompts", root / "train.jsonl", "--captured", "1,3,5",
        "--text-tokens", 96)  # fmt: skip
    return root / "out"


def spoil(source: Path, folder: Path, suffix: str) -> Path:
    """Write a quantized head with a scale of its MLP forgotten: 1, as an engine would have it that does not read it."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for part in ("gate", "up"):
        tensors[f"layers.0.mlp.{part}_proj.{suffix}"] = torch.tensor(1.0)
    save_file(tensors, folder / "model.safetensors")
    return folder


def simulated(source: Path, quantized: Path, name: str, target: Path, texts: list[tuple[list[int], list[int]]]):
    """Return what kconv's chain accepts of a quantized head, its inputs rounded as engines round them."""
    head = read_head(open_checkpoint(source))
    original = load_head(head, open_checkpoint(target), read_target_config(target))
    format_, tensors = FORMATS[name], load_file(quantized / "model.safetensors")
    linears = {}
    for tensor in [n.removesuffix(".input_scale") for n in tensors if n.endswith(".input_scale")]:
        slot = f"0.{tensor.rpartition('.')[2]}"
        linears[slot] = {s: tensors[f"{tensor}.{s}"] for s in ("weight", *format_.scales)}
    drafter = DraftHead(
        head.spec, dict(original.weights) | {s: format_.stored.unpack(one) for s, one in linears.items()}
    )
    model, accepted = load_target(target, torch.float32), list[Acceptance]()

    def rounded(slot: str, x: torch.Tensor) -> torch.Tensor:
        return format_.round(x, linears[slot]["input_scale"])

    for prompt, output in texts:
        tokens = torch.tensor([prompt + output])
        captured = run_target(model, tokens, head.spec.captured).captured
        with torch.no_grad(), WatchedInputs({slot: drafter.weights[slot] for slot in linears}, rounded):
            accepted.append(
                greedy_acceptance(draft_tokens(drafter, tokens, captured, STEPS)[:, 0], tokens[0], len(prompt))
            )
    return pool(accepted)


@pytest.mark.parametrize(("kind", "name"), SERVED.items())
def test_vllm_drafts_with_a_quantized_head_what_kconv_says_of_it(engine_python, demo, states, tmp_path, kind, name):
    source, out = demo / kind / "vllm", tmp_path / "out"
    run(
        "quantize-head",
        source,
        out,
        "--format",
        name,
        "--states",
        states,
        "--target",
        demo / "target",
        "--min-retention",
        0.9,
    )
    stream = pack(load_tokenizer(demo / "target").inner, read_corpus().held_out)
    prompts = stream[: PROMPTS * PROMPT_TOKENS].view(PROMPTS, PROMPT_TOKENS).tolist()
    heads = {"quantized": out, "spoiled": spoil(out, tmp_path / "spoiled", SCALE[name])}
    answers = record_vllm(
        engine_python,
        demo / "target",
        heads,
        prompts,
        tmp_path,
        steps=STEPS,
        new_tokens=NEW_TOKENS,
        look_ahead=STEPS - 1,
        together=True,
        dtype="bfloat16",
    ).answers

    def length(head: str) -> float:
        assert "error" not in answers[head], answers[head]["error"]
        counted = {n.removeprefix("vllm:spec_decode_num_"): v for n, v in answers[head]["counters"].items()}
        return 1 + sum(counted["accepted_tokens_per_pos"]) / counted["drafts"][0]

    own = answers[""]["outputs"]
    said = simulated(source, out, name, demo / "target", list(zip(prompts, own, strict=True)))
    served, spoiled = length("quantized"), length("spoiled")
    print(f"\n{kind} in {name}: vLLM {served:.3f}, kconv {said.length:.3f}, a scale lost {spoiled:.3f}")
    assert said.length > 1.5
    assert abs(served - said.length) < 0.1
    # The comparison can tell.
    assert spoiled < said.length - 0.3
