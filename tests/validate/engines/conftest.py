"""A server on the loopback that stands in for an engine's."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass
class StandIn:
    """What the server answers, by path, as (status, text) or a function of the body; and the bodies it was sent."""

    url: str = ""
    answers: dict[str, tuple[int, str] | Callable[[Any], tuple[int, str]]] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    said = StandIn()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            said.asked.append((self.path, body))
            answer = said.answers.get(self.path, (404, "not found"))
            status, text = answer(body) if callable(answer) else answer
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    said.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield said
    server.shutdown()
    thread.join()
    server.server_close()
