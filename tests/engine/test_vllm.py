"""vLLM serves the demo's heads and accepts what kconv's own simulation of the chain says, to the last token."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.captured import TOP
from kconv.convert.read import Head, read_head
from kconv.errors import CountersMissing, EngineFailed
from kconv.head.chain import Acceptance, draft_tokens, greedy_acceptance, pool
from kconv.target.config import read_target_config
from kconv.target.model import load_target
from kconv.target.states import run_target
from kconv.target.tokenizer import load_tokenizer
from kconv.tiny.text import read_corpus
from kconv.tiny.tokenizer import pack
from kconv.validate.engines.counters import SpecCounters
from kconv.validate.engines.vllm import Served, Serving, serve
from kconv.validate.weights import load_head

pytestmark = [pytest.mark.slow, pytest.mark.engine]

# Short, as a small target's greedy text soon runs in circles, which any head drafts well.
STEPS, PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 3, 24, 32, 20


@dataclass(frozen=True)
class Run:
    """What vLLM generated with a head, and what it counted meanwhile."""

    outputs: list[list[int]]
    counted: SpecCounters


@pytest.fixture(scope="module")
def prompts(demo) -> list[list[int]]:
    """Return held-out text of the demo's target, as token ids."""
    stream = pack(load_tokenizer(demo / "target").inner, read_corpus().held_out)
    return stream[: PROMPTS * PROMPT_TOKENS].view(PROMPTS, PROMPT_TOKENS).tolist()


@pytest.fixture(scope="module")
def own(engine_python, demo, prompts) -> list[list[int]]:
    """Return the target's own continuations, longer than what is served by as much as a draft looks ahead."""
    with serve(Serving(engine_python, demo / "target")) as served:
        with pytest.raises(CountersMissing):
            served.client.read_counters()
        return [served.client.complete(prompt, NEW_TOKENS + STEPS - 1) for prompt in prompts]


@pytest.fixture(scope="module")
def target(demo):
    return load_target(demo / "target", torch.float32)


def generate(served: Served, prompts: list[list[int]]) -> Run:
    before = served.client.read_counters()
    outputs = [served.client.complete(prompt, NEW_TOKENS) for prompt in prompts]
    return Run(outputs, served.client.read_counters().since(before))


def simulate(head: Head, target, folder: Path, prompts: list[list[int]], own: list[list[int]]) -> Acceptance:
    """Return what kconv's forward of a head accepts on the target's own continuations."""
    drafter = load_head(head, open_checkpoint(folder), read_target_config(folder))
    accepted = []
    for prompt, output in zip(prompts, own, strict=True):
        tokens = torch.tensor([prompt + output])
        captured = run_target(target, tokens, head.spec.captured).captured
        with torch.no_grad():
            drafted = draft_tokens(drafter, tokens, captured, STEPS)[:, 0]
        accepted.append(greedy_acceptance(drafted, tokens[0], len(prompt)))
    return pool(accepted)


def test_greedy_decoding_is_that_of_transformers(target, prompts, own):
    for prompt, output in zip(prompts, own, strict=True):
        with torch.no_grad():
            logits = target(input_ids=torch.tensor([prompt + output]), use_cache=False).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == output


@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_vllm_accepts_what_the_simulated_chain_accepts(engine_python, demo, target, prompts, own, kind, tmp_path):
    head = read_head(open_checkpoint(demo / kind / "vllm"))
    with serve(Serving(engine_python, demo / "target", head.checkpoint.folder)) as served:
        run = generate(served, prompts)
    assert run.outputs == [output[:NEW_TOKENS] for output in own]

    simulated = simulate(head, target, demo / "target", prompts, own)
    assert run.counted.drafts == simulated.drafts
    assert run.counted.draft_tokens == STEPS * simulated.drafts
    assert run.counted.accepted_per_position == simulated.accepted
    assert run.counted.acceptance_length == pytest.approx(simulated.length)
    assert run.counted.acceptance_length > 1.5

    # The silent fault: the trainer's layer outputs, left as they are, are for vLLM the layers before. It serves
    # them without a word, and accepts what kconv says of a head that reads those.
    untranslated = tmp_path / "untranslated"
    shutil.copytree(head.checkpoint.folder, untranslated)
    config = json.loads((untranslated / "config.json").read_text())
    config[TOP] = list(head.spec.captured)
    (untranslated / "config.json").write_text(json.dumps(config))
    with serve(Serving(engine_python, demo / "target", untranslated)) as served:
        silent = generate(served, prompts)
    assert silent.outputs == run.outputs
    shifted = read_head(open_checkpoint(untranslated))
    assert silent.counted.accepted_per_position == simulate(shifted, target, demo / "target", prompts, own).accepted
    assert silent.counted.accepted_per_position != run.counted.accepted_per_position


def test_what_vllm_complains_about_is_told(engine_python, demo, tmp_path):
    folder = tmp_path / "head"
    shutil.copytree(demo / "gqa" / "vllm", folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"layers.0.self_attn.q_norm.weight": torch.ones(32)}, folder / "model.safetensors")
    with (
        pytest.raises(EngineFailed, match=r"ValueError: There is no module or parameter named '.*q_norm"),
        serve(Serving(engine_python, demo / "target", folder)),
    ):
        pass
