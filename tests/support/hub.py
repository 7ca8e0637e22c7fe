"""A stand-in for the Hugging Face Hub on loopback, for huggingface_hub's own client.

It shows what the client does, and nothing of what the real Hub would refuse. The routes are tables: `hub_routes.READ`
is what a reader needs, `WRITE` what a writer does.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socket import SHUT_RDWR
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import torch
from safetensors.torch import save
from support.hub_routes import DATASETS, READ, WRITE, Call, Refused, Reply, Repo
from support.loopback import PatientServer

# HEAD is answered as GET, without its body.
ROUTES: list[tuple[str, str, Callable[..., Reply]]] = [*WRITE, *READ, *DATASETS]


@dataclass(frozen=True)
class Served:
    """A call that was answered, with the status and the bytes of body that were sent."""

    call: Call
    status: int
    sent: int


@dataclass
class Fault:
    """What goes wrong in place of an answer: `reply`, or a connection that drops amid a body if None.

    The body is the answer's; or the request's where `upload` is set, and then the call is not carried out.
    """

    where: re.Pattern[str]
    reply: Reply | None
    left: int
    upload: bool = False


class Hub:
    """The stand-in: repositories, the calls it answered, and the faults it was told to make.

    Attributes:
        repos: by id.
        tokens: those that it accepts; `readers` of them may only read, `bound` ones cannot create a repository.
        publisher: what a CI job shows, and the token that it is given for that; None knows no trusted publisher.
        objects: what was uploaded by LFS, by its sha256.
        garble: what becomes of stored bytes when they are served; nothing, but on demand.
        before: called with each call before it is answered.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.tokens: set[str] = set()
        self.readers: set[str] = set()
        self.bound: set[str] = set()
        self.publisher: tuple[str, str] | None = None
        self.objects: dict[str, bytes] = {}
        self.garble: Callable[[bytes], bytes] = lambda data: data
        self.served: list[Served] = []
        self.faults: list[Fault] = []
        self.serves_ranges = True
        self.before: Callable[[Call], None] = lambda call: None
        self._server = PatientServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        """What HF_ENDPOINT is set to."""
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def commit(self, repo: str, files: Mapping[str, bytes] | Path, *, branch: str = "main") -> str:
        """Put files, or all those of a folder, as the next commit of a branch, and return its sha.

        The sha is made of the content: the client's cache takes two commits of one sha for the same.
        """
        if isinstance(files, Path):
            files = {str(p.relative_to(files)): p.read_bytes() for p in files.rglob("*") if p.is_file()}
        held = self.repos.setdefault(repo, Repo())
        tree = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        sha = hashlib.sha1(json.dumps([repo, sorted(tree.items())]).encode()).hexdigest()
        held.commits[sha] = dict(files)
        held.branches[branch] = sha
        return sha

    def fail(self, where: str, reply: Reply | None = None, *, times: int = 1_000) -> None:
        """Answer the next calls whose "METHOD /path" matches with `reply`, or drop the connection if None."""
        self.faults.append(Fault(re.compile(where), reply, times))

    def drop_upload(self, where: str, *, times: int = 1_000) -> None:
        """Close the connection halfway through the body of the next calls whose "METHOD /path" matches."""
        self.faults.append(Fault(re.compile(where), None, times, upload=True))

    def sent(self, where: str = "") -> int:
        """Return the bytes of body sent for calls whose "METHOD /path" matches."""
        return sum(s.sent for s in self.served if re.search(where, f"{s.call.method} {s.call.path}"))

    def answer(self, call: Call) -> Reply:
        """Return what a call is answered when nothing goes wrong."""
        for method, pattern, route in ROUTES:
            found = re.fullmatch(pattern, call.path)
            if method == call.method.replace("HEAD", "GET") and found:
                try:
                    return route(self, call, **found.groupdict())
                except Refused as refused:
                    return refused.reply
        return Reply(404, b'{"error":"no such route"}')

    def take_fault(self, method: str, path: str, *, upload: bool = False) -> Fault | None:
        """Return the fault that is due for a call, and count it."""
        for fault in self.faults:
            if fault.left > 0 and fault.upload == upload and fault.where.search(f"{method} {path}"):
                fault.left -= 1
                return fault
        return None


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body go out apart, and each second one would wait 40 ms for the acknowledgement of the first.
        disable_nagle_algorithm = True

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _chunks(self) -> Iterator[bytes]:
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()

        def _serve(self) -> None:
            url = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(url.query).items()}
            headers = {name.lower(): value for name, value in self.headers.items()}
            length = int(headers.get("content-length", 0))
            if hub.take_fault(self.command, unquote(url.path), upload=True):
                self.rfile.read(length // 2)
                self.close_connection = True
                self.connection.shutdown(SHUT_RDWR)
                return
            chunked = headers.get("transfer-encoding") == "chunked"
            body = b"".join(self._chunks()) if chunked else self.rfile.read(length)
            call = Call(self.command, unquote(url.path), query, headers, body)
            hub.before(call)
            fault = hub.take_fault(call.method, call.path)
            reply = fault.reply if fault and fault.reply else hub.answer(call)
            sent = b"" if call.method == "HEAD" else reply.body
            if fault and not fault.reply:
                sent = sent[: len(sent) // 2]
                self.close_connection = True
            hub.served.append(Served(call, reply.status, len(sent)))
            self.send_response(reply.status)
            for name, value in ({"Content-Length": str(len(reply.body))} | dict(reply.headers)).items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(ConnectionError):  # a client may have read enough
                self.wfile.write(sent)

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

    return Handler


def client_env(hub: Hub, home: Path) -> dict[str, str]:
    """Return the environment of a client in a process of its own."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "0",
        "TRANSFORMERS_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1,localhost",
    }


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Give an empty stand-in, to which the clients of this process and of its children are pointed.

    The tests that run offline stay so but for this loopback: no client is left pointed at the real Hub.
    """
    from huggingface_hub import close_session, constants

    standing, home = Hub(), tmp_path / "hf-home"
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE", "HF_HUB_CACHE", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in client_env(standing, home).items():
        monkeypatch.setenv(name, value)
    # huggingface_hub read its environment when it was imported, which another test may have done long ago.
    for name, value in {
        "ENDPOINT": standing.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": standing.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_URL_HOSTS": frozenset({"127.0.0.1"}),
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DISABLE_TELEMETRY": True,
    }.items():
        monkeypatch.setattr(constants, name, value, raising=False)
    close_session()
    yield standing
    close_session()
    standing.close()


SECRET = "hf_aVerySecretToken"


def weights(fill: float = 1.0) -> dict[str, torch.Tensor]:
    """Return tensors of a megabyte."""
    return {"fc.weight": torch.full((512, 512), fill), "norm.weight": torch.ones(512, dtype=torch.bfloat16)}


def head(fill: float = 1.0) -> dict[str, bytes]:
    """Return the files of a repository: one safetensors of a megabyte, and some that kconv has no use for."""
    return {
        "config.json": b'{"hidden_size": 512}',
        "model.safetensors": save(weights(fill)),
        "README.md": b"# a head\n",
        "optimizer.pt": b"a pickle, as far as anybody knows",
        "checkpoint-1/model.safetensors": save(weights(9.0)),
    }


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take huggingface_hub offline, as HF_HUB_OFFLINE does."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
