"""The parts of scripts/bench attention: what they compute, and that the page has what they found."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kconv.drafters.attention import CausalContext
from kconv.drafters.forward import DraftHead

ROOT = Path(__file__).parent.parent

beds, healing, heads, memory, page, rounding, rows, size, store = (
    importlib.import_module(f"bench_parts.{name}")
    for name in (
        "attention_beds", "attention_healing", "heads", "attention_memory", "attention_page", "attention_rounding",
        "attention_rows", "attention_size", "attention_store",
    )
)  # fmt: skip


def test_each_measured_part_of_the_attentions_page_has_its_place():
    pages = [one.read_text() for one in page.PAGES]
    for name in page.PARTS:
        [text] = (one for one in pages if f"<!-- {name}: begin -->" in one)
        filled = page.fill(text, name, ["something else"])
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        assert filled.count(begin) == filled.count(end) == 1
        assert filled.partition(begin)[0] == text.partition(begin)[0]
        assert filled.partition(end)[2] == text.partition(end)[2]
        assert filled.partition(begin)[2].partition(end)[0].strip() == "something else"
    with pytest.raises(SystemExit, match="no-such-part"):
        page.fill(pages[0], "no-such-part", [])


def test_no_held_out_manual_has_a_paragraph_that_is_trained_on():
    corpus = beds.read_manuals()
    trained = {paragraph for text in corpus.train for paragraph in text.split("\n\n") if len(paragraph) >= 80}
    held = {paragraph for text in corpus.held_out for paragraph in text.split("\n\n")}
    assert len(corpus.held_out) >= 40 and not trained & held


def test_a_conversion_is_measured_against_the_original_after_the_same_steps(monkeypatch, tmp_path):
    monkeypatch.setenv("KCONV_CACHE", str(tmp_path))
    monkeypatch.setattr("kconv.convert.attention.heal.STEP_TOKENS", 64)
    spec = replace(memory.SPEC, vocab=40, draft_vocab=40)
    original = memory.make_head(spec, 0)
    fitted = memory.make_states(spec, batches=10, length=16)
    start = DraftHead(spec, {n: w if n != "fc" else 1.5 * w for n, w in original.weights.items()})
    bench = SimpleNamespace(head=lambda _: original, fitted=fitted, held_out=list(fitted.part("held-out")))
    bench.unseen = {"held-out": bench.held_out, "source code": bench.held_out}
    monkeypatch.setattr(rows, "convert", lambda *_: start)
    row = replace(rows.ROWS_OF_TABLE["mha-mla"], steps=(0, 8))
    found = dict(rows.measure(bench, row, {}))
    store.save("words", {"mha-mla": found})
    monkeypatch.setattr(beds.Bed, "parameters", lambda *_: 400_000)
    before, after = (found[steps]["figures"]["held-out"] for steps in ("0", "8"))
    assert before["trained"] is None and after["trained"] != after["before"]
    assert after["kept"] == pytest.approx(after["after"] / after["trained"])
    text = "\n".join(page.describe_bed("words"))
    assert f"| {row.says} | 0 | {before['before']:.3f} | {before['after']:.3f} | {rows.share(before)} | " in text
    assert f"| {row.says} | 8 | {after['trained']:.3f} | {after['after']:.3f} | {rows.share(after)} | " in text
    assert f"- {row.says}, after 8 steps: {rows.share(after)} on source code." in text


def test_the_attentions_memory_is_what_kimi_k2s_dims_come_to(monkeypatch, tmp_path):
    monkeypatch.setenv("KCONV_CACHE", str(tmp_path))
    store.save("memory", {"a step of healing": 14.0})
    text = "\n".join(memory.describe_memory())
    # 4 * 14,336; 14,336^2 in fp64; 508 * 163,840 in fp32; that 14 times; the squares of the inputs of fc (21,504),
    # kv_a (14,336), q_b (1,536), kv_b (512), o (8,192), gate and up (7,168) and down (18,432), in fp32.
    for figure in ("57,344", "1.6 GB", "333 MB", "a step of healing 14.0 (4.7 GB)", "4.7 GB in fp32", "9.4 GB in fp64"):
        assert figure in text


def test_a_turn_of_its_latents_leaves_a_head_as_it_was():
    dims = replace(heads.KIMI_MLA.attention, heads=2, q_lora_rank=6, kv_lora_rank=5, qk_nope_head_dim=4, v_head_dim=3)
    spec = replace(memory.SPEC, attention=dims, vocab=40, draft_vocab=40)
    drawn = memory.make_head(spec, 0)
    with pytest.raises(ValueError, match="has gains"):
        rounding.turn_latents(drawn)
    plain = {name: torch.ones_like(w) if name.endswith("a_layernorm") else w for name, w in drawn.weights.items()}
    head = DraftHead(spec, {name: weight.double() for name, weight in plain.items()})
    turned = rounding.turn_latents(head)
    x = torch.randn(1, 7, 2 * spec.hidden, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    one, other = (each.attend(0, x, torch.arange(7), CausalContext()) for each in (head, turned))
    # The norms compute in fp32.
    torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-4)
    apart = {name for name in head.weights if not torch.equal(head.weights[name], turned.weights[name])}
    assert apart == {f"0.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")}


def test_the_best_rate_of_each_form_of_healing_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("KCONV_CACHE", str(tmp_path))
    assert healing.describe_healing()[0].startswith("Not measured yet")
    kept = {"kept": 0.9, "kept_error": 0.0, "gained": 0.955}
    row = {steps: {"figures": {"held-out": kept}} for steps in ("0", "50", "200")}
    store.save("bytes", {healing.FAR: row, healing.NEAR: row})
    found = {healing.FAR: {"distance": 0.09}, healing.NEAR: {"distance": 0.01}}
    for rate, kept in zip(healing.RATES, (0.91, 0.96, 0.93, 0.5), strict=True):
        found[healing.key(healing.FAR, "adamw", 50, rate)] = {"kept": kept, "kept_error": 0.001}
    for rate, kept in zip(healing.RATES, (0.94, 0.96, 0.97, 0.5), strict=True):
        found[healing.key(healing.FAR, "adamw", 200, rate)] = {"kept": kept, "kept_error": 0.001}
    store.save("healing", found)
    text = "\n".join(healing.describe_healing())
    assert f"AdamW 97.0 at {healing.RATES[2]}; Muon " in text and "standard errors are 0.1 at most" in text
    assert "| AdamW | 91.0 | 96.0 | 93.0 | 50.0 |" in text
    # Of the original as it was, as the trials.
    assert "at its own rate: 95.5 after 50 steps" in text
    # 0.07 times the root of the distance.
    assert "0.0210 and 0.0070" in text


@pytest.mark.parametrize("form", ["adamw", "muon", "white"])
def test_each_form_of_healing_makes_the_loss_smaller(form, monkeypatch):
    monkeypatch.setattr("kconv.convert.attention.heal.STEP_TOKENS", 64)
    spec = replace(memory.SPEC, vocab=40, draft_vocab=40)
    original = memory.make_head(spec, 0)
    generator = torch.Generator().manual_seed(1)
    moved = {
        name: w * (1 + 0.1 * torch.randn(w.shape, generator=generator)) if name == "0.v_proj" else w
        for name, w in original.weights.items()
    }
    start, states = DraftHead(spec, moved), memory.make_states(spec, batches=10, length=16)
    before = float(healing.mean_loss(original, start, states).total)
    healed = healing.FORMS[form].descend(original, start, states, 8, healing.RATES[0])
    assert float(healing.mean_loss(original, healed, states).total) < before


def test_the_steps_at_full_size_can_be_timed_and_are_then_in_the_page(monkeypatch, tmp_path):
    monkeypatch.setenv("KCONV_CACHE", str(tmp_path))
    assert size.describe_size()[0].startswith("Not measured yet")
    # Of the wall clock, and of both processors.
    seconds = dict.fromkeys(size.SAYS, (90.0, 170.0)) | {"moments": (16.384, 30.0)}
    store.save("size", {"rows": 2048, "threads": 1, "seconds": seconds, "peak_gib": 11.8})
    text = "\n".join(size.describe_size())
    assert "| second moments of 2,048 rows | 16 s | 30 s |" in text and "| a gauge | 1 min 30 s | 2 min 50 s |" in text
    assert "| sum | 7 min 46 s | 14 min 40 s |" in text
    # 8 ms times 57,344.
    assert "costs 8 ms" in text and "cost 7 min 39 s" in text
