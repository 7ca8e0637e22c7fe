"""An OpenAI-compatible server, seen from outside."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ...errors import EngineFailed
from .counters import SpecCounters, parse_counters

SHOWN = 500  # characters of an answer, in a message
HEALTH_SECONDS = 5.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Client:
    """A server and the model it serves.

    Attributes:
        url: its root, e.g. "http://127.0.0.1:8000".
        model: the name under which it serves the target.
        timeout: seconds that one answer may take.
    """

    url: str
    model: str
    timeout: float = 600.0

    def complete(self, prompt: list[int], new_tokens: int) -> list[int]:
        """Return the greedy continuation of a prompt, as token ids; it goes on behind an end-of-text token.

        Args:
            prompt: token ids.
            new_tokens: how many to generate; fewer come back only if the context is full.

        Raises:
            EngineFailed: the server cannot be reached, answers with an error, or without token ids.
        """
        return self.complete_whole(prompt, new_tokens)[0]

    def complete_whole(self, prompt: list[int], new_tokens: int, **more: Any) -> tuple[list[int], dict[str, Any]]:
        """Do as `complete` with more fields in the request, and return the server's whole answer too."""
        answer = self._complete(prompt, new_tokens, {"return_token_ids": True} | more)
        try:
            value = json.loads(answer)
            [choice] = value["choices"]
            ids = choice["token_ids"]
        except (ValueError, KeyError, TypeError) as fault:
            raise EngineFailed(
                f"the server's completion has no token_ids: {answer[:SHOWN]}",
                where=self.url,
                fix="Give the address of a vLLM that knows return_token_ids; 0.32.0 does.",
            ) from fault
        return ids, value

    def complete_text(self, prompt: list[int], new_tokens: int) -> str:
        """Return the greedy continuation of a prompt as text, from an engine that gives no token ids.

        Args:
            prompt: token ids.
            new_tokens: how many to generate.

        Raises:
            EngineFailed: the server cannot be reached, answers with an error, or with something else.
        """
        answer = self._complete(prompt, new_tokens, {})
        try:
            [choice] = json.loads(answer)["choices"]
            return str(choice["text"])
        except (ValueError, KeyError, TypeError) as fault:
            raise EngineFailed(
                f"the server's answer is no completion: {answer[:SHOWN]}",
                where=self.url,
                fix="Give the address of an OpenAI-compatible server.",
            ) from fault

    def read_counters(self) -> SpecCounters:
        """Return what the server has counted since it was started.

        Raises:
            EngineFailed: the server cannot be reached or answers with an error.
            CountersMissing: it does not count drafts.
        """
        return parse_counters(self._request("/metrics"))

    def is_healthy(self) -> bool:
        """Whether the server is up and ready to serve."""
        try:
            self._request("/health", timeout=HEALTH_SECONDS)
        except EngineFailed:
            return False
        return True

    def _complete(self, prompt: list[int], new_tokens: int, more: dict[str, Any]) -> str:
        body = {"model": self.model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
        return self._request("/v1/completions", body | more)

    def _request(self, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        # A proxy from the environment has no way to this machine's own ports.
        proxies = urllib.request.ProxyHandler({} if urlsplit(self.url).hostname in LOOPBACK else None)
        try:
            with urllib.request.build_opener(proxies).open(request, timeout=timeout or self.timeout) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as fault:
            what = f"the server answered {fault.code}: {fault.read().decode(errors='replace')[:SHOWN]}"
            raise EngineFailed(what, where=request.full_url, fix="Look into the server's log.") from fault
        except (OSError, http.client.HTTPException) as fault:
            raise EngineFailed(
                f"the server does not answer: {fault}", where=request.full_url, fix="Check that it runs."
            ) from fault
