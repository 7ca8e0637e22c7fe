"""Servers on the loopback, run beside a test: any, one that stands in for an engine's, and one that speculates.

The last has chat completions, and counters in the shape of three engines. It shows what kconv makes of counters, and
nothing of what an engine does. Shapes: vLLM 0.32's /metrics, SGLang 0.5.23's /metrics, TensorRT-LLM's
/prometheus/metrics. The last is empty before a first answer: prometheus_client shows nothing, in its multi-process
mode, of counters with labels that were never raised, and TensorRT-LLM raises none by 0.
"""

from __future__ import annotations

import hashlib
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Answer = Callable[[str, Any], tuple[int, str | bytes] | tuple[int, str | bytes, Mapping[str, str]]]
"""From a path and a body, parsed, None of a GET, to a status, a text, and headers."""


class PatientServer(ThreadingHTTPServer):
    """A server that keeps as many callers waiting as a real one; the library's own resets a call where five wait."""

    request_queue_size = 1024


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """Answer calls until the block ends; the yielded string is the server's address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            status, text, *headers = answer(self.path, body)
            data = text.encode() if isinstance(text, str) else text
            self.send_response(status)
            for pair in (pair for more in headers for pair in more.items()):
                self.send_header(*pair)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = PatientServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def trickling(calls: int = 1) -> Iterator[str]:
    """Answer so many calls, one after the other, byte by byte; the yielded string is the server's address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def trickle() -> None:
            for _ in range(calls):
                connection, _ = listening.accept()
                with connection, suppress(OSError):
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
                    for _ in range(100):
                        connection.sendall(b"x")
                        time.sleep(0.05)

        thread = threading.Thread(target=trickle)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join()


@dataclass
class StandIn:
    """What the server answers, by path, as (status, text) or a function of the body; and the bodies it was sent."""

    url: str = ""
    answers: dict[str, tuple[int, str] | Callable[[Any], tuple[int, str]]] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    said = StandIn()

    def answer(path: str, body: Any) -> tuple[int, str]:
        said.asked.append((path, body))
        found = said.answers.get(path, (404, "not found"))
        return found(body) if callable(found) else found

    with serving(answer) as said.url:
        yield said


K = 3
LABELS = {
    "vllm": 'engine="0",model_name="tiny {kimi}"',
    "sglang": 'engine_type="unified",model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"',
    "trtllm": 'engine_type="trtllm",model_name="tiny"',
}
METRICS = {
    "vllm": "/metrics", "sglang": "/metrics", "trtllm": "/prometheus/metrics", "plain trtllm": "/prometheus/metrics",
}  # fmt: skip
VERSION_PATHS = ("/version", "/server_info")
VERSIONS = {"vllm": ("/version",), "sglang": ("/server_info",), "trtllm": ("/version",)}


def steps_of(messages: list[dict[str, str]]) -> list[int]:
    """Return how many drafted tokens each verify step of an answer accepts: the same for the same dialogue."""
    asked = [message["content"] for message in messages if message["role"] == "user"]
    digest = hashlib.sha256(json.dumps(asked).encode()).digest()
    return [byte % (K + 1) for byte in digest[: 4 + digest[0] % 20]]


@dataclass
class SpecServer:
    """What it counted, and what goes wrong.

    Attributes:
        engine: whose shapes it shows; None for a server without speculation, "router" for two at once.
        requests, generated: answered requests, and tokens in them.
        steps: accepted tokens of every verify step so far, in any order.
        asked: the bodies of the requests.
        inflate: added to the accepted tokens of each request: more than a chain can accept.
        foreign: tokens of verify steps counted with each request, that no one here asked for.
        restart_after: counters begin again after so many requests.
        release: what TensorRT-LLM counts beside the totals of iterations: nothing ("totals"), the tokens of "places",
            or, as it first did, "prefills" among the drafts of places.
        iterations: whether TensorRT-LLM was started with enable_iter_perf_stats.
        late: seconds after which TensorRT-LLM counts an answer of one token.
        looping: answers repeat themselves.
        info: what SGLang's /server_info says beside the version.
        pause: seconds before each streamed token; four times that before the first.
        dies: what a stream ends with instead of the count of its tokens.
        breaks: numbers of the requests whose connection ends without an answer, "before" or "after" the work.
        hides: how often the connection of whoever asks for a page ends without an answer, by path.
        forged: the acceptance length that it is set to, as engines do it: its whole part always, the rest by chance.
    """

    engine: str | None
    requests: int = 0
    generated: int = 0
    steps: list[int] = field(default_factory=list)
    asked: list[dict] = field(default_factory=list)
    inflate: int = 0
    foreign: int = 0
    restart_after: int = 0
    release: str = "places"
    iterations: bool = False
    late: float = 0.0
    looping: bool = False
    info: dict[str, object] = field(default_factory=dict)
    forged: float | None = None
    pause: float = 0.0
    dies: dict[str, object] = field(default_factory=dict)
    breaks: dict[int, str] = field(default_factory=dict)
    hides: dict[str, int] = field(default_factory=dict)
    sent: int = 0
    port: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def complete(self, body: dict) -> dict:
        """Answer with one token, which the prefill gives."""
        assert body["max_tokens"] == 1
        if self.late:
            threading.Timer(self.late, self._count_one_token).start()
        else:
            self._count_one_token()
        return {"choices": [{"text": "again", "finish_reason": "length"}], "usage": {"completion_tokens": 1}}

    def _count_one_token(self) -> None:
        with self.lock:
            self.requests += 1
            self.generated += 1

    def chat(self, body: dict) -> dict:
        """Answer a dialogue, and count."""
        steps = [] if body["messages"][0]["content"].startswith("Silence") else steps_of(body["messages"])
        if self.forged is not None:
            more, whole = math.modf(self.forged - 1)
            steps = [int(whole) + (step / (K + 1) < more) for step in steps]
        tokens = min(1 + sum(steps) + len(steps), body["max_tokens"])
        with self.lock:
            self.asked.append(body)
            if self.restart_after and self.requests == self.restart_after:
                self.requests = self.generated = 0
                self.steps.clear()
            self.requests += 1
            self.generated += tokens + self.inflate
            self.steps += [*steps, *([0] * self.foreign)]
        words = ["again"] * tokens if self.looping else [f"w{i}" for i in range(tokens)]
        choice = {"message": {"role": "assistant", "content": " ".join(words)}, "finish_reason": "stop"}
        return {"choices": [choice], "usage": {"completion_tokens": tokens}}

    def metrics(self, path: str) -> str:
        """Return a page of counters, "" where there is none."""
        shown = ("vllm", "sglang") if self.engine == "router" else (self.engine or "plain",)
        pages = [_PAGES[name](self) for name in shown if METRICS.get(name, "/metrics") == path]
        return "".join(pages)


def _vllm(server: SpecServer) -> str:
    labels, accepted = LABELS["vllm"], sum(server.steps) + server.inflate * server.requests
    lines = [
        "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.",
        "# TYPE vllm:spec_decode_num_drafts_total counter",
        f"vllm:spec_decode_num_drafts_total{{{labels}}} {float(len(server.steps))}",
        f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.7e+09",
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {float(K * len(server.steps))}",
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {float(accepted)}",
    ]
    for place in range(K):
        count = sum(step > place for step in server.steps) + (server.inflate * server.requests if not place else 0)
        lines.append(
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{place}"}} {float(count)}'
        )
    return "\n".join(lines) + "\n"


def vllm_counters(drafts: int, accepted: tuple[int, ...], base: int = 0) -> str:
    """Return vLLM's counters in Prometheus' text, `base` above what was counted."""
    name = "vllm:spec_decode_num_"
    lines = [
        f"{name}drafts_total {drafts + base}",
        f"{name}draft_tokens_total {K * drafts + base}",
        f"{name}accepted_tokens_total {sum(accepted) + base}",
    ]
    places = [
        f'{name}accepted_tokens_per_pos_total{{position="{i}"}} {count + base}' for i, count in enumerate(accepted)
    ]
    return "\n".join(lines + places) + "\n"


def _sglang(server: SpecServer) -> str:
    labels = LABELS["sglang"]
    verify = len(server.steps)
    return (
        f"sglang:num_running_reqs{{{labels}}} 0.0\n"
        f"sglang:spec_accept_length{{{labels}}} 2.5\n"
        f"sglang:generation_tokens_total{{{labels}}} {float(server.generated)}\n"
        f"sglang:num_requests_total{{{labels}}} {float(server.requests + server.foreign * server.requests)}\n"
        + (f"sglang:spec_verify_calls_total{{{labels}}} {float(verify)}\n" if verify else "")
    )


def _trtllm(server: SpecServer) -> str:
    labels, steps, more = LABELS["trtllm"], len(server.steps), server.inflate * server.requests
    counts = {
        f'request_success_total{{{labels},finished_reason="stop"}}': server.requests,
        f"generation_tokens_total{{{labels}}}": server.generated,
    }
    if server.iterations:
        counts[f"spec_decode_num_draft_tokens_total{{{labels}}}"] = K * steps
        counts[f"spec_decode_num_accepted_tokens_total{{{labels}}}"] = sum(server.steps) + more
    for place in range(K if server.release != "totals" else 0):
        at = f'{{{labels},token_position="{place}"}}'
        counts[f"spec_decode_drafted_tokens_total{at}"] = steps + server.requests * (server.release == "prefills")
        accepted = sum(step > place for step in server.steps) + (0 if place else more)
        counts[f"spec_decode_accepted_tokens_total{at}"] = accepted
    return "".join(f"trtllm_{name} {float(count)}\n" for name, count in counts.items() if count > 0)


def _plain_trtllm(server: SpecServer) -> str:
    return _trtllm(SpecServer("trtllm", server.requests, server.generated, iterations=True))


def _plain(server: SpecServer) -> str:
    return f'vllm:num_requests_running{{engine="0"}} 0.0\nvllm:request_success_total{{engine="0"}} {server.requests}\n'


def _plain_sglang(server: SpecServer) -> str:
    server = SpecServer("sglang", server.requests, server.generated)
    return _sglang(server)


_PAGES = {
    "vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm,
    "plain": _plain, "plain sglang": _plain_sglang, "plain trtllm": _plain_trtllm,
}  # fmt: skip


@contextmanager
def speculating(engine: str | None, **faults) -> Iterator[SpecServer]:
    """Start a stand-in, and stop it in the end."""
    server = SpecServer(engine, **faults)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _send(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            if server.hides.get(self.path, 0) > 0:
                server.hides[self.path] -= 1
                self.close_connection = True
                return
            page = server.metrics(self.path)
            if page:
                self._send(200, page)
            elif self.path == "/v1/models":
                self._send(200, json.dumps({"data": [{"id": "tiny {kimi}"}]}))
            elif self.path in VERSIONS.get(server.engine or "", VERSION_PATHS) or (
                # As vLLM does in its development mode.
                server.info and self.path.startswith("/server_info")
            ):
                self._send(200, json.dumps({"version": "1.2.3"} | server.info))
            else:
                self._send(404, "{}")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.sent += 1
                broken = server.breaks.get(server.sent)
            if broken != "before":
                answer = (server.chat if self.path.endswith("/chat/completions") else server.complete)(body)
            if broken:
                self.close_connection = True
            elif body.get("stream"):
                self._stream(answer)
            else:
                self._send(200, json.dumps(answer))

        def _stream(self, answer: dict) -> None:
            """Send a chunk for each word, after a pause for the first and a shorter one for each further."""
            words = answer["choices"][0]["message"]["content"].split(" ")
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            for place, word in enumerate(words):
                time.sleep(server.pause * (4 if not place else 1))
                delta = {"content": word if not place else f" {word}"}
                self._chunk({"choices": [{"delta": delta}]})
            self._chunk(server.dies or {"choices": [], "usage": answer["usage"]})
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True

        def _chunk(self, value: dict) -> None:
            self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
            self.wfile.flush()

    listening = PatientServer(("127.0.0.1", 0), Handler)
    server.port = listening.server_address[1]
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()
