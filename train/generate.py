"""Generate training responses with the served target itself.

A head drafts what its target says, so it is trained on the target's own words: NVIDIA's and lightseek's Kimi heads were
trained on regenerated answers.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import httpx

from ..checkpoint.schema import MAX_LINES, parse_json, read_bounded
from ..engines.ask import ask_all
from ..engines.client import ERRNO, SHOWN
from ..errors import EngineFailed, OutputFailed, PromptsInvalid
from ..targets.dialogues import read_reasoning
from ..targets.prompts import Prompt

ANSWERED, FAILED, SKIPPED = "answered", "failed", "skipped"
RETRIED = (408, 429, 500, 502, 503, 504)
LONGEST_PAUSE = 60.0  # seconds


@dataclass(frozen=True)
class GenerateRequest:
    """How to query a server.

    Attributes:
        url: its root, e.g. "http://127.0.0.1:8000".
        model: the name under which it serves the target.
        max_tokens: of one answer; an answer that is cut there is kept and marked.
        temperature: for sampling.
        concurrency: prompts in flight.
        attempts: how often one turn is tried before its prompt counts as failed.
        timeout: seconds that one answer may take.
        seed: for sampling.
    """

    url: str
    model: str
    max_tokens: int = 4096
    temperature: float = 0.6
    concurrency: int = 16
    attempts: int = 4
    timeout: float = 1800.0
    seed: int = 0


def generate(
    prompts: Sequence[Prompt],
    request: GenerateRequest,
    out: Path,
    progress: Callable[[Counter[str]], None] = lambda _: None,
) -> Counter[str]:
    """Let a server answer prompts turn by turn, and write a line for each one when it is done.

    When the run ends, the lines are in the order of the prompts, one per prompt, after those of other prompts. So a
    killed and resumed run leaves the same file as an uninterrupted one, if the server gives the same answers.

    A line is {"id", "digest", "category", "messages", "finish_reasons"} or {"id", "digest", "failed": why}. Reasoning
    that the server separated from an answer is stored next to it, as "reasoning_content". Prompts that already have an
    answer in `out` are skipped, so a stopped run resumes; failed ones are tried again.

    Args:
        prompts: the prompts.
        request: how to query the server.
        out: a JSONL file, to which lines are added.
        progress: called with the counts so far.

    Returns:
        How many prompts were answered, failed, or skipped; they add up to all of them.

    Raises:
        OutputFailed: `out` cannot be written.
        PromptsInvalid: `out` holds something other than answers.
        EngineFailed: no prompt was answered, or the server cannot be reached after some attempts.
    """
    done = _answered(out)
    left = [prompt for prompt in prompts if prompt.digest not in done]
    counts: Counter[str] = Counter({SKIPPED: len(prompts) - len(left)})
    why = ""
    if left:
        _refuse_nobody(request)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with (
            out.open("a", encoding="utf-8") as file,
            httpx.Client(base_url=request.url, timeout=request.timeout) as client,
            closing(ask_all(partial(_ask, client, request), left, request.concurrency)) as lines,
        ):
            try:
                for _, line in lines:
                    why = line.get("failed", why)
                    counts[FAILED if "failed" in line else ANSWERED] += 1
                    _write(file, line)
                    progress(counts)
            finally:
                _put_in_order(out, prompts)
    except OSError as fault:
        raise OutputFailed(
            f"{out} could not be written: {fault.strerror}", where=out, fix="Free some space."
        ) from fault
    if left and not counts[ANSWERED]:
        raise EngineFailed(
            f"none of {len(left)} prompts was answered; the last one failed with: {why}",
            where=request.url,
            fix="Check the address and the model's name; the same command resumes.",
        )
    return counts


def _refuse_nobody(request: GenerateRequest) -> None:
    """Raise EngineFailed if nothing listens at the address, before anything is written or tried again."""
    try:
        httpx.get(f"{request.url}/v1/models", timeout=request.timeout)
    except httpx.ConnectError as fault:
        raise _not_there(request, fault) from fault
    except httpx.HTTPError:
        pass  # a server is there, and the prompts show whether it answers


def _not_there(request: GenerateRequest, fault: Exception) -> EngineFailed:
    return EngineFailed(
        f"the server does not answer: {ERRNO.sub('', str(fault))}",
        where=request.url,
        fix="Start the server, or check the address; the same command resumes.",
    )


def _write(file: TextIO, line: dict[str, Any]) -> None:
    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    file.flush()


def _put_in_order(out: Path, prompts: Sequence[Prompt]) -> None:
    """Rewrite a file's lines: the last one of each prompt, in the order of the prompts."""
    places: dict[str, tuple[int, int]] = {}
    ordered = out.with_name(f".{out.name}.ordered")
    with out.open("rb") as file, ordered.open("wb") as other:
        begin = 0
        for line in file:
            places[parse_json(line)["digest"]] = (begin, len(line))
            begin += len(line)
        asked = dict.fromkeys(prompt.digest for prompt in prompts)
        for digest in (*(key for key in places if key not in asked), *(key for key in asked if key in places)):
            begin, size = places[digest]
            file.seek(begin)
            other.write(file.read(size))
    ordered.replace(out)


def _answered(out: Path) -> set[str]:
    """Return the digests of the prompts with an answer in a file; a line that a kill cut short is removed."""
    fix = "Choose another file."
    if not os.path.lexists(out):
        return set()
    data = read_bounded(out, PromptsInvalid, limit=MAX_LINES, fix=fix)
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        os.truncate(out, len(whole))
    try:
        lines = [parse_json(line) for line in whole.splitlines()]
        asked = [(line["digest"], "messages" in line) for line in lines]
        return {digest for digest, answered in asked if answered}
    except (ValueError, KeyError, TypeError) as fault:
        raise PromptsInvalid(f"{out.name} holds something other than answers: {fault}", where=out, fix=fix) from fault


def _ask(client: httpx.Client, request: GenerateRequest, prompt: Prompt) -> dict[str, Any]:
    line: dict[str, Any] = {"id": prompt.id, "digest": prompt.digest, "category": prompt.category}
    messages: list[dict[str, str]] = []
    reasons: list[str] = []
    for turn in prompt.turns:
        messages.append({"role": "user", "content": turn})
        try:
            # As a chat client sends them: without the reasoning of earlier answers.
            choice = _complete(client, request, [{key: said[key] for key in ("role", "content")} for said in messages])
            answer, reason = choice["message"], choice["finish_reason"]
            content = answer["content"]
        except httpx.ConnectError as fault:
            # Not this prompt's error: every other prompt would run into the same one.
            raise _not_there(request, fault) from fault
        except httpx.HTTPStatusError as fault:
            said = fault.response
            return line | {"failed": f"the server answered {said.status_code}: {said.text[:SHOWN].strip()}"}
        except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError) as fault:
            return line | {"failed": f"{type(fault).__name__}: {fault}"}
        if not content:
            return line | {"failed": f"an empty answer ({reason})"}
        messages.append({"role": "assistant", "content": content} | read_reasoning(answer))
        reasons.append(reason)
    return line | {"messages": messages, "finish_reasons": reasons}


def _complete(client: httpx.Client, request: GenerateRequest, messages: list[dict[str, str]]) -> dict[str, Any]:
    """Return the server's choice; retry if it is busy or the connection broke."""
    body = {
        "model": request.model,
        "messages": messages,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "seed": request.seed,
    }
    for attempt in itertools.count(1):
        last = attempt >= request.attempts
        try:
            answer = client.post("/v1/chat/completions", json=body)
            if answer.status_code not in RETRIED or last:
                return answer.raise_for_status().json()["choices"][0]
            pause = _pause(answer.headers.get("Retry-After"), attempt)
        except httpx.TransportError:
            if last:
                raise
            pause = _pause(None, attempt)
        time.sleep(pause)
    raise AssertionError  # the count above has no end


def _pause(asked_for: str | None, attempt: int) -> float:
    stated = float(asked_for) if asked_for and asked_for.isdigit() else 0.5 * 2**attempt
    return min(stated, LONGEST_PAUSE)
