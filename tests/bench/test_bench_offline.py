"""Acceptance without a server: kconv's chain on dialogues with the target itself."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.heads import MLA, random_slots, write_head

from kconv.bench.offline import measure_head
from kconv.bench.options import MeasureOptions
from kconv.checkpoint.folder import open_checkpoint
from kconv.convert.read import Head, read_head
from kconv.drafters.chain import draft_tokens, greedy_acceptance, pool
from kconv.engines import by_name
from kconv.errors import PromptsInvalid, TargetInvalid
from kconv.targets.config import read_target_config
from kconv.targets.forward import generate_greedy, run_target
from kconv.targets.model import load_target
from kconv.targets.prompts import Prompt
from kconv.targets.suites import Suite
from kconv.targets.tokenizer import load_tokenizer
from kconv.validate.parity import load_head

STEPS, LIMIT = 3, 12
PROMPTS = (Prompt("a", "", ("The river ran", "And then")), Prompt("b", "", ("One day a man came",)))
SUITE = Suite("two", "sha256:00", (("", PROMPTS),))


@pytest.fixture(scope="module")
def head(tiny_target: Path, tmp_path_factory) -> Head:
    """Return a random head that drafts but four tokens, one of them the target's commonest: right now and then."""
    config = read_target_config(tiny_target)
    model, tokenizer = load_target(tiny_target, torch.float32), load_tokenizer(tiny_target)
    answers = generate_greedy(model, [tokenizer.encode_chat(p.turns[:1]) for p in PROMPTS], LIMIT)
    [(common, _)] = Counter(token for answer in answers for token in answer).most_common(1)
    kept = torch.tensor(sorted({common, 20, 30, 40}))
    spec = replace(
        MLA, hidden=config.hidden, target_hidden=config.hidden, vocab=config.vocab, draft_vocab=len(kept), dtype="F32"
    )
    slots = random_slots(spec) | {"d2t": kept - torch.arange(len(kept))}
    slots["t2d"] = torch.zeros(config.vocab, dtype=torch.bool).index_fill(0, kept, True)
    folder = write_head(tmp_path_factory.mktemp("offline") / "head", by_name("vllm"), spec, slots)
    return read_head(open_checkpoint(folder))


def chain(head: Head, target: Path) -> list:
    """Return what the head accepts in each dialogue, by the chain alone."""
    model, tokenizer = load_target(target, torch.float32), load_tokenizer(target)
    drafter = load_head(head, open_checkpoint(target), read_target_config(target))
    found = []
    for prompt in PROMPTS:
        said: list[str] = []
        parts = []
        for turn in prompt.turns:
            start = tokenizer.encode_chat([*said, turn])
            [answer] = generate_greedy(model, [start], LIMIT + STEPS - 1)
            assert model.config.eos_token_id not in answer[:LIMIT], "the test's arithmetic is for whole answers"
            tokens = torch.tensor([start + answer])
            captured = run_target(model, tokens, head.spec.captured).captured
            with torch.no_grad():
                parts.append(
                    greedy_acceptance(draft_tokens(drafter, tokens, captured, STEPS)[:, 0], tokens[0], len(start))
                )
            said += [turn, tokenizer.inner.decode(answer[:LIMIT], skip_special_tokens=True)]
        found.append(pool(parts))
    return found


def test_greedy_figures_are_the_chains(head, tiny_target):
    found = measure_head(head, tiny_target, SUITE, (STEPS,), MeasureOptions(max_tokens=LIMIT))
    own = chain(head, tiny_target)
    micro, macro = found.rows
    assert micro.averaging == "micro_steps" and macro.averaging == "macro_request"
    assert 1.02 < micro.value < STEPS + 1
    assert micro.drafts == pool(own).drafts
    assert micro.value == pytest.approx(pool(own).length, abs=1e-6)
    assert micro.rates == pytest.approx(pool(own).rates)
    assert macro.value == pytest.approx(sum(part.length for part in own) / len(own), abs=1e-6)
    assert (micro.engine, micro.temperature, micro.prompts) == ("kconv", 0.0, 2)
    assert micro.sanity is not None and micro.sanity.mean_tokens == LIMIT and micro.sanity.cut == 1.0
    assert set(found.weights) == {"model.safetensors"}


def test_sampled_figures_say_that_they_are_over_positions(head, tiny_target):
    found = measure_head(head, tiny_target, SUITE, (STEPS,), MeasureOptions(max_tokens=LIMIT, temperature=1.0))
    assert found.rows[0].averaging == "micro_positions" and found.rows[0].temperature == 1.0
    # Each of the three answers has its chains from the prompt's last token on.
    assert found.rows[0].drafts == 3 * (LIMIT - 1)


def test_several_k_give_what_each_gives_by_itself(head, tiny_target):
    together = measure_head(head, tiny_target, SUITE, (1, STEPS), MeasureOptions(max_tokens=LIMIT))
    for k in (1, STEPS):
        alone = measure_head(head, tiny_target, SUITE, (k,), MeasureOptions(max_tokens=LIMIT))
        assert [row for row in together.rows if row.draft_tokens == k] == list(alone.rows)


def test_other_temperatures_are_not_simulated(head, tiny_target):
    with pytest.raises(PromptsInvalid, match=r"0\.6"):
        measure_head(head, tiny_target, SUITE, (STEPS,), MeasureOptions(max_tokens=LIMIT, temperature=0.6))


def test_a_target_without_a_chat_template_is_refused_with_what_measures_it(head, tiny_target, tmp_path):
    bare = shutil.copytree(tiny_target, tmp_path / "target")
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((bare / "tokenizer_config.json").read_text())
    (bare / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "chat_template"}))
    said: list[str] = []
    with pytest.raises(TargetInvalid, match="no chat template") as fault:
        measure_head(head, bare, SUITE, (STEPS,), MeasureOptions(max_tokens=LIMIT), say=said.append)
    assert "kconv validate" in fault.value.fix
    assert said == ["loading the target"]


def test_answers_too_short_to_draft_in_are_named(head, tiny_target):
    with pytest.raises(PromptsInvalid, match="nothing is drafted"):
        measure_head(head, tiny_target, SUITE, (STEPS,), MeasureOptions(max_tokens=1))
