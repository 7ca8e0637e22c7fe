"""A server on the loopback, run beside a test."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Answer = Callable[[str, Any], tuple[int, str]]
"""From a path and a body, parsed, None of a GET, to a status and a text."""


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
            status, text = answer(self.path, body)
            data = text.encode()
            self.send_response(status)
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
