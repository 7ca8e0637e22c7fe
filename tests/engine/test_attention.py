"""A head with the other attention in vLLM: it accepts, place by place, what kconv says of it.

Calibrated on what the demo's heads were trained on, and healed for a few steps; served on held-out text.
"""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from kconv.checkpoint.folder import open_checkpoint
from kconv.cli import main
from kconv.convert.read import read_head
from kconv.engines.base import Serving
from kconv.engines.serving import serve
from kconv.engines.vllm import ENGINE
from kconv.head.chain import draft_tokens, greedy_acceptance, pool
from kconv.targets.config import read_target_config
from kconv.targets.forward import run_target
from kconv.targets.model import load_target
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.target import pack
from kconv.tiny.text import read_corpus
from kconv.validate.parity import load_head

pytestmark = [pytest.mark.slow, pytest.mark.engine]

STEPS, PROMPTS, PROMPT_TOKENS, NEW_TOKENS, HEALED = 3, 12, 32, 20, 20


@pytest.fixture(scope="module")
def text(demo, tmp_path_factory):
    """Return a file of training text, to calibrate on."""
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = (json.dumps({"prompt": document}) for document in read_corpus().train[:250])
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.mark.parametrize(("source", "kind"), [("gqa", "mla"), ("mla", "mha")])
def test_vllm_accepts_what_kconv_says_of_a_converted_head(
    engine_python, demo, text, source, kind, tmp_path, monkeypatch
):
    made = CliRunner().invoke(
        main,
        [
            "to-vllm", str(demo / source / "vllm"), str(tmp_path / "head"), "--attention", kind,
            "--target", str(demo / "target"), "--prompts", str(text), "--context", "96",
            "--heal", str(HEALED), "--min-retention", "0.8",
        ],
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    head = read_head(open_checkpoint(tmp_path / "head"))
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
