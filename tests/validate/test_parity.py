"""Parity of a head and its source: from a target in memory and from its stored states, and on which prompts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.heads import random_slots, write_head

from kconv.checkpoint.folder import open_checkpoint
from kconv.checkpoint.manifest import MANIFEST
from kconv.checkpoint.source import Folder
from kconv.convert.execute import execute
from kconv.convert.plan import plan
from kconv.convert.read import Head, read_head, read_weights
from kconv.drafters.spec import Gqa, HeadSpec, Rope
from kconv.engines import MODELOPT, TRTLLM, by_name
from kconv.errors import PromptsInvalid, StatesInvalid
from kconv.measure.drafting import Measured
from kconv.measure.held_out import encode_held_out
from kconv.measure.texts import stored_texts
from kconv.targets.config import read_target_config
from kconv.targets.forward import LocalRunner
from kconv.targets.model import load_target
from kconv.targets.options import StatesOptions
from kconv.targets.states import RECORD, open_states
from kconv.targets.tokenizer import load_tokenizer
from kconv.targets.write_states import write_states
from kconv.tiny.target import pack
from kconv.tiny.text import read_corpus
from kconv.train.recipe import TEST_GQA
from kconv.train.run import head_key, train_head
from kconv.validate.options import ValidateOptions
from kconv.validate.parity import ParityFound, measure_parity
from kconv.validate.readings import judge_mistakes
from kconv.validate.structure import check_source

SPEC = HeadSpec(
    attention=Gqa(4, kv_heads=2, head_dim=16), hidden=64, target_hidden=64, intermediate=96, layers=1, vocab=512,
    draft_vocab=512, rope=Rope(1e4), captured=(1, 3, 5), eps=1e-5, dtype="F32", max_positions=512,
)  # fmt: skip
CATEGORIES = ("writing", "math")
PROMPT_TOKENS, NEW_TOKENS = 12, 16


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def prompts(root) -> Path:
    file = root / "held-out.jsonl"
    texts = [text[:400] for text in read_corpus().held_out if len(text) > 300][:8]
    lines = [{"prompt": text, "category": CATEGORIES[i % 2]} for i, text in enumerate(texts)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def source(root) -> Head:
    """Return a head of random weights that has the target's embedding: its norms near one, its logits lively."""
    slots = {}
    for name, tensor in random_slots(SPEC, seed=0, without=("embed_tokens",)).items():
        scale = 1.0 if not tensor.is_floating_point() or tensor.ndim == 1 else 2.0 / tensor.shape[1] ** 0.5
        slots[name] = (1 + 0.1 * tensor) if tensor.ndim == 1 and tensor.is_floating_point() else tensor * scale
    write_head(root / "source", MODELOPT, SPEC, slots, TRTLLM.write_config(SPEC))
    return read_head(open_checkpoint(root / "source"), layout=MODELOPT)


@pytest.fixture(scope="module")
def output(root, source) -> Head:
    execute(plan(source, by_name("vllm")), root / "output")
    return read_head(open_checkpoint(root / "output"))


@pytest.fixture(scope="module")
def spoilt(root, output) -> Head:
    """Return the output with one weight changed."""
    folder = Path(shutil.copytree(output.checkpoint.folder, root / "spoilt"))
    weights = load_file(folder / "model.safetensors")
    [name] = [name for name in weights if name.endswith("down_proj.weight")]
    weights[name] = weights[name] + 0.5 * torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(0))
    save_file(weights, folder / "model.safetensors")
    (folder / MANIFEST).unlink()
    return read_head(open_checkpoint(folder))


@pytest.fixture(scope="module")
def states(root, tiny_target, prompts) -> Path:
    wanted = StatesOptions(
        prompts=str(prompts),
        captured=SPEC.captured,
        prompt_tokens=PROMPT_TOKENS,
        text_tokens=PROMPT_TOKENS + NEW_TOKENS,
        sampled=NEW_TOKENS,
        greedy=NEW_TOKENS,
    )
    checkpoint, config = open_checkpoint(tiny_target), read_target_config(tiny_target)
    model, tokenizer = load_target(tiny_target, torch.float32), load_tokenizer(tiny_target)
    write_states(LocalRunner(model), checkpoint, config, tokenizer, wanted, root / "states", shard_bytes=1 << 30)
    return root / "states"


@pytest.fixture(scope="module")
def run(tiny_target) -> Callable[..., ParityFound]:
    def run(output: Head, source: Head | None, prompts: Path | None = None, **how) -> ParityFound:
        target = Folder(tiny_target)
        options = ValidateOptions(prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, **how)
        held_out = encode_held_out(str(prompts), target, options.text_tokens) if prompts else None
        return measure_parity(output, source, options, target, held_out, lambda _: None)

    return run


def test_continuations_that_are_shorter_than_a_draft_are_refused(run, spoilt, prompts, monkeypatch):
    monkeypatch.setitem(globals(), "NEW_TOKENS", 3)
    with pytest.raises(PromptsInvalid, match="3 tokens are too short to measure 3 draft tokens") as caught:
        run(spoilt, None, prompts=prompts)
    assert caught.value.fix == "Pass --new-tokens 4 or more."


@pytest.fixture(scope="module")
def live(run, spoilt, source, prompts) -> dict[str, Measured]:
    return {m.text.kind: m for m in run(spoilt, source, prompts=prompts).measured}


@pytest.fixture(scope="module")
def from_states(run, spoilt, source, states) -> dict[str, Measured]:
    return {m.text.kind: m for m in run(spoilt, source, states=states).measured}


@pytest.mark.parametrize("kind", ["held-out", "sampled", "greedy"])
def test_stored_states_give_the_figures_of_a_target_in_memory(live, from_states, kind):
    one, other = live[kind], from_states[kind]
    assert one.text == other.text
    for ours, theirs in zip(
        [*one.acceptance, *one.acceptance_by_category], [*other.acceptance, *other.acceptance_by_category], strict=True
    ):
        assert (ours.drafter, ours.category, ours.drafts) == (theirs.drafter, theirs.category, theirs.drafts)
        assert theirs.length == pytest.approx(ours.length, abs=1e-5)
        assert theirs.standard_error == pytest.approx(ours.standard_error, abs=1e-5)
    assert one.parity is not None
    assert other.parity is not None
    assert other.parity.kl == pytest.approx(one.parity.kl, rel=1e-4)
    assert other.parity.rms_error == pytest.approx(one.parity.rms_error, rel=1e-4)
    for ours, theirs in zip(one.parts, other.parts, strict=True):
        assert theirs.rms_error == pytest.approx(ours.rms_error, rel=1e-4)


@pytest.mark.parametrize("kind", ["held-out", "sampled", "greedy"])
def test_categories_and_steps_add_up_to_the_whole(live, kind):
    found = live[kind]
    for drafter in ("source", "output"):
        [whole] = [row for row in found.acceptance if row.drafter == drafter]
        own = [row for row in found.acceptance_by_category if row.drafter == drafter]
        assert {row.category for row in own} == set(CATEGORIES)
        assert sum(row.drafts for row in own) == whole.drafts
        assert sum(row.sequences for row in own) == whole.sequences == 8
        assert sum((row.length - 1) * row.drafts for row in own) == pytest.approx((whole.length - 1) * whole.drafts)
        assert len(whole.rate_errors) == whole.steps == 3
        assert whole.standard_error is not None
    parity = found.parity
    assert parity is not None
    assert [step.step for step in parity.by_step] == [1, 2, 3]
    assert parity.relative_error == pytest.approx(max(s.relative_error for s in parity.by_step), rel=0.5)
    assert parity.kl == pytest.approx(sum(step.kl for step in parity.by_step) / 3)
    assert parity.top1 == pytest.approx(sum(step.top1 for step in parity.by_step) / 3)
    assert parity.length_difference == pytest.approx(sum(step.rate_difference for step in parity.by_step))
    assert parity.length_difference_se is not None


def test_the_changed_part_is_named(live):
    for found in live.values():
        errors = {row.part: row.rms_error for row in found.parts}
        assert errors.pop("mlp") > 0.1
        assert set(errors.values()) == {0.0}
        assert found.parity is not None
        assert found.parity.kl > 1e-3


def test_a_conversion_has_no_error_at_all(run, output, source, states):
    for found in run(output, source, states=states).measured:
        parity = found.parity
        assert parity is not None
        assert (parity.relative_error, parity.kl, parity.top1) == (0, 0, 1)
        assert (parity.length_difference, parity.length_difference_se) == (0, 0)
        assert {row.rms_error for row in found.parts} == {0.0}


def test_of_the_target_only_two_tensors_are_read(run, output, source, states, tiny_target, tmp_path):
    """As one that fits into no memory here; the rest of its weights is not even there."""
    folder = tmp_path / "ends"
    folder.mkdir()
    shutil.copy(tiny_target / "config.json", folder)
    weights = load_file(tiny_target / "model.safetensors")
    ends = {name: weights[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(ends, folder / "model.safetensors")
    options = ValidateOptions(states=str(states))
    found = measure_parity(output, source, options, Folder(folder), None, lambda _: None)
    assert [m.text.kind for m in found.measured] == ["held-out", "sampled", "greedy"]
    assert found.provenance["states"]["captured"] == (1, 3, 5)  # pyright: ignore


@pytest.mark.parametrize(("other", "what"), [("other_target", "lm_head differs"), ("fine_tune", "layers differ")])
def test_states_of_other_weights_are_refused(output, source, states, other, what, request):
    with pytest.raises(StatesInvalid, match=what):
        options, target = ValidateOptions(states=str(states)), Folder(request.getfixturevalue(other))
        measure_parity(output, source, options, target, None, lambda _: None)


def test_modelopts_dumps_serve_as_states(run, output, source, states, tiny_target, tmp_path):
    kept = open_states(states)
    for index, sequence in enumerate(kept.sequences):
        if sequence.kind == "held-out":
            row = kept.read(index)
            torch.save(
                {"input_ids": row.tokens, "hidden_states": row.hidden, "aux_hidden_states": row.captured},
                tmp_path / f"{index}.pt",
            )
    with pytest.raises(StatesInvalid, match="is a pickle"):
        run(output, source, states=tmp_path)
    [dumped] = run(output, source, states=tmp_path, allow_pickle=True).measured
    [ours] = [m for m in run(output, source, states=states).measured if m.text.kind == "held-out"]
    [theirs], [own] = ([r for r in m.acceptance if r.drafter == "output"] for m in (dumped, ours))
    assert theirs.length == pytest.approx(own.length, abs=1e-6)


def test_prompts_that_the_head_was_calibrated_on_are_refused(run, output, prompts, states, tmp_path):
    for how in ({"prompts": prompts}, {"states": states}):
        with pytest.raises(PromptsInvalid, match="8 of 8 prompts are among those"):
            run(output, None, calibrated_on=(states,), **how)
    one = tmp_path / "one.jsonl"
    one.write_text(prompts.read_text().splitlines()[0] + '\n{"prompt": "Something else altogether, of some length."}\n')
    with pytest.raises(PromptsInvalid, match="1 of 2 prompts"):
        run(output, None, prompts=one, calibrated_on=(states / RECORD,))


def test_other_prompts_are_let_through(run, output, states, tmp_path):
    file = tmp_path / "others.jsonl"
    file.write_text('{"prompt": "An index is returned where there is one, else nothing at all happens here."}\n')
    found = run(output, None, prompts=file, calibrated_on=(states,))
    assert [row.drafter for row in found.measured[0].acceptance] == ["output"]
    # One sequence has no spread.
    assert found.measured[0].acceptance[0].standard_error is None


def test_texts_too_short_to_draft_in_are_refused(states):
    with pytest.raises(PromptsInvalid, match="no sequence has"):
        stored_texts(open_states(states), steps=30, vocab=SPEC.vocab)


@pytest.fixture(scope="module")
def trained(cache, tiny_target) -> Head:
    """Return a head that was trained on the tiny target for a few seconds, or found in the cache."""
    corpus, tokenizer = read_corpus(), load_tokenizer(tiny_target).inner
    text, held_out = pack(tokenizer, corpus.train), pack(tokenizer, corpus.held_out)
    out = cache / f"head-{head_key(tiny_target, TEST_GQA, text, held_out)}"
    return read_head(open_checkpoint(train_head(tiny_target, out, TEST_GQA, text, held_out)))


def swap_mlp(weights: dict) -> dict:
    return weights | {"0.gate_proj": weights["0.up_proj"], "0.up_proj": weights["0.gate_proj"]}


def turn_states(weights: dict) -> dict:
    return weights | {"fc": weights["fc"].unflatten(1, (3, -1)).flip(1).flatten(1).contiguous()}


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (None, ""),
        (swap_mlp, "gate_proj and up_proj swapped"),
        (turn_states, "the states before fc in the order [5, 3, 1]"),
    ],
)
def test_a_fault_that_its_source_has_too_is_found_beside_the_source(run, trained, states, tmp_path, fault, where):
    """A comparison says that nothing was lost, the readings whether it was right."""
    weights = read_weights(trained)
    write_head(tmp_path / "source", MODELOPT, trained.spec, fault(weights) if fault else weights,
               TRTLLM.write_config(trained.spec))  # fmt: skip
    source = read_head(open_checkpoint(tmp_path / "source"), layout=MODELOPT)
    execute(plan(source, by_name("vllm")), tmp_path / "output")
    output = read_head(open_checkpoint(tmp_path / "output"))
    assert not check_source(output, source)
    found = run(output, source, states=states)
    assert {row.parity.kl for row in found.measured if row.parity} == {0}
    errors = [
        (one.rule, one.where) for one in (*found.findings, *judge_mistakes(found.gains)) if one.severity != "note"
    ]
    assert errors == ([("K364", where)] if fault else [])
