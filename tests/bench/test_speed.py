"""Speed at a concurrency: what a server that takes known times gives, and that a speed-up is of one concurrency."""

from __future__ import annotations

import numpy as np
import pytest
from support.loopback import K, speculating

from kconv.bench.measure import ServedHead, measure_server
from kconv.bench.options import MeasureOptions
from kconv.bench.speed import Dialogue, Load, measure_loads, speed_rows
from kconv.errors import EngineFailed
from kconv.serving import ask, client
from kconv.serving.client import Client
from kconv.targets.prompts import Prompt
from kconv.targets.suites import Suite

PROMPTS = tuple(Prompt(str(i), "", (f"Write {i}.",)) for i in range(6))
SUITE = Suite("tiny-suite", "sha256:00", (("", PROMPTS),))
SHARED = {
    "draft_tokens": K, "tree": "chain", "engine": "vllm", "engine_version": "1", "target": "t", "temperature": 0.0,
    "max_tokens": 8, "dataset": "d", "revision": "r", "prompts": 2, "prompts_sha256": "0", "date": "2026-11-23",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    for name, seconds in {"POLL_SECONDS": 0.001, "REST_SECONDS": 0.002, "LATE_SECONDS": 0.02}.items():
        monkeypatch.setattr(client, name, seconds)
    monkeypatch.setattr(ask, "PAUSE_SECONDS", 0.0)


def load(*dialogues: tuple[int, float, float], seconds: float) -> Load:
    return Load(tuple(Dialogue(("a",), tokens, took, (first,)) for tokens, took, first in dialogues), seconds)


def test_figures_are_those_of_the_wall_clock():
    # Two dialogues side by side for 4 s: 30 tokens in all.
    [row] = speed_rows({2: load((10, 4.0, 0.5), (20, 4.0, 1.5), seconds=4.0)}, {}, SHARED)
    assert (row.concurrency, row.tokens_per_second.value) == (2, pytest.approx(7.5))
    assert row.ttft.value == pytest.approx(1.0)
    assert row.tpot.value == pytest.approx((3.5 + 2.5) / (9 + 19))
    assert row.speedup is None and row.baseline_tpot is None
    ends = row.tokens_per_second.interval
    # Drawn with replacement: both are the one, or both the other.
    assert ends is not None and (ends.low, ends.high) == (pytest.approx(5.0), pytest.approx(10.0)) and ends.units == 2


def test_a_speed_up_is_paired_by_prompt_and_of_its_own_concurrency():
    quick = {1: load((10, 1.0, 0.1), (10, 3.0, 0.1), seconds=4.0), 4: load((10, 2.0, 0.1), (10, 6.0, 0.1), seconds=8.0)}
    slow = {1: load((10, 2.0, 0.1), (10, 6.0, 0.1), seconds=8.0), 4: load((10, 2.0, 0.1), (10, 6.0, 0.1), seconds=8.0)}
    one, four = speed_rows(quick, slow, SHARED)
    # Twice as quick on each prompt, so without any spread, though the prompts differ threefold.
    assert one.speedup is not None and one.speedup.interval is not None
    assert np.allclose([one.speedup.value, one.speedup.interval.low, one.speedup.interval.high], 2.0)
    assert four.speedup is not None and four.speedup.value == pytest.approx(1.0)
    assert one.same_answers == 1.0


def test_a_server_is_measured_with_and_without_its_draft():
    with speculating("vllm", pause=0.0005) as server, speculating("plain", pause=0.002) as plain:
        run = ServedHead(draft_tokens=K, name="h"), MeasureOptions(baseline_url=plain.url, speed_at=(1, 3))
        found = measure_server(server.url, SUITE, *run)
    assert [speed.concurrency for speed in found.speeds] == [1, 3]
    for speed in found.speeds:
        assert speed.tokens_per_second.value > 0 and speed.tpot.value >= 0.0005 and speed.ttft.value >= 0.002
        assert speed.baseline_tpot is not None and speed.baseline_tpot.value >= 0.002
        assert speed.same_answers == 1.0 and speed.speedup is not None and speed.speedup.interval is not None
        assert (speed.engine, speed.prompts, speed.prompts_sha256) == ("vllm", 6, SUITE.digest)
    assert type(found).model_validate_json(found.to_json()) == found


def test_a_server_that_fails_within_its_answer_is_quoted():
    with speculating("vllm", dies={"error": {"message": "EngineCore died", "code": 500}}) as server:
        connected = client.connect(server.url, None, {}, 5.0)
        with pytest.raises(EngineFailed, match=r"stopped its answer: .*EngineCore died"):
            measure_loads(connected, PROMPTS, (1,), 4, 0.0)


def test_fewer_prompts_than_the_concurrency_are_no_load():
    with (
        speculating("vllm") as server,
        pytest.raises(EngineFailed, match="6 prompts are too few for a concurrency of 8"),
    ):
        measure_loads(client.connect(server.url, None, {}, 5.0), PROMPTS, (8,), 4, 0.0)


def test_a_load_with_a_broken_connection_is_put_again():
    with speculating("vllm", breaks={2: "before", 15: "after"}) as server:
        loads = measure_loads(Client(server.url, "tiny"), PROMPTS, [2], 8, 0.0)
        # One load to warm up and one to measure, each of them twice.
        assert server.sent == 4 * len(PROMPTS)
    assert [len(load.dialogues) for load in loads.values()] == [len(PROMPTS)]
