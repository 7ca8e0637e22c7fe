"""A server that is reached by its address: its counters, its engine, and what only warns of another dtype."""

from __future__ import annotations

import json

import pytest
from support.loopback import K, vllm_counters

from kconv.errors import CountersMissing, DefinitionsMixed, EngineFailed
from kconv.measure.figures import EngineFigures
from kconv.serving.client import ONE_TOKEN
from kconv.targets.tokenizer import load_tokenizer
from kconv.validate.engines.check import FORWARD
from kconv.validate.engines.judge import COUNTS, OUTPUT, UNREACHED, judge

# As the head is asked in conftest.py.
NEW_TOKENS = 10


@pytest.fixture
def server(stand_in, known, tiny_target):
    """Return a function that has the stand-in server answer as an engine that was given these counters."""
    ids, own, _ = known
    inner = load_tokenizer(tiny_target).inner

    def server(engine: str, before: str, after: str, *, wrong: bool = False) -> str:
        rows = {tuple(prompt): row[:NEW_TOKENS] for prompt, row in zip(ids, own, strict=True)}
        path = {"vllm": "/metrics", "sglang": "/metrics", "trtllm": "/prometheus/metrics"}[engine]

        def complete(body):
            if body["prompt"] == ONE_TOKEN["prompt"]:
                return 200, json.dumps({"choices": [{"text": "."}]})
            row = rows[tuple(body["prompt"])]
            choice = {"text": inner.decode(row, skip_special_tokens=True) + ("!" if wrong else "")}
            if engine == "vllm":
                choice["token_ids"] = [*row[:-1], row[-1] + 1] if wrong else row
            return 200, json.dumps({"choices": [choice]})

        def count(_):
            asked = [body for where, body in stand_in.asked if where == "/v1/completions"]
            return 200, after if any(body["prompt"] != ONE_TOKEN["prompt"] for body in asked) else before

        stand_in.asked.clear()
        # Of another engine that it stood for before, nothing is left.
        stand_in.answers.clear()
        stand_in.answers |= {
            "/v1/models": (200, json.dumps({"data": [{"id": "tiny"}]})),
            "/v1/completions": complete,
            path: count,
        }
        return stand_in.url

    return server


def sglang(verified: int, generated: int, requests: int) -> str:
    return (
        f'sglang:spec_verify_calls_total{{model_name="tiny"}} {verified}.0\n'
        f'sglang:generation_tokens_total{{model_name="tiny"}} {generated}.0\n'
        f'sglang:num_requests_total{{model_name="tiny"}} {requests}.0\n'
    )


def trtllm(drafted: int, accepted: int) -> str:
    names = ("num_draft_tokens", "num_accepted_tokens")
    return "".join(
        f"trtllm_spec_decode_{name}_total {value}.0\n" for name, value in zip(names, (drafted, accepted), strict=True)
    )


def test_a_vllm_that_is_reached_is_held_against_the_targets_own_forward(check, server, known):
    expected = known[2]
    places = tuple(int(count) for count in expected.accepted)
    url = server("vllm", vllm_counters(0, (0, 0, 0), base=3), vllm_counters(expected.drafts, places, base=3))
    found = check(url=url, engine=None)
    assert found.findings == ()
    assert (found.figures.url, found.figures.reference, found.figures.same_output) == (url, FORWARD, 5)


def test_sglang_and_tensorrt_llm_are_read_by_their_own_counters(check, server, known):
    expected = known[2]
    accepted = int(sum(expected.accepted))
    drafts = expected.drafts
    pages = {
        # It counts the five answers' tokens, and not what their limit cuts off.
        "sglang": (sglang(4, 20, 2), sglang(4 + drafts, 20 + 5 * NEW_TOKENS, 2 + 5)),
        "trtllm": (trtllm(30, 9), trtllm(30 + K * drafts, 9 + accepted)),
    }
    cut = 5 * (NEW_TOKENS - 1) - drafts
    assert cut < accepted
    counted = {"sglang": cut, "trtllm": accepted}
    for engine, (before, after) in pages.items():
        found = check(url=server(engine, before, after), engine=engine)
        assert found.findings == (), engine
        assert (found.figures.engine, found.figures.drafts, found.figures.accepted) == (
            engine,
            drafts,
            counted[engine],
        )
        assert found.figures.per_position is None
        assert found.figures.length == found.figures.expected_length == pytest.approx(1 + counted[engine] / drafts)
        assert found.figures.same_output == 5


def test_a_reached_server_that_differs_is_a_warning(check, server, known):
    """Its dtype may decide a near tie otherwise; only the user can tell."""
    expected = known[2]
    url = server("trtllm", trtllm(0, 0), trtllm(K * expected.drafts, 1), wrong=True)
    found = check(url=url, engine=None)
    assert [(f.rule, f.severity, f.engines) for f in found.findings] == [
        (OUTPUT, "warning", ("trtllm",)),
        (COUNTS, "warning", ("trtllm",)),
    ]


def test_what_cannot_be_asked_is_told(check, server, known):
    with pytest.raises(EngineFailed, match="no Python environment with vLLM"):
        check()
    with pytest.raises(EngineFailed, match="does not answer"):
        check(url="http://127.0.0.1:1")
    url = server("trtllm", trtllm(0, 0), trtllm(3, 1))
    with pytest.raises(EngineFailed, match="--engine is sglang, but this server is trtllm"):
        check(url=url, engine="sglang")


def test_another_number_of_drafted_tokens_is_told(check, server, stand_in, known):
    expected = known[2]
    places = (*(int(count) for count in expected.accepted), 0)
    url = server("vllm", vllm_counters(0, (0,) * len(places)), vllm_counters(expected.drafts, places))
    with pytest.raises(DefinitionsMixed, match=r"4 positions .* K is 3"):
        check(url=url)
    url = server("sglang", sglang(0, 0, 0), sglang(1, 3, 1))
    stand_in.answers["/server_info"] = (200, json.dumps({"speculative_num_steps": 5}))
    with pytest.raises(DefinitionsMixed, match="drafts 5 tokens"):
        check(url=url, engine="sglang")


def test_a_server_that_drafts_nothing_is_told(check, server):
    with pytest.raises(CountersMissing, match="nothing was drafted"):
        check(url=server("trtllm", trtllm(0, 0), trtllm(0, 0)), engine=None)
    nothing = vllm_counters(0, (0, 0, 0))
    with pytest.raises(CountersMissing, match="nothing was drafted"):
        check(url=server("vllm", nothing, nothing))


def test_sglang_tells_of_each_request_what_its_counters_cut(check, server, stand_in, known):
    """Its histograms hold every accepted token, so they are held against the whole chain, place by place."""
    ids, own, expected = known
    places = [int(count) for count in expected.accepted]
    whole = [expected.drafts, *places]
    url = server("sglang", sglang(0, 0, 0), sglang(9, 99, 9))
    stand_in.answers["/server_info"] = (200, "{}")
    histograms = [[0] * (K + 1)] * (len(ids) - 1)
    histograms.append([more - less for more, less in zip(whole, [*places, 0], strict=True)])

    def generate(body):
        at = ids.index(body["input_ids"])
        assert body["sampling_params"] == {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        meta = {"spec_correct_drafts_histogram": histograms[at]}
        return 200, json.dumps({"output_ids": own[at][:NEW_TOKENS], "meta_info": meta})

    stand_in.answers["/generate"] = generate
    found = check(url=url, engine="sglang")
    assert found.findings == ()
    assert found.figures.per_position == tuple(places)
    assert found.provenance["engine"]["note"] == "counted by the engine for each request"
    # One place less in one request is found.
    at = next(place for place, count in enumerate(histograms[-1]) if place and count)
    histograms[-1][at - 1] += 1
    histograms[-1][at] -= 1
    [finding] = check(url=url, engine="sglang").findings
    assert finding.rule == COUNTS


def test_what_a_limit_cuts_off_is_no_finding():
    """As a served SGLang 0.5.23 counted over 48 answers of 64 tokens, and kconv's chain of the same head did."""
    figures = EngineFigures(
        engine="sglang", url="http://127.0.0.1:30123", prompts=48, new_tokens=64, steps=3, same_output=48,
        reference=FORWARD, drafts=1231, accepted=1793, per_position=None, length=1 + 1793 / 1231, expected_drafts=1231,
        expected_per_position=(900, 600, 345), expected_length=1 + 1793 / 1231, expected_accepted=48 * 63 - 1231,
    )  # fmt: skip
    assert judge(figures, strict=True) == []
    uncut = figures.model_copy(update={"expected_accepted": None})
    assert [found.rule for found in judge(uncut, strict=True)] == [COUNTS]
    assert "accepted 1793" in judge(uncut, strict=True)[0].message


def test_what_no_tensor_reached_is_an_error():
    figures = EngineFigures(
        engine="sglang", url="", prompts=1, new_tokens=8, steps=3, same_output=1, reference=FORWARD, drafts=7,
        accepted=0, per_position=(0, 0, 0), length=1.0, expected_drafts=7, expected_per_position=(0, 0, 0),
        expected_length=1.0, unreached=("model.fc.weight",),
    )  # fmt: skip
    [found] = judge(figures, strict=False)
    assert (found.rule, found.severity) == (UNREACHED, "error")
    assert "model.fc.weight" in found.message
