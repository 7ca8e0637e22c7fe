"""kconv bench against three engines' shapes: the same drafts give the same figures, and faults have names."""

from __future__ import annotations

import json
import statistics
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.loopback import K, speculating, steps_of

from kconv.bench.measure import ServedHead, measure_server
from kconv.bench.options import MeasureOptions
from kconv.cli import main
from kconv.engines.trtllm import ACCEPTED, ANSWERED, DRAFTED
from kconv.engines.trtllm import ENGINE as TRTLLM
from kconv.errors import (
    AcceptanceForged,
    AcceptanceInvalid,
    ConnectionBroken,
    CountersDisturbed,
    CountersMissing,
    CountersReset,
    DefinitionsMixed,
    EngineFailed,
    PromptsInvalid,
)
from kconv.serving import ask
from kconv.serving import client as client
from kconv.targets.prompts import Prompt
from kconv.targets.suites import Suite

NAMES = ["vllm", "sglang", "trtllm"]
WRITING = tuple(Prompt(f"w{i}", "writing", (f"Write {i}.", f"Shorter, {i}.")) for i in range(5))
CODING = tuple(Prompt(f"c{i}", "coding", (f"Code {i}.",)) for i in range(4))
SUITE = Suite("tiny-suite", "sha256:00", (("writing", WRITING), ("coding", CODING)))
WISH = ServedHead(draft_tokens=K, name="my-head"), MeasureOptions()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """The stand-in counts before it answers."""
    for name, seconds in {"POLL_SECONDS": 0.001, "REST_SECONDS": 0.002, "LATE_SECONDS": 0.02}.items():
        monkeypatch.setattr(client, name, seconds)
    monkeypatch.setattr(ask, "PAUSE_SECONDS", 0.0)


def steps(prompt: Prompt) -> list[int]:
    """Return what each verify step over all turns of a prompt accepts."""
    return [
        step
        for last in range(1, len(prompt.turns) + 1)
        for step in steps_of([{"role": "user", "content": turn} for turn in prompt.turns[:last]])
    ]


def length(accepted: list[int]) -> float:
    return 1 + sum(accepted) / len(accepted)


def figure(acceptance, averaging: str, category: str = ""):
    [row] = [r for r in acceptance.rows if r.averaging == averaging and r.category == category]
    return row


@pytest.mark.parametrize("engine", NAMES)
@pytest.mark.parametrize("concurrency", [1, 3])
def test_figures_are_those_of_the_drafts_whichever_engine_counted(engine, concurrency):
    with speculating(engine) as server:
        found = measure_server(
            server.url, SUITE, ServedHead(draft_tokens=K, name="my-head"), MeasureOptions(concurrency=concurrency)
        )
    for category, prompts in (*SUITE.groups, ("", SUITE.prompts)):
        row = figure(found, "micro_steps", category)
        together = [step for prompt in prompts for step in steps(prompt)]
        assert row.value == pytest.approx(length(together), abs=1e-6)
        assert (row.drafts, row.prompts) == (len(together), len(prompts))
        assert (row.engine, row.engine_version, row.target, row.temperature) == (engine, "1.2.3", "tiny {kimi}", 0.0)
        assert row.interval is not None and row.interval.low <= row.value <= row.interval.high
        if engine != "sglang":
            assert row.rates == pytest.approx([sum(s > place for s in together) / len(together) for place in range(K)])
            assert 1 + sum(row.rates) == pytest.approx(row.value, abs=1e-6)
        else:
            assert row.rates is None
    both = [figure(found, "micro_steps", name).value for name, _ in SUITE.groups]
    assert figure(found, "macro_category").value == pytest.approx(statistics.mean(both), abs=1e-6)


@pytest.mark.parametrize("engine", NAMES)
def test_a_mean_over_requests_is_told_where_one_runs_at_a_time(engine):
    with speculating(engine) as server:
        found = measure_server(server.url, SUITE, *WISH)
    for category, prompts in (*SUITE.groups, ("", SUITE.prompts)):
        expected = statistics.mean(length(steps(prompt)) for prompt in prompts)
        row = figure(found, "macro_request", category)
        assert row.value == pytest.approx(expected, abs=1e-6)
        assert row.interval is not None and row.interval.over == "prompts" and row.interval.units == len(prompts)


def test_and_not_where_several_do():
    with speculating("vllm") as server:
        found = measure_server(server.url, SUITE, ServedHead(draft_tokens=K, name="h"), MeasureOptions(concurrency=2))
    assert {row.averaging for row in found.rows} == {"micro_steps", "macro_category"}
    assert {row.interval.over for row in found.rows if row.interval} == {"groups of up to 2 prompts"}


def test_the_second_turn_follows_the_answer_to_the_first():
    with speculating("vllm") as server:
        run = ServedHead(draft_tokens=K, name="h"), MeasureOptions(max_tokens=200, extra={"ignore_eos": True})
        measure_server(server.url, SUITE, *run)
        asked = server.asked
    assert len(asked) == sum(len(prompt.turns) for prompt in SUITE.prompts)
    second = next(body for body in asked if len(body["messages"]) == 3)
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"].startswith("w0 w1 ")
    assert all((body["max_tokens"], body["temperature"], body["ignore_eos"]) == (200, 0.0, True) for body in asked)


def test_looping_answers_are_seen():
    with speculating("vllm", looping=True) as looping, speculating("vllm") as sane:
        bad = measure_server(looping.url, SUITE, *WISH).rows[0].sanity
        good = measure_server(sane.url, SUITE, *WISH).rows[0].sanity
    assert bad is not None and bad.distinct_4grams < 0.5
    assert good is not None and good.distinct_4grams == 1.0


@pytest.mark.parametrize(
    ("release", "iterations"), [("totals", True), ("prefills", True), ("places", True), ("places", False)]
)
def test_every_release_of_tensorrt_llm_is_read_by_what_it_counts_rightly(release, iterations):
    with speculating("trtllm", release=release, iterations=iterations) as server:
        found = measure_server(server.url, SUITE, *WISH)
    row, together = figure(found, "micro_steps"), [step for prompt in SUITE.prompts for step in steps(prompt)]
    assert (row.value, row.drafts) == (pytest.approx(length(together), abs=1e-6), len(together))
    assert (row.rates is not None) == (release == "places")


def test_a_draft_that_is_counted_for_a_prefill_is_seen_where_it_is_counted_late(monkeypatch):
    monkeypatch.setattr(client, "LATE_SECONDS", 1.0)
    with speculating("trtllm", release="prefills", iterations=True, late=0.1, requests=1, generated=1) as server:
        row = figure(measure_server(server.url, SUITE, *WISH), "micro_steps")
    together = [step for prompt in SUITE.prompts for step in steps(prompt)]
    assert (row.value, row.drafts) == (pytest.approx(length(together), abs=1e-6), len(together))


@pytest.mark.parametrize("release", ["totals", "prefills"])
def test_a_tensorrt_llm_that_does_not_count_iterations_is_told_what_to_serve_with(release):
    with (
        speculating("trtllm", release=release) as server,
        pytest.raises(CountersMissing, match="without counting") as fault,
    ):
        measure_server(server.url, SUITE, *WISH)
    assert "return_perf_metrics: true and enable_iter_perf_stats: true" in fault.value.fix


def test_a_head_whose_tokens_were_never_accepted_has_a_length_of_one():
    page = 'trtllm_spec_decode_drafted_tokens_total{{model_name="a",token_position="{}"}} 5.0'
    reading = TRTLLM.counters.read("\n".join(page.format(place) for place in range(K)))
    counts = TRTLLM.counters.count(reading.totals, K, 1, 1)
    assert (counts.drafts, counts.accepted, counts.per_position) == (5.0, 0.0, (0.0,) * K)


@pytest.mark.parametrize("plain", [None, "plain sglang", "plain trtllm"])
def test_speed_up_is_against_the_same_prompts_without_speculation(plain):
    with speculating("vllm") as server, speculating(plain) as baseline:
        found = measure_server(
            server.url, SUITE, ServedHead(draft_tokens=K, name="h"), MeasureOptions(baseline_url=baseline.url)
        )
        assert [body["messages"] for body in baseline.asked] == [body["messages"] for body in server.asked]
    speed = found.rows[0].speed
    assert speed is not None and speed.same_answers == 1.0
    assert speed.speedup == pytest.approx(speed.tokens_per_second / speed.baseline_tokens_per_second)


@pytest.mark.parametrize("engine", NAMES)
def test_a_baseline_that_speculates_is_refused(engine):
    with speculating("vllm") as server, speculating(engine) as baseline:
        measure_server(baseline.url, SUITE, *WISH)
        with pytest.raises(DefinitionsMixed, match="baseline"):
            measure_server(
                server.url, SUITE, ServedHead(draft_tokens=K, name="h"), MeasureOptions(baseline_url=baseline.url)
            )


@pytest.mark.parametrize("plain", [None, "plain sglang", "plain trtllm"])
def test_a_server_without_speculation_is_named(plain):
    with speculating(plain) as server, pytest.raises(CountersMissing, match=r"without|not count"):
        measure_server(server.url, SUITE, *WISH)


@pytest.mark.parametrize("engine", NAMES)
def test_counters_that_go_backwards_are_named(engine):
    with speculating(engine, restart_after=4) as server, pytest.raises(CountersReset, match="backwards"):
        measure_server(server.url, SUITE, *WISH)


@pytest.mark.parametrize("engine", NAMES)
def test_more_than_k_plus_1_is_refused(engine):
    fault = {"vllm": DefinitionsMixed, "sglang": AcceptanceInvalid, "trtllm": AcceptanceInvalid}[engine]
    with speculating(engine, inflate=200) as server, pytest.raises((fault, AcceptanceInvalid), match=r"above 4|K is 3"):
        measure_server(server.url, SUITE, *WISH)


@pytest.mark.parametrize("engine", NAMES)
def test_drafts_that_no_one_asked_for_are_named(engine):
    with speculating(engine, foreign=60) as server, pytest.raises(CountersDisturbed, match=r"counted|counts"):
        measure_server(server.url, SUITE, *WISH)


def test_a_router_that_shows_two_engines_is_named():
    with speculating("router") as server, pytest.raises(DefinitionsMixed, match="vllm and sglang") as fault:
        measure_server(server.url, SUITE, *WISH)
    assert "--" not in fault.value.fix, "no option of bench or of validate chooses one"


def test_drafted_tokens_that_are_no_whole_number_of_steps_are_mixed_definitions():
    with pytest.raises(DefinitionsMixed, match="not a whole number") as fault:
        TRTLLM.counters.count({DRAFTED: 7.0, ACCEPTED: 3.0, ANSWERED: 6.0}, 2, 1, 1)
    assert "(--draft-tokens)" in fault.value.fix, "as bench and validate both call it"


@pytest.mark.parametrize("engine", NAMES)
def test_another_k_than_the_servers_is_refused(engine):
    with speculating(engine) as server, pytest.raises((DefinitionsMixed, AcceptanceInvalid, CountersDisturbed)):
        measure_server(server.url, SUITE, ServedHead(draft_tokens=1, name="h"), MeasureOptions())


def test_fewer_drafted_tokens_than_k_are_told_by_the_places():
    with speculating("vllm") as server, pytest.raises(DefinitionsMixed, match=r"3 positions .* K is 5"):
        measure_server(server.url, SUITE, ServedHead(draft_tokens=5, name="h"), MeasureOptions())


INFO = {"speculative_num_steps": K, "speculative_eagle_topk": 1, "speculative_draft_model_path": "/heads/mine"}


def test_what_sglang_says_of_its_drafting_is_kept():
    with speculating("sglang", info=INFO) as server:
        run = ServedHead(draft_tokens=K, name="h", weights={"model.safetensors": "00"}), MeasureOptions()
        found = measure_server(server.url, SUITE, *run)
    assert found.provenance["server"] == INFO
    assert "stated by the user" in found.provenance["weights"]


def test_a_tree_that_is_the_servers_is_measured():
    with speculating("sglang", info=INFO | {"speculative_eagle_topk": 4}) as server:
        found = measure_server(server.url, SUITE, ServedHead(draft_tokens=K, name="h"), MeasureOptions(tree="topk=4"))
    assert {row.tree for row in found.rows} == {"topk=4"}


@pytest.mark.parametrize(
    ("info", "tree", "message"),
    [
        ({"speculative_num_steps": 5}, "chain", "drafts 5 tokens in a chain, but --draft-tokens is 3"),
        (
            {"speculative_num_steps": 1, "speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 5},
            "chain",
            "drafts 4 tokens in a chain, but --draft-tokens is 3",
        ),
        ({"speculative_eagle_topk": 4}, "chain", "top-k 4, but --tree is 'chain'"),
        ({"speculative_eagle_topk": 1}, "topk=4", "top-k 1, but --tree is 'topk=4'"),
        ({"speculative_eagle_topk": 4}, "topk=8", "top-k 4, but --tree is 'topk=8'"),
    ],
)
def test_a_server_that_says_otherwise_is_refused_before_it_is_asked(info, tree, message):
    with speculating("sglang", info=INFO | info) as server:
        with pytest.raises(DefinitionsMixed, match=message):
            measure_server(server.url, SUITE, ServedHead(draft_tokens=K, name="h"), MeasureOptions(tree=tree))
        assert server.asked == []


def test_prompts_that_the_head_was_trained_on_are_refused_before_a_server_is_asked(tmp_path: Path):
    seen = [WRITING[2].digest[:16]]
    (tmp_path / "kconv.json").write_text(json.dumps({"training": {"data": {"prompts": seen}}}))
    with pytest.raises(PromptsInvalid, match="1 of 9 prompts"):
        measure_server(
            "http://127.0.0.1:9", SUITE, ServedHead(draft_tokens=K, name="h", folder=tmp_path), MeasureOptions()
        )


def test_a_server_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(EngineFailed, match="does not answer"):
        measure_server("http://127.0.0.1:9", SUITE, *WISH)


SILENT = (Prompt("s", "silent", ("Silence, please.",)),)


@pytest.mark.parametrize("engine", NAMES)
def test_an_answer_of_one_token_has_no_length(engine):
    with speculating(engine) as server:
        measure_server(server.url, SUITE, *WISH)
        suite = Suite("tiny-suite", "sha256:00", (("writing", (*WRITING[:2], *SILENT)),))
        found = measure_server(server.url, suite, *WISH)
        with pytest.raises(CountersMissing, match="no answer has more than one token"):
            measure_server(server.url, Suite("tiny-suite", "sha256:00", (("silent", SILENT),)), *WISH)
    row = figure(found, "macro_request", "writing")
    assert row.prompts == 2
    assert row.value == pytest.approx(statistics.mean(length(steps(p)) for p in WRITING[:2]), abs=1e-6)


def test_counters_that_never_rest_are_named(monkeypatch):
    monkeypatch.setattr(client, "RESTLESS_SECONDS", 0.05)
    monkeypatch.setattr(client, "REST_SECONDS", 0.5)
    with speculating("vllm") as server, pytest.raises(CountersDisturbed, match="still change"):
        measure_server(server.url, SUITE, *WISH)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--engine", "trtllm", "--engine-python", "p"], "is not one of vllm, sglang"),
        (["--engine", "vllm", "--engine-python", "p", "--tree", "topk=4,nodes=8"], "vllm drafts only chains"),
        (
            ["--engine", "sglang", "--engine-python", "p", "--tree", "topk=4"],
            "is neither chain nor like topk=4,nodes=8",
        ),
        (["--engine", "sglang"], "--engine needs --engine-python"),
        (["--engine-python", "p"], "with --url or --engine"),
    ],
)
def test_an_engine_that_is_started_is_asked_rightly(tmp_path, monkeypatch, words, fault):
    monkeypatch.delenv("KCONV_ENGINE_PYTHON", raising=False)
    given = ["bench", "--head", "h", "--target", "t", "--suite", "s.jsonl", "--out", str(tmp_path / "a.json")]
    done = CliRunner().invoke(main, [*given, *words])
    assert done.exit_code == 2
    assert fault in " ".join(done.output.split())


@pytest.mark.parametrize("engine", NAMES)
@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_asked_again_after_a_reset_is_counted_once(engine, concurrency, when):
    run = ServedHead(draft_tokens=K, name="my-head"), MeasureOptions(concurrency=concurrency)
    with speculating(engine) as server:
        whole = measure_server(server.url, SUITE, *run)
    # The first request, a second turn, and one that is asked for again already.
    with speculating(engine, breaks=dict.fromkeys((2, 6, 7), when)) as server:
        found = measure_server(server.url, SUITE, *run)
        assert server.sent > sum(len(prompt.turns) for prompt in SUITE.prompts) + 2
    drop = {"date", "tokens_per_second"}
    assert [row.model_dump(exclude=drop) for row in found.rows] == [row.model_dump(exclude=drop) for row in whole.rows]


def test_a_connection_that_breaks_each_time_ends_the_measurement():
    with speculating("vllm", breaks=dict.fromkeys(range(3, 99), "before")) as server:
        with pytest.raises(ConnectionBroken, match="does not answer"):
            measure_server(server.url, SUITE, *WISH)
        assert server.sent == 2 + ask.ATTEMPTS


def test_a_server_that_still_works_for_a_broken_connection_is_not_measured(monkeypatch):
    """Its drafts would be counted with the prompts that follow."""
    monkeypatch.setattr(client, "RESTLESS_SECONDS", 0.2)
    monkeypatch.setattr(client, "LATE_SECONDS", 0.1)
    with speculating("vllm", breaks={2: "after"}) as server:

        def work():
            while not done.wait(0.02):
                with server.lock:
                    server.steps += [1] if server.sent >= 2 else []

        done = threading.Event()
        worker = threading.Thread(target=work)
        worker.start()
        try:
            with pytest.raises(CountersDisturbed):
                measure_server(server.url, SUITE, *WISH)
        finally:
            done.set()
            worker.join()


def test_a_server_that_restarts_with_a_reset_is_named():
    with speculating("vllm", breaks={4: "after"}, restart_after=3) as server, pytest.raises(CountersReset):
        measure_server(server.url, SUITE, *WISH)


def test_settings_whose_page_breaks_off_are_read_all_the_same():
    """They were taken for absent, and a server that forges its acceptance for an honest one."""
    path = "/server_info?config_format=json"
    hides = {path: 1, "/server_info": 1}
    with speculating("sglang", info={"simulate_acc_len": 3}, hides=hides) as server, pytest.raises(AcceptanceForged):
        measure_server(server.url, SUITE, *WISH)
    with speculating("vllm", hides={path: 99}) as server, pytest.raises(ConnectionBroken) as broken:
        measure_server(server.url, SUITE, *WISH)
    assert broken.value.where.endswith(path)


def test_a_version_that_cannot_be_read_is_not_one_that_is_not_told():
    with (
        speculating("vllm", hides={"/version": 99}) as server,
        pytest.raises(ConnectionBroken, match="does not answer"),
    ):
        measure_server(server.url, SUITE, *WISH)
