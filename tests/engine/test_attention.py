"""A head with the other attention in vLLM and SGLang: it accepts, place by place, what kconv says of it.

Calibrated on what the demo's heads were trained on, and healed for a few steps; served on held-out text.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.sglang_record import Job, record
from support.witness import write_converted

from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import read_head
from kconv.drafters.chain import draft_tokens, greedy_acceptance, pool
from kconv.engines import by_name
from kconv.engines.base import Serving
from kconv.engines.vllm import ENGINE
from kconv.serving.start import serve
from kconv.targets.config import read_target_config
from kconv.targets.forward import run_target
from kconv.targets.model import load_target
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.target import pack
from kconv.tiny.text import read_corpus
from kconv.validate.engines.simulate import simulate
from kconv.validate.parity import load_head

pytestmark = [pytest.mark.slow, pytest.mark.engine]

STEPS, PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 3, 12, 32, 20


@pytest.fixture(scope="module")
def converted(demo, tmp_path_factory) -> dict[str, Path]:
    """Return heads with the other attention, for vLLM, by their new one."""
    made = write_converted(demo, tmp_path_factory.mktemp("converted"), "vllm")
    return {name.split()[0]: folder for name, folder in made.items()}


def test_sglang_accepts_what_kconv_says_of_a_converted_head(sglang_python, demo, converted, tmp_path):
    """Of the two the MHA one: on a CPU SGLang has RoPE of an MLA head under YaRN alone, which this one has not."""
    heads = {}
    for kind, head in [("mha", converted["mha"])]:
        execute(plan(read_head(open_checkpoint(head)), by_name("sglang")), tmp_path / kind)
        heads[kind] = tmp_path / kind
    (work := tmp_path / "work").mkdir()
    target = demo / "target"
    jobs = {"": Job(target, look_ahead=STEPS - 1)} | {kind: Job(target, head) for kind, head in heads.items()}
    stream = pack(load_tokenizer(target).inner, read_corpus().held_out)
    prompts = stream[: PROMPTS * PROMPT_TOKENS].view(PROMPTS, PROMPT_TOKENS).tolist()
    answers = record(sglang_python, jobs, prompts, work, new_tokens=NEW_TOKENS)
    own, model = answers[""].outputs, load_target(target, torch.float32)
    for kind, head in heads.items():
        found, said = answers[kind], simulate(read_head(open_checkpoint(head)), model, target, prompts, own, STEPS)
        assert not found.error, found.error
        assert found.outputs == [output[:NEW_TOKENS] for output in own]
        assert found.counts
        assert (found.counts.drafts, found.counts.per_position) == (said.drafts, said.accepted)
        assert found.unreached == ()
        assert said.length > 1.5


@pytest.mark.parametrize("kind", ["mla", "mha"])
def test_vllm_accepts_what_kconv_says_of_a_converted_head(engine_python, demo, converted, kind):
    head = read_head(open_checkpoint(converted[kind]))
    assert head.spec.kind == kind

    model, folder = load_target(demo / "target", torch.float32), demo / "target"
    drafter = load_head(head, open_checkpoint(folder), read_target_config(folder))
    stream = pack(load_tokenizer(folder).inner, read_corpus().held_out)
    prompts = stream[: PROMPTS * PROMPT_TOKENS].view(PROMPTS, PROMPT_TOKENS).tolist()
    with serve(Serving(engine_python, folder, head.checkpoint.folder), ENGINE) as served:
        before = served.client.read_counters(ENGINE.counters)
        outputs = [served.client.complete(prompt, NEW_TOKENS) for prompt in prompts]
        after = served.client.read_counters(ENGINE.counters).since(before, "the server")
        counted = ENGINE.counters.count(after, STEPS, PROMPTS, PROMPTS)
        # The simulation looks ahead of the last token by as much as a draft does.
        ahead = [served.client.complete(prompt, NEW_TOKENS + STEPS - 1) for prompt in prompts]
    assert [row[:NEW_TOKENS] for row in ahead] == outputs

    accepted = []
    for prompt, output in zip(prompts, ahead, strict=True):
        tokens = torch.tensor([prompt + output])
        states = run_target(model, tokens, head.spec.captured)
        assert states.logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == output
        with torch.no_grad():
            drafted = draft_tokens(drafter, tokens, states.captured, STEPS)[:, 0]
        accepted.append(greedy_acceptance(drafted, tokens[0], len(prompt)))
    said = pool(accepted)
    assert counted.drafts == said.drafts
    assert counted.per_position == said.accepted
    assert 1 + counted.accepted / counted.drafts == pytest.approx(said.length)
    assert said.length > 1.5
