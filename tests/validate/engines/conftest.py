"""A server on the loopback that stands in for an engine's; a head, its target and what its chain accepts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.heads import random_slots, write_head
from support.loopback import K
from support.loopback import stand_in as stand_in

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.source import Folder
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import Head, read_head
from kconv.drafters.spec import Gqa, HeadSpec, Rope
from kconv.engines import MODELOPT, TRTLLM, by_name
from kconv.measure.held_out import encode_held_out
from kconv.targets.forward import generate_greedy
from kconv.targets.model import load_target
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.text import read_corpus
from kconv.validate.engines.check import EngineFound, check_engine
from kconv.validate.engines.simulate import simulate
from kconv.validate.options import PYTHON, ValidateOptions

SPEC = HeadSpec(
    attention=Gqa(4, kv_heads=2, head_dim=16), hidden=64, target_hidden=64, intermediate=96, layers=1, vocab=512,
    draft_vocab=2, rope=Rope(1e4), captured=(1, 3, 5), eps=1e-5, dtype="F32", max_positions=512,
)  # fmt: skip
PROMPT_TOKENS, NEW_TOKENS = 12, 10


@pytest.fixture(scope="session")
def prompts(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = [text[:200] for text in read_corpus().held_out if len(text) > 200][:5]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return file


@pytest.fixture(scope="session")
def model(tiny_target):
    return load_target(tiny_target, torch.float32)


@pytest.fixture(scope="session")
def own(tiny_target, model, prompts) -> tuple[list[list[int]], list[list[int]]]:
    """Return the prompts' ids, and the target's continuations."""
    tokenizer = load_tokenizer(tiny_target)
    rows = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    ids = [tokenizer.encode(row)[:PROMPT_TOKENS] for row in rows]
    return ids, generate_greedy(model, ids, NEW_TOKENS + K - 1)


@pytest.fixture(scope="session")
def head(own, tmp_path_factory) -> Head:
    """Return a head that always drafts the token that the target says most often, so that some are accepted."""
    root = tmp_path_factory.mktemp("head")
    [(often, _)] = Counter(token for row in own[1] for token in row).most_common(1)
    slots = random_slots(SPEC, seed=0, without=("t2d",))
    slots |= {"lm_head": torch.ones(2, SPEC.hidden), "d2t": torch.tensor([often, often])}
    write_head(root / "trained", MODELOPT, SPEC, slots, TRTLLM.write_config(SPEC))
    execute(plan(read_head(open_checkpoint(root / "trained"), layout=MODELOPT), by_name("vllm")), root / "vllm")
    return read_head(open_checkpoint(root / "vllm"))


@pytest.fixture(scope="session")
def known(tiny_target, model, head, own):
    """Return the prompts' ids, the target's continuations, and what kconv's chain accepts on them."""
    ids, rows = own
    expected = simulate(head, model, tiny_target, ids, rows, K)
    assert sum(expected.accepted) > 3
    return ids, rows, expected


@pytest.fixture
def check(tiny_target, prompts, head, monkeypatch) -> Callable[..., EngineFound]:
    """Return a function that lets an engine serve the head, by default vLLM."""
    monkeypatch.delenv(PYTHON, raising=False)
    target = Folder(tiny_target)
    held_out = encode_held_out(str(prompts), target, PROMPT_TOKENS)

    def check(**how) -> EngineFound:
        sizes = {"draft_tokens": K, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS}
        options = ValidateOptions(**{"engine": "vllm"} | sizes | how)
        return check_engine(head, options, target, held_out, lambda _: None)

    return check
