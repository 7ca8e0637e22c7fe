"""kconv bench drives a real vLLM: its figures are the counters, and what kconv's own chain accepts."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from kconv.bench.acceptance import AcceptanceFile, AcceptanceRow, read_acceptance
from kconv.bench.measure import ServedHead, measure_server
from kconv.bench.offline import measure_head
from kconv.bench.options import MeasureOptions
from kconv.checkpoint.folder import open_checkpoint
from kconv.cli import main
from kconv.convert.read import read_head
from kconv.engines.base import Serving
from kconv.engines.vllm import ENGINE
from kconv.errors import AcceptanceForged
from kconv.serving.start import serve
from kconv.targets.prompts import Prompt
from kconv.targets.suites import Suite
from kconv.tiny.text import read_corpus

pytestmark = [pytest.mark.slow, pytest.mark.engine]

STEPS, LIMIT, WORDS = 3, 20, 12


@pytest.fixture(scope="module")
def suite() -> Suite:
    """Return dialogues of two turns, from held-out text, in two categories."""
    words = [" ".join(text.split()[begin : begin + WORDS]) for text in read_corpus().held_out for begin in (0, WORDS)]
    turns = [text for text in words if len(text.split()) == WORDS][:16]
    prompts = [Prompt(str(i), "", (turns[2 * i], turns[2 * i + 1])) for i in range(8)]
    return Suite("held-out", "corpus", (("first", tuple(prompts[:4])), ("second", tuple(prompts[4:]))))


def figure(acceptance: AcceptanceFile, averaging: str, category: str) -> AcceptanceRow:
    [row] = [r for r in acceptance.rows if r.averaging == averaging and r.category == category]
    return row


def test_figures_are_the_counters_and_kconvs_own_chain(engine_python, demo, suite):
    head = read_head(open_checkpoint(demo / "mla" / "vllm"))
    with serve(Serving(engine_python, demo / "target", head.checkpoint.folder), ENGINE) as served:
        before = served.client.read_counters(ENGINE.counters)
        found = measure_server(
            served.client.url, suite, ServedHead(draft_tokens=STEPS, name="demo"), MeasureOptions(max_tokens=LIMIT)
        )
        after = served.client.read_counters(ENGINE.counters).since(before, "the server")
        counted = ENGINE.counters.count(after, STEPS, 8, 8)
        # Several at a time share a batch, and are told together.
        together = measure_server(
            served.client.url,
            suite,
            ServedHead(draft_tokens=STEPS, name="demo"),
            MeasureOptions(max_tokens=LIMIT, concurrency=4),
        )

    whole = figure(found, "micro_steps", "")
    assert whole.drafts == counted.drafts
    assert whole.value == pytest.approx(1 + counted.accepted / counted.drafts, abs=1e-6)
    assert whole.rates == pytest.approx([accepted / counted.drafts for accepted in counted.per_position])
    assert (whole.engine, whole.prompts) == ("vllm", 8) and whole.engine_version
    assert whole.value > 1.5

    own = measure_head(head, demo / "target", suite, (STEPS,), MeasureOptions(max_tokens=LIMIT))
    for category in ("first", "second", ""):
        for averaging in ("micro_steps", "macro_request"):
            ours, theirs = figure(own, averaging, category), figure(found, averaging, category)
            assert (ours.value, ours.drafts) == (theirs.value, theirs.drafts)
            assert ours.interval == theirs.interval
        assert figure(own, "micro_steps", category).rates == pytest.approx(figure(found, "micro_steps", category).rates)
        assert figure(together, "micro_steps", category).value == pytest.approx(
            figure(found, "micro_steps", category).value, abs=0.05
        )


def test_a_sweep_is_what_kconvs_own_forward_gives_for_each_k(engine_python, demo, suite, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "sweep.json"
    rows = [{"question_id": p.id, "category": "held-out", "turns": p.turns} for p in suite.prompts[:4]]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = ("--head", demo / "mla" / "vllm", "--target", demo / "target", "--suite", prompts, "--max-tokens", LIMIT,
              "--draft-tokens", "1,4", "--reasoning", "off")  # fmt: skip
    for words in (("--engine", "vllm", "--engine-python", engine_python, "--out", out), ("--out", tmp_path / "own")):
        ran = CliRunner().invoke(main, ["bench", *map(str, (*shared, *words))])
        assert ran.exit_code == 0, ran.output
    found, own = read_acceptance(out), read_acceptance(tmp_path / "own")
    assert {row.draft_tokens for row in found.rows} == {1, 4}
    for theirs, ours in zip(found.rows, own.rows, strict=True):
        assert (theirs.value, theirs.drafts, theirs.draft_tokens) == (ours.value, ours.drafts, ours.draft_tokens)
        assert (theirs.draft_sample_method, theirs.rejection_sample_method) == ("greedy", "standard")
    # What vLLM says of each request adds up to what its counters say.
    for run in found.provenance["runs"]:
        assert run["by_request"] == run["by_counters"] and run["by_request"]["drafts"] > 10
    ran = CliRunner().invoke(main, ["curve", str(out), "--category", "", "--out", str(tmp_path / "curve.yaml")])
    assert ran.exit_code == 0 and "  thinking_off:\n    1: 1." in ran.output


def test_synthetic_acceptance_is_refused_by_its_setting(engine_python, demo, suite, monkeypatch):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")  # shows /server_info
    head = demo / "mla" / "vllm"
    drafting = {"model": str(head), "method": "eagle3", "num_speculative_tokens": STEPS,
                "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}  # fmt: skip
    options = {"--speculative-config": json.dumps(drafting)}
    run = ServedHead(draft_tokens=STEPS, name="demo"), MeasureOptions(max_tokens=LIMIT)
    # Before it is asked anything: vLLM 0.32 on a CPU dies of the first request that it samples so.
    with (
        serve(Serving(engine_python, demo / "target", head, options=options), ENGINE) as served,
        pytest.raises(AcceptanceForged, match="synthetic"),
    ):
        measure_server(served.client.url, suite, *run)
