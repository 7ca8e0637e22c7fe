"""Targets of other families than Kimi-K2's, each with a head that `kconv train` made, served by the real vLLM.

What vLLM accepts of each place of a draft is what kconv's own chain of the head says, to the last token.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from support import tiny_targets
from support.heads import write_head
from support.record_drafts import Recorded, record
from support.tiny_targets import write_target

import kconv
from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.execute import execute
from kconv.convert.plan import WriteOptions, plan
from kconv.convert.read import read_head, read_weights
from kconv.convert.shared import SharedTensors
from kconv.engines import by_name
from kconv.engines.vllm import CAPTURES
from kconv.targets.model import load_target
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.target import pack
from kconv.tiny.text import read_corpus
from kconv.validate.engines.simulate import simulate

pytestmark = [pytest.mark.slow, pytest.mark.engine]

STEPS, PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 3, 8, 32, 20
KINDS = ("llama", "qwen3", "gpt_oss")
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


def train_both(kind: str, tokenizer: Path, out: Path) -> None:
    """Train a target of a kind, and a head for it."""
    out.mkdir()
    write_target(out / "target", kind, tokenizer)
    (out / "recipe.yaml").write_text(RECIPE)
    (out / "train.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in read_corpus().train))
    kconv.train(out / "target", out / "head", recipe=out / "recipe.yaml", data=out / "train.jsonl")


@pytest.fixture(scope="module")
def trained(cache, tiny_target) -> dict[str, Path]:
    """Return the folder of each kind, with target and head; trained once, then found in the cache."""
    made, recipe = {}, Path(tiny_targets.__file__).read_bytes() + RECIPE.encode()
    for kind in KINDS:
        key = hashlib.sha256(recipe + kind.encode()).hexdigest()[:16]
        made[kind] = cache / f"family-{kind}-{key}"
        with FileLock(cache / f".family-{kind}.lock"):
            if not made[kind].exists():
                shutil.rmtree(half := made[kind].with_suffix(".part"), ignore_errors=True)
                train_both(kind, tiny_target, half)
                half.rename(made[kind])
    return made


@pytest.fixture(scope="module")
def heads(trained, tmp_path_factory) -> dict[str, dict[str, Path]]:
    """Convert each head for vLLM, and one of them with norms of queries and keys too; by the target's kind and name."""
    root = tmp_path_factory.mktemp("heads")
    made: dict[str, dict[str, Path]] = {}
    for kind, folder in trained.items():
        head = read_head(open_checkpoint(folder / "head"))
        options = WriteOptions(SharedTensors(kind, {}, layers=tiny_targets.LAYERS, model_type=kind))
        execute(plan(head, by_name("vllm"), options), root / kind)
        made[kind] = {kind: root / kind}
        if kind == "qwen3":
            generator = torch.Generator().manual_seed(0)
            slots = read_weights(head)
            for slot in ("0.q_norm", "0.k_norm"):
                slots[slot] = 1 + 0.1 * torch.randn(head.spec.attention.head_dim, generator=generator)
            spec = replace(head.spec, norms=replace(head.spec.norms, qk=True))
            made[kind][QK] = write_head(root / "qk", by_name("vllm"), spec, slots)
    return made


def prompts_of(target: Path) -> list[list[int]]:
    stream = pack(load_tokenizer(target).inner, read_corpus().held_out)
    return stream[: PROMPTS * PROMPT_TOKENS].view(PROMPTS, PROMPT_TOKENS).tolist()


@pytest.fixture(scope="module")
def recorded(engine_python, trained, heads, tmp_path_factory) -> dict[str, Recorded]:
    """Have the heads of each kind served, one kind after the other."""
    return {
        kind: record(
            engine_python, trained[kind] / "target", heads[kind], prompts_of(trained[kind] / "target"),
            tmp_path_factory.mktemp(kind), steps=STEPS, new_tokens=NEW_TOKENS, look_ahead=STEPS - 1, together=True,
        )
        for kind in KINDS
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [*((kind, kind) for kind in KINDS), ("qwen3", QK)])
def test_vllm_accepts_what_kconvs_chain_says(recorded, trained, heads, kind, name):
    answer, own = recorded[kind].answers[name], recorded[kind].answers[""]["outputs"]
    assert "error" not in answer, answer["error"]
    target = trained[kind] / "target"
    assert [output[:NEW_TOKENS] for output in own] == answer["outputs"] and answer["unreached"] == []
    said = simulate(
        read_head(open_checkpoint(heads[kind][name])), load_target(target, torch.float32), target, prompts_of(target),
        own, STEPS,
    )  # fmt: skip
    counted = {key.removeprefix("vllm:spec_decode_num_"): values for key, values in answer["counters"].items()}
    assert counted["drafts"] == [said.drafts]
    assert counted["accepted_tokens_per_pos"] == [int(place) for place in said.accepted]
    # Not the chance of a head that drafts nothing.
    assert name == QK or said.accepted[0] > 0.1 * said.drafts


def test_vllms_own_classes_capture_for_each_target_that_is_listed(engine_python):
    """By transformers' name of the causal model of each text config, as vLLM's registry has it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    classes = {kind: NAMES[kind] for one in CAPTURES for kind in one.model_types if kind in NAMES}
    script = (
        "import json, sys; from vllm.model_executor.models.registry import ModelRegistry;"
        "from vllm.model_executor.models.interfaces import supports_eagle3;"
        "print('FOUND', json.dumps({kind: bool(supports_eagle3(ModelRegistry._try_load_model_cls(name)))"
        " for kind, name in json.loads(sys.argv[1]).items()}))"
    )
    command = [engine_python, "-c", script, json.dumps(classes)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(run.stdout.rpartition("FOUND ")[2])
    assert found == dict.fromkeys(classes, True)
