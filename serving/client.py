"""A client of a running OpenAI-compatible server, over HTTP."""

from __future__ import annotations

import functools
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from ..checkpoint.schema import parse_json
from ..engines.base import Engine
from ..engines.counters import MOST, Counters, Counts, PerRequest, Totals
from ..engines.registry import engines, recognize
from ..errors import (
    ConnectionBroken,
    CountersDisturbed,
    CountersMissing,
    DefinitionsMixed,
    EngineFailed,
    ServerUnreachable,
)
from .ask import again, ask_each

SHOWN = 500  # characters of an answer to show in a message
ERRNO = re.compile(r"^\[Errno -?\d+\] ")
HEALTH_SECONDS, CONNECT_SECONDS = 5.0, 30.0
LARGEST = 64 << 20  # bytes of one answer; a page of metrics or a completion has a few MiB at most
LOOPBACK = ("127.0.0.1", "::1", "localhost")
# Engines count in a separate loop, slightly behind their answers.
POLL_SECONDS, REST_SECONDS, LATE_SECONDS = 0.05, 0.1, 2.0
RESTLESS_SECONDS = 20.0
ONE_TOKEN = {"prompt": "Hello", "max_tokens": 1, "temperature": 0.0}


NO_SUCH_PAGE = (404, 405)
# The same request may be answered later.
BUSY = (408, 429, 500, 502, 503, 504)
OPENAI = "Pass the address of an OpenAI-compatible server."
# What parsing an answer of an unexpected shape raises: a list instead of text, a missing key, an infinite count.
WRONG = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
# A connection that was made, and ended before the answer: by a server whose queue of callers is full, or by a proxy.
BROKEN = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
UNREACHABLE = (httpx.ConnectError, httpx.ConnectTimeout, httpx.InvalidURL, httpx.UnsupportedProtocol)


class Dialogue(Protocol):
    """The user's messages, turn by turn."""

    @property
    def turns(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Answer:
    """The target's answer in one turn.

    Attributes:
        cut: whether the token limit cut it off.
        histogram: of its verify steps, by the number of accepted drafted tokens, if the engine reports it.
    """

    text: str
    tokens: int
    cut: bool
    histogram: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TimedAnswer:
    """A streamed answer: its text and number of tokens, seconds to the first token, and seconds in total."""

    text: str
    tokens: int
    first: float
    seconds: float


@dataclass(frozen=True)
class Reply:
    """A server's reply, whatever its status; of an error, only as many bytes as are shown."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def succeeded(self) -> bool:
        return httpx.codes.is_success(self.status)

    @property
    def complaint(self) -> str:
        """An error in words."""
        return f"the server answered {self.status}: {self.data.decode(errors='replace')[:SHOWN].strip()}"


@dataclass(frozen=True)
class Client:
    """A server and the model it serves.

    A server that cannot be reached, or answers with an error or not as expected, raises EngineFailed.

    Attributes:
        url: its root, e.g. "http://127.0.0.1:8000".
        model: the name under which it serves the target.
        timeout: seconds that one answer may take.
        extra: additional fields of each chat request, e.g. {"chat_template_kwargs": {...}}.
    """

    url: str
    model: str
    timeout: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def complete(self, prompt: list[int], new_tokens: int) -> list[int]:
        """Return the greedy continuation of a prompt, as token ids; it continues after an end-of-text token.

        Fewer than `new_tokens` come back only if the context is full.
        """
        return self.complete_whole(prompt, new_tokens)[0]

    def complete_whole(self, prompt: list[int], new_tokens: int, **more: Any) -> tuple[list[int], dict[str, Any]]:
        """Like `complete`, with more fields in the request; also return the server's whole answer."""
        answer = self._complete(prompt, new_tokens, {"return_token_ids": True} | more)
        fix = "Pass the address of a vLLM that supports return_token_ids, such as 0.32.0."
        with self._reading(f"the server's completion has no token_ids: {answer[:SHOWN]}", fix):
            value = parse_json(answer)
            [choice] = value["choices"]
            return _counts(choice["token_ids"]), value

    def continue_counted(
        self, asking: PerRequest, prompt: Sequence[int], new_tokens: int, draft_tokens: int
    ) -> tuple[list[int], Counts | None]:
        """Return the greedy continuation of a prompt as token ids, and what was drafted for it."""
        answer = self._request(asking.path, asking.body(self.model, prompt, new_tokens))
        fix = "Pass the engine's own address, and use a release that kconv knows."
        with self._reading(f"the server's answer has no token ids: {answer[:SHOWN]}", fix):
            ids, histogram = asking.read(parse_json(answer))
            counted = None if histogram is None else Counts.of_histogram(_counts(histogram), draft_tokens)
            return _counts(ids), counted

    def complete_text(self, prompt: list[int], new_tokens: int) -> str:
        """Return the greedy continuation of a prompt as text, for an engine that returns no token ids."""
        answer = self._complete(prompt, new_tokens, {})
        with self._reading(f"the server's answer is not a completion: {answer[:SHOWN]}", OPENAI):
            [choice] = parse_json(answer)["choices"]
            return str(choice["text"])

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        max_tokens: int,
        temperature: float,
        asking: PerRequest | None = None,
    ) -> Answer:
        """Return the answer to a dialogue, and how it was drafted if `asking` says how to request that."""
        body = {"model": self.model, "messages": list(messages), "max_tokens": max_tokens, "temperature": temperature}
        body |= dict(self.extra) | (dict(asking.chat) if asking else {})
        answer = self._request("/v1/chat/completions", body)
        with self._reading(f"the server's answer is not a chat completion: {answer[:SHOWN]}", OPENAI):
            value = parse_json(answer)
            [choice] = value["choices"]
            # If an answer is cut off, a reasoning parser moves all of it into another field and sets content to null.
            text = _text(choice["message"]["content"])
            histogram = asking.read_chat(value) if asking else None
            [tokens] = _counts([value["usage"]["completion_tokens"]])
            return Answer(
                text,
                tokens,
                choice["finish_reason"] == "length",
                None if histogram is None else tuple(_counts(histogram)),
            )

    def chat_timed(self, messages: Sequence[Mapping[str, str]], max_tokens: int, temperature: float) -> TimedAnswer:
        """Return the streamed answer to a dialogue, with its times."""
        url = f"{self.url}/v1/chat/completions"
        body = {"model": self.model, "messages": list(messages), "max_tokens": max_tokens, "temperature": temperature}
        body |= dict(self.extra) | {"stream": True, "stream_options": {"include_usage": True}}
        text, tokens, first, begin = "", 0, 0.0, time.monotonic()
        try:
            with _http(self.url, self.timeout) as http, http.stream("POST", url, json=body) as answer:
                if not answer.is_success:
                    said = _read(answer, time.monotonic() + HEALTH_SECONDS, url).decode(errors="replace")[:SHOWN]
                    raise EngineFailed(
                        f"the server answered {answer.status_code}: {said}", where=url, fix="Check the server's log."
                    )
                for line in _lines(answer, begin + self.timeout, url):
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data == "[DONE]":
                        continue
                    chunk = parse_json(data)
                    # A server that fails after its 200 says so in the stream, and ends it as if all were well:
                    # https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/entrypoints/openai/chat_completion/serving.py#L926-L933
                    # https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/entrypoints/openai/serving_chat.py#L2801-L2803
                    if wrong := chunk.get("error"):
                        raise EngineFailed(
                            f"the server stopped its answer: {str(wrong)[:SHOWN]}", where=url,
                            fix="Check the server's log.",
                        )  # fmt: skip
                    [tokens] = _counts([(chunk.get("usage") or {}).get("completion_tokens") or tokens])
                    for choice in chunk.get("choices") or ():
                        delta = choice.get("delta") or {}
                        # A reasoning parser streams reasoning into another field.
                        said = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
                        first = first or (time.monotonic() - begin if said else 0.0)
                        text += _text(delta.get("content"))
        except BROKEN as fault:
            raise _broken(fault, url) from fault
        except (httpx.HTTPError, OSError, *WRONG) as fault:
            raise EngineFailed(
                f"the server does not stream an answer: {fault or type(fault).__name__}", where=url,
                fix="Check that the server is running.",
            ) from fault  # fmt: skip
        if not tokens:
            raise EngineFailed(
                "the server's stream does not count tokens", where=url, fix="Use a server that supports stream_options."
            )
        seconds = time.monotonic() - begin
        return TimedAnswer(text, tokens, first or seconds, seconds)

    def converse(
        self, prompts: Sequence[Dialogue], max_tokens: int, temperature: float, asking: PerRequest | None = None
    ) -> list[list[Answer]]:
        """Run several dialogues in parallel; the turns of each follow one another. See `chat` and `ask_each`."""

        def dialogue(prompt: Dialogue) -> list[Answer]:
            messages: list[dict[str, str]] = []
            answers: list[Answer] = []
            for turn in prompt.turns:
                messages.append({"role": "user", "content": turn})
                answers.append(self.chat(messages, max_tokens, temperature, asking))
                messages.append({"role": "assistant", "content": answers[-1].text})
            return answers

        return ask_each(dialogue, prompts, len(prompts))

    def is_healthy(self) -> bool:
        """Whether the server is up and ready to serve."""
        try:
            self._request("/health", timeout=HEALTH_SECONDS)
        except EngineFailed:
            return False
        return True

    def page(self, path: str) -> str:
        """Return the text at a path, "" if the server says that there is none."""
        reply = again(lambda: self.send(path))
        if reply.status in BUSY:
            raise EngineFailed(reply.complaint, where=self.url + path, fix="Check the server's log.")
        return reply.data.decode(errors="replace") if reply.succeeded else ""

    def recognize(self) -> tuple[Engine, Counters]:
        """Return the server's engine, and how to read its counters."""
        try:
            engine, counters = self._shown()
        except CountersMissing:
            # TensorRT-LLM's page is empty until its first answer.
            self._ask_one_token()
            engine, counters = self._shown()
        if counters.otherwise is None:
            return engine, counters
        before = self.rest(counters)
        self._ask_one_token()
        counted = self.rest(counters, lambda now: now != before).since(before, self.url)
        # The prefill gives the first token, so there was nothing to draft.
        return engine, counters.otherwise if counters.speculates(counted) else counters

    def _shown(self) -> tuple[Engine, Counters]:
        paths = {engine.counters.metrics for engine in engines() if engine.counters}
        return recognize(engines(), {path: self.page(path) for path in paths}, self.url)

    def _ask_one_token(self) -> None:
        again(lambda: self._request("/v1/completions", ONE_TOKEN | {"model": self.model}))

    def version(self, counters: Counters) -> str:
        page = self.page(counters.version)
        with self._reading(f"the server does not report its version at {counters.version}", "Give --engine-version."):
            return str(parse_json(page)["version"])

    def read_counters(self, counters: Counters) -> Totals:
        """Return what the server has counted since it started."""
        return counters.read(again(lambda: self._request(counters.metrics)))

    def rest(self, counters: Counters, enough: Callable[[Totals], bool] = lambda _: True) -> Totals:
        """Read the counters once they stop moving; CountersDisturbed if they never do.

        Args:
            enough: whether they hold everything expected; kconv waits for that only briefly.
        """
        start, last, still = time.monotonic(), self.read_counters(counters), time.monotonic()
        while True:
            time.sleep(POLL_SECONDS)
            now, totals = time.monotonic(), self.read_counters(counters)
            if totals != last:
                last, still = totals, now
            if now - still >= REST_SECONDS and (enough(totals) or now - still >= LATE_SECONDS):
                return totals
            if now - start > RESTLESS_SECONDS:
                raise CountersDisturbed(
                    f"the server's counters still change {RESTLESS_SECONDS:.0f} s after the last answer",
                    where=self.url,
                    fix="Make sure that nobody else uses the server, then run the command again.",
                )

    @contextmanager
    def _reading(self, what: str, fix: str) -> Iterator[None]:
        """Turn any failure to parse an answer into an EngineFailed."""
        try:
            yield
        except WRONG as fault:
            raise EngineFailed(what, where=self.url, fix=fix) from fault

    def _complete(self, prompt: list[int], new_tokens: int, more: dict[str, Any]) -> str:
        body = {"model": self.model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
        return self._request("/v1/completions", body | more)

    def send(self, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> Reply:
        """Return the reply to a request, whatever its status.

        Raises:
            ConnectionBroken, ServerUnreachable: see there.
            EngineFailed: the reply takes too long, is too large, or is not HTTP.
        """
        url, seconds = self.url + path, timeout or self.timeout
        deadline = time.monotonic() + seconds
        try:
            with (
                _http(self.url, seconds) as http,
                http.stream("GET" if body is None else "POST", url, json=body) as answer,
            ):
                return Reply(answer.status_code, answer.headers, _read(answer, deadline, url))
        except BROKEN as fault:
            raise _broken(fault, url) from fault
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as fault:
            # ValueError: an address that Python cannot take apart.
            unreachable = isinstance(fault, (*UNREACHABLE, ValueError))
            raise (ServerUnreachable if unreachable else EngineFailed)(
                _no_answer(fault), where=url, fix="Check the address, and that the server is running."
            ) from fault

    def _request(self, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> str:
        reply, url = self.send(path, body, timeout), self.url + path
        if not reply.succeeded:
            fix = OPENAI if reply.status in NO_SUCH_PAGE else "Check the server's log."
            raise EngineFailed(reply.complaint, where=url, fix=fix)
        try:
            return reply.data.decode()
        except UnicodeDecodeError as fault:
            raise EngineFailed("the server's answer is not UTF-8 text", where=url, fix="Check the address.") from fault


def connect(url: str, model: str | None, extra: Mapping[str, Any], timeout: float) -> Client:
    """Connect to a server by its address, and find out which model it serves.

    Raises:
        EngineFailed: it cannot be reached, or serves several models and the caller names none.
    """
    root = url.rstrip("/").removesuffix("/completions").removesuffix("/chat").removesuffix("/v1")
    server = Client(root, model or "", timeout, dict(extra))
    if model:
        return server
    answer = again(lambda: server._request("/v1/models"))
    fix = "Name the model (bench: --model), or pass the address of a server with one model."
    with server._reading(f"the server does not name exactly one model: {answer[:SHOWN]}", fix):
        [found] = parse_json(answer)["data"]
        return Client(server.url, str(found["id"]), timeout, dict(extra))


@functools.cache
def _tls() -> ssl.SSLContext:
    # Takes about 20 ms, for which a poll of the counters should not wait.
    return httpx.create_ssl_context()


def _http(url: str, seconds: float) -> httpx.Client:
    return httpx.Client(
        verify=_tls(),
        timeout=httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS)),
        follow_redirects=True,
        # A proxy from the environment cannot reach this machine's own ports.
        trust_env=urlsplit(url).hostname not in LOOPBACK,
        headers={"Accept-Encoding": "identity"},
    )


def _no_answer(fault: Exception) -> str:
    return f"the server does not answer: {ERRNO.sub('', str(fault)) or type(fault).__name__}"


def _broken(fault: Exception, url: str) -> ConnectionBroken:
    fix = "The server's log may say why it ended the connection. Then run the command again."
    return ConnectionBroken(_no_answer(fault), where=url, fix=fix)


def _counts(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one < MOST for one in value):
        raise ValueError("it is not a list of counts")
    return value


def _text(value: Any) -> str:
    """Return a text; null counts as empty text."""
    if not isinstance(value, str | None):
        raise ValueError("it is not text")
    return value or ""


def _lines(answer: httpx.Response, deadline: float, url: str) -> Iterator[str]:
    """Yield an answer's lines as they come; limits and errors as in `_read`."""
    held, size = b"", 0
    for chunk in answer.iter_bytes():
        size += len(chunk)
        _bound(size, deadline, url)
        *whole, held = (held + chunk).split(b"\n")
        for line in whole:
            yield line.decode()
    yield held.decode()


def _bound(size: int, deadline: float, url: str) -> None:
    """Raise EngineFailed for an answer that is too large, or still arriving after the deadline."""
    if size > LARGEST:
        raise EngineFailed(
            f"the server's answer is larger than {LARGEST >> 20} MiB", where=url, fix="Check the address."
        )
    if time.monotonic() > deadline:
        raise EngineFailed("the server's answer takes too long", where=url, fix="Check the server's log.")


def _read(answer: httpx.Response, deadline: float, url: str) -> bytes:
    """Return an answer's bytes; for an error, only as many as are shown."""
    data = bytearray()
    for chunk in answer.iter_bytes():
        data += chunk
        if not answer.is_success and len(data) >= 4 * SHOWN:
            break
        _bound(len(data), deadline, url)
    return bytes(data)


def check_told(server: Client, draft_tokens: int, tree: str) -> dict[str, Any]:
    """Compare K and the tree with what a server reports, and return the report; empty if there is none.

    Args:
        draft_tokens: K, from the user.
        tree: "chain", or "topk=N" if drafts branch, from the user.

    Raises:
        DefinitionsMixed: the server reports something else.
    """
    told: dict[str, Any] = {}
    for drafting in (engine.drafting for engine in engines() if engine.drafting):
        try:
            said = parse_json(server.page(drafting.path))
        except ValueError:
            continue
        own = (
            {name: said[name] for name in drafting.keys if said.get(name) is not None} if isinstance(said, dict) else {}
        )
        told |= own
        steps, branches = own.get(drafting.steps, draft_tokens), own.get(drafting.branches)
        if own and said.get(drafting.algorithm) in drafting.blocks and drafting.nodes in own:
            steps = own[drafting.nodes] - 1
        if steps != draft_tokens:
            raise DefinitionsMixed(
                f"the server drafts {steps} tokens in a chain, but --draft-tokens is {draft_tokens}",
                where=server.url,
                fix=f"Pass --draft-tokens {steps}.",
            )
        nodes = f",nodes={own[drafting.nodes]}" if drafting.nodes in own else ""
        drafted = "chain" if branches == 1 else f"topk={branches}{nodes}"
        if branches is not None and tree != drafted:
            raise DefinitionsMixed(
                f"the server drafts with top-k {branches}, but --tree is {tree!r}",
                where=server.url,
                fix=f"For kconv bench, pass --tree {drafted}. For validate, start the server with top-k 1.",
            )
    return told
