"""A server on the loopback, run beside a test."""

from __future__ import annotations

import json
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
