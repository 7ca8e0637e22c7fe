import json
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from support.loopback import trickling

from kconv.engines.counters import Counts
from kconv.engines.vllm import ACCEPTED, ACCEPTED_AT, DRAFTED, DRAFTS, ENGINE
from kconv.errors import CountersMissing, EngineFailed
from kconv.serving import client as http
from kconv.serving.ask import ask_all
from kconv.serving.client import Client

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


WAITS = """
import time
from kconv.checkpoint.staging import heed_sigterm
from kconv.serving.ask import ask_all
with heed_sigterm():
    for place, _ in ask_all(lambda one: time.sleep(one), [0, 3600, 3600], 2):
        print(place, flush=True)
"""


def test_whoever_is_ended_waits_for_no_answer_under_way():
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "0\n"
        process.terminate()
        try:
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()


def test_of_several_asked_side_by_side_each_is_answered_once_and_the_first_fault_ends_all():
    def ask(one: int) -> int:
        if one == 7:
            raise EngineFailed("seven", where="here", fix="Leave it out.")
        return 10 * one

    assert sorted(ask_all(ask, [3, 1, 2], 2)) == [(0, 30), (1, 10), (2, 20)]
    assert list(ask_all(ask, [], 4)) == []
    with pytest.raises(EngineFailed, match="seven"):
        list(ask_all(ask, [1, 7, 2], 1))


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
    places = {f"{ACCEPTED_AT} {place}": count for place, count in enumerate((16, 14, 13))}
    assert client.read_counters(ENGINE.counters).totals == {DRAFTS: 16, DRAFTED: 48, ACCEPTED: 43} | places
    stand_in.answers["/metrics"] = (200, "")
    with pytest.raises(CountersMissing):
        client.read_counters(ENGINE.counters)


def test_is_healthy_only_if_the_server_says_so(client, stand_in):
    assert not client.is_healthy()
    stand_in.answers["/health"] = (503, "")
    assert not client.is_healthy()
    stand_in.answers["/health"] = (200, "")
    assert client.is_healthy()


def test_a_server_that_is_not_there_is_a_fault():
    with pytest.raises(EngineFailed, match="does not answer"):
        Client("http://127.0.0.1:1", "tiny").read_counters(ENGINE.counters)


def test_a_proxy_is_not_asked_about_this_machines_own_ports(client, stand_in, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    stand_in.answers["/health"] = (200, "")
    assert client.is_healthy()


def test_an_answer_without_end_is_not_read(client, stand_in, monkeypatch):
    monkeypatch.setattr(http, "LARGEST", 1000)
    stand_in.answers["/metrics"] = (200, "x" * 2000)
    with pytest.raises(EngineFailed, match="larger than"):
        client.read_counters(ENGINE.counters)


def test_an_answer_that_trickles_is_given_up():
    with trickling() as url:
        start = time.monotonic()
        with pytest.raises(EngineFailed, match="too long"):
            Client(url, "tiny", timeout=0.3).read_counters(ENGINE.counters)
        assert time.monotonic() - start < 3


@pytest.mark.parametrize("url", ["file:///etc/hostname", "no address", "http://[::1", "ftp://127.0.0.1"])
def test_what_is_no_address_of_a_server_is_a_fault(url):
    with pytest.raises(EngineFailed):
        Client(url, "tiny").read_counters(ENGINE.counters)


def test_an_answer_in_another_encoding_is_a_fault(stand_in):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(EngineFailed, match="UTF-8"):
            Client(f"http://127.0.0.1:{listening.getsockname()[1]}", "tiny").read_counters(ENGINE.counters)
        thread.join()


# Each ended in a traceback, here or where its text or histogram was used.
CHAT = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
STRANGE = {
    "no number of tokens": CHAT | {"usage": {"completion_tokens": float("inf")}},
    "a list for a text": CHAT | {"choices": [{"message": {"content": ["a"]}, "finish_reason": "stop"}]},
    "a text for a message": CHAT | {"choices": [{"message": "a", "finish_reason": "stop"}]},
    "a list of metrics": CHAT | {"metrics": [1]},
    "texts for counts": CHAT | {"metrics": {"speculative_decoding": {"acceptance_histogram": ["a"]}}},
    "counts below zero": CHAT | {"metrics": {"speculative_decoding": {"acceptance_histogram": [-1, 2]}}},
    "counts beyond a float": CHAT | {"metrics": {"speculative_decoding": {"acceptance_histogram": [10**400]}}},
}


@pytest.mark.parametrize("answer", STRANGE.values(), ids=STRANGE)
def test_a_chat_completion_of_another_shape_is_a_fault(client, stand_in, answer):
    stand_in.answers["/v1/chat/completions"] = (200, json.dumps(answer))
    with pytest.raises(EngineFailed, match="not a chat completion"):
        client.chat([{"role": "user", "content": "a"}], 1, 0.0, ENGINE.per_request)


@pytest.mark.parametrize("ids", ["abc", [1.5], [True], [-1], [None], {"0": 1}])
def test_token_ids_are_whole_numbers(client, stand_in, ids):
    stand_in.answers[COMPLETIONS] = (200, json.dumps({"choices": [{"text": "", "token_ids": ids}]}))
    with pytest.raises(EngineFailed, match="no token_ids"):
        client.complete([1], 1)


def test_a_long_histogram_is_counted_at_once():
    """Each place was a sum over all behind it: a million of them took hours."""
    places = Counts.of_histogram([1] * 1_000_000, 3)
    assert (places.drafts, places.accepted) == (1e6, sum(range(1_000_000)))
    assert Counts.of_histogram([5, 3, 2], 3).per_position == (5.0, 2.0, 0.0)
    assert Counts.of_histogram([], 2).per_position == (0.0, 0.0)
