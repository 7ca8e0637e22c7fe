"""A server that forges its acceptance is refused, by its settings or by its counts; a bad or a perfect head is not."""

from __future__ import annotations

import pytest
from support.loopback import K, speculating

from kconv.bench.acceptance import AcceptanceRow
from kconv.bench.forged import check_counts
from kconv.bench.measure import LOSSY_NOTE, ServedHead, measure_server
from kconv.bench.options import MeasureOptions
from kconv.engines.counters import Counts
from kconv.errors import AcceptanceForged
from kconv.serving import client as client
from kconv.targets.prompts import Prompt
from kconv.targets.suites import Suite

PROMPTS = tuple(Prompt(f"w{i}", "writing", (f"Write {i}.",)) for i in range(24))
SUITE = Suite("tiny-suite", "sha256:00", (("writing", PROMPTS),))
RUN = ServedHead(draft_tokens=K, name="my-head"), MeasureOptions()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    for name, seconds in {"POLL_SECONDS": 0.001, "REST_SECONDS": 0.002, "LATE_SECONDS": 0.02}.items():
        monkeypatch.setattr(client, name, seconds)


def measure(engine: str, **how) -> tuple[AcceptanceRow, ...]:
    with speculating(engine, **how) as server:
        return measure_server(server.url, SUITE, *RUN).rows


# As each engine shows them: vLLM's config as JSON, and in its own words; SGLang's and TensorRT-LLM's by their names.
SHOWN = {
    "vllm, json": ("vllm", {"vllm_config": {"speculative_config": {"rejection_sample_method": "synthetic"}}}),
    "vllm, words": ("vllm", {"vllm_config": "SpeculativeConfig(method='eagle3', rejection_sample_method='synthetic')"}),
    "vllm, length": ("vllm", {"speculative_config": {"synthetic_acceptance_length": 3.12}}),
    "vllm, rates": ("vllm", {"speculative_config": {"synthetic_acceptance_rates": [0.9, 0.5, 0.1]}}),
    "sglang": ("sglang", {"env": {"SGLANG_SIMULATE_ACC_LEN": "3.24"}}),
    "trtllm": ("trtllm", {"env": {"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": "2.5"}}),
}


@pytest.mark.parametrize(("engine", "info"), SHOWN.values(), ids=SHOWN)
def test_a_server_that_says_that_it_forges_is_refused(engine, info):
    with pytest.raises(AcceptanceForged, match="the server forges its acceptance: "):
        measure(engine, info=info)


OFF = {
    "vllm": {"speculative_config": {"rejection_sample_method": "standard", "synthetic_acceptance_length": None}},
    "sglang": {"env": {"SGLANG_SIMULATE_ACC_LEN": "-1"}},
}


@pytest.mark.parametrize("engine", OFF)
def test_a_setting_that_is_off_is_none(engine):
    assert measure(engine, info=OFF[engine])


def test_the_sampling_that_a_server_shows_is_in_the_key_and_a_lossy_one_is_said_to_be():
    shown = {"draft_sample_method": "greedy", "rejection_sample_method": "fly"}
    [micro, *_] = measure("vllm", info={"speculative_config": shown})
    assert {name: micro.method[name] for name in shown} == shown
    assert LOSSY_NOTE in micro.note


@pytest.mark.parametrize("length", [1.5, 2.0, 2.78, 3.0, 3.5])
@pytest.mark.parametrize("engine", ["vllm", "trtllm"])
def test_a_server_that_does_not_say_it_is_known_by_its_counts(engine, length):
    if length == 1.5:
        # Nothing is accepted always, which a bad head may do as well.
        assert measure(engine, forged=length)
        return
    with pytest.raises(AcceptanceForged, match="is a fixed one"):
        measure(engine, forged=length)


def test_an_engine_that_counts_no_places_shows_a_whole_number_by_its_prompts():
    with pytest.raises(AcceptanceForged, match=r"of 3\.000 is a fixed one"):
        measure("sglang", forged=3.0)


GENUINE = {
    "of every kind": (900, (700, 450, 200)),
    "nothing is accepted": (900, (0, 0, 0)),
    "one token per step": (900, (12, 0, 0)),
    "all is accepted, as of text that repeats itself": (900, (900, 900, 900)),
    "nearly all is": (900, (897, 895, 890)),
    "too few to tell": (40, (40, 20, 0)),
}


@pytest.mark.parametrize(("drafts", "places"), GENUINE.values(), ids=GENUINE)
def test_what_a_head_can_do_is_let_pass(drafts, places):
    check_counts([Counts(drafts, sum(places), places, 8)], 3, 8, "there")


def test_a_genuine_server_is_measured_by_each_engines_counters():
    assert len({rows[0].value for rows in map(measure, ("vllm", "sglang", "trtllm"))}) == 1
