"""vLLM drafts with the MTP layer of a target that `kconv quantize` wrote as well as with its source's.

And what it does with each way of losing one, which rules name. The routed experts are dequantized, as in
`test_nvfp4.py`; DeepSeek-V3's MTP is vLLM's own class, on its CPU build.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from support.mtp_targets import count_drafts, make_with_mtp
from support.quantized_targets import make_form, with_plain_experts
from support.record_drafts import VLLM
from support.target_faults import MTP, Change, drop, exclude_mtp_by, move_mtp, write_changed
from support.validated import validate

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.source import Folder
from kconv.cli import main
from kconv.engines import start_server
from kconv.engines.base import Serving
from kconv.engines.vllm import environment
from kconv.quantize.recipe import builtin_recipes
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.text import read_corpus
from kconv.validate.options import ValidateOptions

pytestmark = [pytest.mark.slow, pytest.mark.engine]

PROMPTS, TOKENS, NEW_TOKENS = 8, 40, 48
COUNTS = tuple(f"vllm:spec_decode_num_{what}" for what in ("drafts", "accepted_tokens"))
BY_NAME = "its MTP layer too"
# Each way of losing it: what was done, and the rule that finds it.
LOST: dict[str, tuple[str, Change]] = {
    "no tensor of it": ("K429", move_mtp("")),
    "other names": ("K429", move_mtp("mtp.layers.0")),
    "no projection": ("K429", drop(f"{MTP}.eh_proj.weight")),
    "no exclude": ("K435", exclude_mtp_by()),
    "excludes by its tensors' names": ("K435", exclude_mtp_by("eh_proj", "mlp*", "self_attn*", "shared_head.head")),
}


class Served(NamedTuple):
    answers: dict[str, dict[str, Any]]
    expected: tuple[int, int]
    folders: dict[str, Path]


@pytest.fixture(scope="module")
def served(engine_python, tiny_target, tmp_path_factory) -> Served:
    """Return what vLLM drafts with each target; for the float32 one, what the layer in memory says."""
    root = tmp_path_factory.mktemp("mtp")
    plain, target, mtp = make_with_mtp(tiny_target, root / "float32", steps=200)
    source = make_form(plain, root / "source", "bf16")
    (root / "own.yaml").write_text(f"{builtin_recipes()['nvfp4']}\n".replace("quantize:", f"quantize:\n  - {MTP}.*"))
    folders = {"float32": plain, "source": source}
    for name, recipe in (("nvfp4", "nvfp4"), (BY_NAME, str(root / "own.yaml"))):
        words = ["--recipe", recipe, "--input-scale", "data-free"]
        done = CliRunner().invoke(main, ["quantize", str(source), str(root / f"{name}-packed"), *words])
        assert done.exit_code == 0, done.output
        folders[name] = with_plain_experts(root / f"{name}-packed", root / name)
    for i, (name, (_, change)) in enumerate(LOST.items()):
        folders[name] = write_changed(folders["nvfp4"], root / f"lost-{i}", change)
    tokenizer = load_tokenizer(plain)
    texts = [text for text in read_corpus().held_out if len(text) > 300][:PROMPTS]
    request = {
        "llm": {
            "dtype": "bfloat16",
            "enforce_eager": True,
            "max_model_len": 256,
            "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
        },
        "new_tokens": NEW_TOKENS,
        "prompts": [tokenizer.encode(text)[:TOKENS] for text in texts],
        "together": True,
        "heads": {name: {"method": "mtp", "num_speculative_tokens": 1} for name in folders},
        "more": {name: {"model": str(folder)} for name, folder in folders.items()},
    }
    request["more"]["float32"]["dtype"] = "float32"
    (root / "request.json").write_text(json.dumps(request))
    ran = subprocess.run(
        [engine_python, VLLM, root / "request.json", root / "answer.json", start_server.__file__],
        env=os.environ | environment(Serving(engine_python, source)) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    (root / "log").write_text(ran.stdout)
    answers = json.loads((root / "answer.json").read_text())
    assert "error" not in answers["float32"], answers["float32"]
    texts = zip(request["prompts"], answers["float32"]["outputs"], strict=True)
    counts = [count_drafts(target, mtp, prompt, output) for prompt, output in texts]
    return Served(answers, (sum(made for made, _ in counts), sum(taken for _, taken in counts)), folders)


def counted(answer: dict[str, Any]) -> tuple[int, int]:
    """Return drafts and accepted ones."""
    assert "error" not in answer, answer["error"]
    drafts, accepted = (int(answer["counters"][name][0]) for name in COUNTS)
    return drafts, accepted


def rate(answer: dict[str, Any]) -> float:
    drafts, accepted = counted(answer)
    return accepted / drafts


def test_vllm_accepts_what_the_stored_layer_says(served):
    assert counted(served.answers["float32"]) == served.expected
    assert served.expected[1] > 50


def test_quantized_the_mtp_layer_drafts_as_well_as_before(served):
    before, after = (rate(served.answers[name]) for name in ("source", "nvfp4"))
    print(f"\naccepted {before:.1%} before, {after:.1%} in NVFP4")
    assert before > 0.25 and after > before - 0.05


def test_a_recipe_that_names_the_mtp_layer_makes_one_that_vllm_reads(served):
    packed = open_checkpoint(served.folders[BY_NAME]).tensors
    assert packed[f"{MTP}.self_attn.o_proj.weight"].dtype == "U8"
    print(f"\naccepted {rate(served.answers[BY_NAME]):.1%} with the MTP layer in NVFP4")
    assert rate(served.answers[BY_NAME]) > 0.8 * rate(served.answers["nvfp4"])


@pytest.mark.parametrize("name", LOST)
def test_each_way_of_losing_it_is_named_by_a_rule_and_costs_vllm_the_drafts(name, served):
    rule, _ = LOST[name]
    answer, good = served.answers[name], rate(served.answers["nvfp4"])
    print(f"\n{name}: {answer['error'][-300:] if 'error' in answer else f'{rate(answer):.1%}'}")
    assert "error" in answer or rate(answer) < good / 2
    found = validate(Folder(served.folders[name]), ValidateOptions()).findings
    assert rule in {finding.rule for finding in found}
    good_ones = validate(Folder(served.folders["nvfp4"]), ValidateOptions()).findings
    assert rule not in {finding.rule for finding in good_ones}
