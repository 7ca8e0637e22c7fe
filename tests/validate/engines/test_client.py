import json

import pytest

from kconv.errors import CountersMissing, EngineFailed
from kconv.validate.engines.client import Client
from kconv.validate.engines.counters import SpecCounters

COMPLETIONS = "/v1/completions"
METRICS = """\
vllm:spec_decode_num_drafts_total{engine="0",model_name="tiny"} 16.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="tiny"} 48.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="tiny"} 43.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="0"} 16.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="1"} 14.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="2"} 13.0
"""


@pytest.fixture
def client(stand_in) -> Client:
    return Client(stand_in.url, "tiny", timeout=10)


def test_asks_for_a_greedy_completion_that_no_end_of_text_cuts_short(client, stand_in):
    stand_in.answers[COMPLETIONS] = (200, json.dumps({"choices": [{"text": "", "token_ids": [5, 9, 2]}]}))
    assert client.complete([1, 7], 3) == [5, 9, 2]
    [(_, body)] = stand_in.asked
    assert body == {
        "model": "tiny",
        "prompt": [1, 7],
        "max_tokens": 3,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


@pytest.mark.parametrize(
    "answer",
    [
        json.dumps({"choices": [{"text": "some text"}]}),
        json.dumps({"choices": []}),
        json.dumps({"object": "error"}),
        json.dumps([1, 2]),
        "<html>a proxy's page</html>",
    ],
)
def test_an_answer_without_token_ids_is_a_fault(client, stand_in, answer):
    stand_in.answers[COMPLETIONS] = (200, answer)
    with pytest.raises(EngineFailed, match="no token_ids"):
        client.complete([1], 1)


def test_the_servers_complaint_is_told(client, stand_in):
    stand_in.answers[COMPLETIONS] = (400, "maximum context length is 256 tokens")
    with pytest.raises(EngineFailed, match="answered 400: maximum context length is 256 tokens") as fault:
        client.complete([1] * 300, 1)
    assert fault.value.where.endswith(COMPLETIONS)


def test_reads_the_counters(client, stand_in):
    stand_in.answers["/metrics"] = (200, METRICS)
    assert client.read_counters() == SpecCounters(16, 48, 43, (16, 14, 13))
    stand_in.answers["/metrics"] = (200, "")
    with pytest.raises(CountersMissing):
        client.read_counters()


def test_is_healthy_only_if_the_server_says_so(client, stand_in):
    assert not client.is_healthy()
    stand_in.answers["/health"] = (503, "")
    assert not client.is_healthy()
    stand_in.answers["/health"] = (200, "")
    assert client.is_healthy()


def test_a_server_that_is_not_there_is_a_fault():
    with pytest.raises(EngineFailed, match="does not answer"):
        Client("http://127.0.0.1:1", "tiny").read_counters()


def test_a_proxy_is_not_asked_about_this_machines_own_ports(client, stand_in, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    stand_in.answers["/health"] = (200, "")
    assert client.is_healthy()
