"""A server under test, as a chat user sees it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ..errors import CountersDisturbed, CountersMissing, EngineFailed
from ..targets.prompts import Prompt
from ..validate.engines.client import SHOWN, Client
from .counters import ENGINES, Engine, Reading, recognise

# Engines count in a loop of their own, a little behind the answers.
POLL_SECONDS, REST_SECONDS, LATE_SECONDS = 0.05, 0.1, 2.0
RESTLESS_SECONDS = 20.0
ONE_TOKEN = {"prompt": "Hello", "max_tokens": 1, "temperature": 0.0}


@dataclass(frozen=True)
class Answer:
    """What the target said in one turn: its text, its tokens, and whether the limit cut it off."""

    text: str
    tokens: int
    cut: bool


@dataclass(frozen=True)
class ChatServer(Client):
    """A server of chat completions.

    Attributes:
        extra: more fields of each request, e.g. {"chat_template_kwargs": {...}}.
    """

    extra: Mapping[str, Any] = field(default_factory=dict)

    def chat(self, messages: Sequence[Mapping[str, str]], max_tokens: int, temperature: float) -> Answer:
        """Return the answer to a dialogue.

        Raises:
            EngineFailed: the server cannot be reached, answers with an error, or with something else.
        """
        body = {"model": self.model, "messages": list(messages), "max_tokens": max_tokens, "temperature": temperature}
        answer = self._request("/v1/chat/completions", body | dict(self.extra))
        try:
            value = json.loads(answer)
            [choice] = value["choices"]
            # A reasoning parser moves all of a cut answer into another field, and content is null then.
            text = choice["message"]["content"] or ""
            return Answer(text, int(value["usage"]["completion_tokens"]), choice["finish_reason"] == "length")
        except (ValueError, KeyError, TypeError) as fault:
            raise EngineFailed(
                f"the server's answer is no chat completion: {answer[:SHOWN]}",
                where=self.url,
                fix="Give the address of an OpenAI-compatible server.",
            ) from fault

    def converse(self, prompts: Sequence[Prompt], max_tokens: int, temperature: float) -> list[list[Answer]]:
        """Hold several dialogues side by side, each turn of one after the answer to the last."""

        def dialogue(prompt: Prompt) -> list[Answer]:
            messages: list[dict[str, str]] = []
            answers: list[Answer] = []
            for turn in prompt.turns:
                messages.append({"role": "user", "content": turn})
                answers.append(self.chat(messages, max_tokens, temperature))
                messages.append({"role": "assistant", "content": answers[-1].text})
            return answers

        with ThreadPoolExecutor(max(1, len(prompts))) as pool:
            return list(pool.map(dialogue, prompts))

    def page(self, path: str) -> str:
        """Return what stands at a path, "" where there is nothing."""
        try:
            return self._request(path)
        except EngineFailed:
            return ""

    def recognise(self) -> Engine:
        """Return the engine behind the server, as it is to be read.

        Raises:
            CountersMissing, DefinitionsMixed: see `bench_counters.recognise`.
            CountersDisturbed: see `rest`.
            EngineFailed: the server gives no token, of which it is asked for one where its counters do not tell.
        """
        try:
            engine = self._shown()
        except CountersMissing:
            # TensorRT-LLM's page is empty until its first answer.
            self._ask_one_token()
            engine = self._shown()
        if engine.otherwise is None:
            return engine
        before = self.rest(engine)
        self._ask_one_token()
        counted = self.rest(engine, lambda reading: reading != before).since(before, self.url)
        # The prefill gives the first token, so nothing was there to draft.
        return engine.otherwise if engine.speculates(counted) else engine

    def _shown(self) -> Engine:
        paths = {engine.metrics for engine in ENGINES.values()}
        return recognise({path: self.page(path) for path in paths}, self.url)

    def _ask_one_token(self) -> None:
        self._request("/v1/completions", ONE_TOKEN | {"model": self.model})

    def version(self, engine: Engine) -> str:
        """Return the engine's version.

        Raises:
            EngineFailed: the server does not say.
        """
        try:
            return str(json.loads(self.page(engine.version))["version"])
        except (ValueError, KeyError, TypeError) as fault:
            raise EngineFailed(
                f"the server does not say its version at {engine.version}",
                where=self.url,
                fix="Say it with --engine-version.",
            ) from fault

    def rest(self, engine: Engine, enough: Callable[[Reading], bool] = lambda _: True) -> Reading:
        """Read the counters once they have come to rest.

        Args:
            engine: whose counters.
            enough: whether a reading holds all that is awaited; waited for a little while, and not for ever.

        Raises:
            CountersDisturbed: they never rest, so someone else is using the server.
        """
        start, last, still = time.monotonic(), engine.read(self._request(engine.metrics)), time.monotonic()
        while True:
            time.sleep(POLL_SECONDS)
            now, reading = time.monotonic(), engine.read(self._request(engine.metrics))
            if reading != last:
                last, still = reading, now
            if now - still >= REST_SECONDS and (enough(reading) or now - still >= LATE_SECONDS):
                return reading
            if now - start > RESTLESS_SECONDS:
                raise CountersDisturbed(
                    f"the server's counters still move {RESTLESS_SECONDS:.0f} s after the last answer",
                    where=self.url,
                    fix="Let no one else use the server meanwhile.",
                )


def connect(url: str, model: str | None, extra: Mapping[str, Any], timeout: float) -> ChatServer:
    """Return a server by its address, and find out the model it serves.

    Raises:
        EngineFailed: it cannot be reached, or serves more models than one and none is named.
    """
    server = ChatServer(url.rstrip("/").removesuffix("/v1"), model or "", timeout, dict(extra))
    if model:
        return server
    answer = server._request("/v1/models")
    try:
        [found] = json.loads(answer)["data"]
        return ChatServer(server.url, str(found["id"]), timeout, dict(extra))
    except (ValueError, KeyError, TypeError) as fault:
        raise EngineFailed(
            f"which model to ask for cannot be told: {answer[:SHOWN]}",
            where=url,
            fix="Name it (bench: --model), or give the address of a server of one model.",
        ) from fault
