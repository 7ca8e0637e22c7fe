"""Generate training responses with the served target itself.

A head drafts what its target says, so it is trained on the target's own words: NVIDIA's and lightseek's Kimi heads were
trained on regenerated answers.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ..checkpoint.schema import MAX_LINES, no_json, parse_json, read_bounded
from ..checkpoint.staging import alone, writing
from ..errors import ConnectionBroken, EngineFailed, OutputExists, PromptsInvalid, ServerUnreachable
from ..serving.ask import ask_all
from ..serving.client import BUSY, CONNECT_SECONDS, SHOWN, WRONG, Client, Reply
from ..targets.dialogues import read_reasoning
from ..targets.prompts import Prompt
from .options import GenerateOptions

ANSWERED, FAILED, SKIPPED = "answered", "failed", "skipped"
LONGEST_PAUSE = 60.0  # seconds
ANSWER_SECONDS = 1800.0  # that one answer may take
ONE_TEXT = ("model", "temperature")  # that all answers of a file have in common; a retry may allow more tokens
ATTEMPTS = 4  # at a turn, before its prompt counts as failed


def generate(
    prompts: Sequence[Prompt],
    client: Client,
    options: GenerateOptions,
    out: Path,
    progress: Callable[[Counter[str]], None] = lambda _: None,
) -> Counter[str]:
    """Let a server answer prompts turn by turn, and write a line for each one when it is done.

    When the run ends, the lines are in the order of the prompts, one per prompt, after those of other prompts. So a
    killed and resumed run leaves the same file as an uninterrupted one, if the server gives the same answers.

    A line is {"id", "digest", "category", "messages", "finish_reasons", "request"} or {"id", "digest", "failed": why};
    "request" is the model and how it was sampled. Reasoning that the server separated from an answer is stored next to
    it, as "reasoning_content". Prompts that already have an answer in `out` are skipped, so a stopped run resumes;
    failed ones are tried again.

    Returns:
        How many prompts were answered, failed, or skipped; they add up to all of them.

    Raises:
        OutputExists: another run is writing `out`, or it holds another model's answers, or at another temperature.
        OutputFailed: `out` cannot be written.
        PromptsInvalid: `out` holds something other than answers.
        ServerUnreachable: nothing listens at the address, or no longer does after some attempts.
        EngineFailed: no prompt was answered.
    """
    busy = OutputExists(f"another run is writing {out}", fix="Wait for it, or choose another name.")
    why = ""
    new = not os.path.lexists(out)
    with writing(out):
        if new:
            _refuse_nobody(client)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.touch()
        with alone(out, busy):
            done = _answered(out, _request(client, options))
            left = [prompt for prompt in prompts if prompt.digest not in done]
            counts: Counter[str] = Counter({SKIPPED: len(prompts) - len(left)})
            if left and not new:
                _refuse_nobody(client)
            with (
                out.open("a", encoding="utf-8") as file,
                closing(ask_all(partial(_ask, client, options), left, options.concurrency)) as lines,
            ):
                try:
                    for _, line in lines:
                        why = line.get("failed", why)
                        counts[FAILED if "failed" in line else ANSWERED] += 1
                        _write(file, line)
                        progress(counts)
                finally:
                    _put_in_order(out, prompts)
    if left and not counts[ANSWERED]:
        raise EngineFailed(
            f"none of {len(left)} prompts was answered; the last one failed with: {why}",
            where=client.url,
            fix="Check the address, the model's name and --max-tokens; the same command resumes.",
        )
    return counts


def _refuse_nobody(client: Client) -> None:
    """Raise ServerUnreachable if nothing listens at the address, before anything is written or tried again."""
    try:
        client.send("/v1/models", timeout=CONNECT_SECONDS)
    except ServerUnreachable:
        raise
    except EngineFailed:
        pass  # a server is there, and the prompts show whether it answers


def _write(file: TextIO, line: dict[str, Any]) -> None:
    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    file.flush()


def _put_in_order(out: Path, prompts: Sequence[Prompt]) -> None:
    """Rewrite a file's lines: the last one of each prompt, in the order of the prompts."""
    places: dict[str, tuple[int, int]] = {}
    out = out.resolve()
    ordered = out.with_name(f".{out.name}.ordered")
    ordered.unlink(missing_ok=True)
    # A new file, so that no link is followed, and never readable by more people than the one that it replaces.
    with out.open("rb") as file, open(ordered, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as other:
        begin = 0
        for line in file:
            places[parse_json(line)["digest"]] = (begin, len(line))
            begin += len(line)
        asked = dict.fromkeys(prompt.digest for prompt in prompts)
        for digest in (*(key for key in places if key not in asked), *(key for key in asked if key in places)):
            begin, size = places[digest]
            file.seek(begin)
            other.write(file.read(size))
        os.fchmod(other.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode))
    ordered.replace(out)


def _request(client: Client, options: GenerateOptions) -> dict[str, Any]:
    """Return what every request says, whatever it asks."""
    return {
        "model": client.model,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
    }


def _answered(out: Path, request: dict[str, Any]) -> set[str]:
    """Return the digests of the prompts with an answer in a file; the beginning of an answer at its end is removed."""
    fix = "Choose another file."
    *lines, last = read_bounded(out, PromptsInvalid, limit=MAX_LINES, fix=fix).split(b"\n")
    try:
        values = list(map(_parse_answer, lines))
        begun = _begins_answer(last)
        if last and not begun:
            values.append(_parse_answer(last))
    except ValueError as fault:
        raise PromptsInvalid(
            f"{out.name} holds something other than answers: {no_json(fault)}", where=out, fix=fix
        ) from fault
    answers = {value["digest"]: "messages" in value for value in values}
    for before, (key, own) in itertools.product((value.get("request") for value in values), request.items()):
        if key in ONE_TEXT and isinstance(before, dict) and before.get(key) != own:
            raise OutputExists(
                f"{out.name} holds answers with the {key} {before.get(key)}, and this run has {own}",
                where=out,
                fix=f"Choose another file, or pass --{key} {before.get(key)} to resume.",
            )
    if last:
        with out.open("r+b") as file:
            file.seek(-len(last) if begun else 0, os.SEEK_END)
            file.write(b"" if begun else b"\n")
            file.truncate()
    return {digest for digest, answered in answers.items() if answered}


def _parse_answer(line: bytes) -> dict[str, Any]:
    """Return a line's values: a digest, and an answer's messages or why there is none."""
    value = parse_json(line)
    if not isinstance(value, dict) or not isinstance(value.get("digest"), str) or not {"messages", "failed"} & {*value}:
        raise ValueError(f"{line[:SHOWN].decode(errors='replace')} has no digest with messages")
    return value


def _begins_answer(cut: bytes) -> bool:
    """Return whether a kill may have left this of an answer."""
    with suppress(ValueError):
        parse_json(cut)
        return False
    held = re.match(rb'\{"id": "(?:[^"\\]|\\.?)*', cut, re.DOTALL)
    begin, rest = (b'", "digest": "', cut[held.end() :]) if held else (b'{"id": "', cut)
    return rest.startswith(begin) or begin.startswith(rest)


def _ask(client: Client, options: GenerateOptions, prompt: Prompt) -> dict[str, Any]:
    line: dict[str, Any] = {"id": prompt.id, "digest": prompt.digest, "category": prompt.category}
    messages: list[dict[str, str]] = []
    reasons: list[str] = []
    for turn in prompt.turns:
        messages.append({"role": "user", "content": turn})
        try:
            # As a chat client sends them: without the reasoning of earlier answers.
            reply = _complete(client, options, [{key: said[key] for key in ("role", "content")} for said in messages])
            answer, reason = _read_answer(reply)
        except ServerUnreachable:  # not this prompt's error: every other prompt would run into the same one
            raise
        except EngineFailed as fault:
            return line | {"failed": fault.what}
        if not answer["content"]:
            return line | {"failed": f"an empty answer ({reason})"}
        messages.append({"role": "assistant"} | answer)
        reasons.append(reason)
    return line | {"messages": messages, "finish_reasons": reasons, "request": _request(client, options)}


def _read_answer(reply: Reply) -> tuple[dict[str, str], str]:
    """Return content and reasoning of a reply, and why it ended."""
    try:
        choice = parse_json(reply.data)["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        answer = {"content": message["content"] or ""} | read_reasoning(message)
        if not all(isinstance(value, str) for value in (*answer.values(), reason)):
            raise TypeError("it is not text")
    except WRONG as fault:
        shown = reply.data[:SHOWN].decode(errors="replace")
        raise EngineFailed(f"the server's answer is not a chat completion: {shown}") from fault
    return answer, reason


def _complete(client: Client, options: GenerateOptions, messages: list[dict[str, str]]) -> Reply:
    """Return the server's reply; ask again if it is busy or the connection broke."""
    body = _request(client, options) | {"messages": messages}
    for attempt in itertools.count(1):
        last, asked_for = attempt >= ATTEMPTS, None
        try:
            reply = client.send("/v1/chat/completions", body)
            if reply.succeeded:
                return reply
            if reply.status not in BUSY or last:
                raise EngineFailed(reply.complaint, where=client.url)
            asked_for = reply.headers.get("Retry-After")
        except (ConnectionBroken, ServerUnreachable):
            if last:
                raise
        time.sleep(_pause(asked_for, attempt))
    raise AssertionError  # the count above has no end


def _pause(asked_for: str | None, attempt: int) -> float:
    stated = float(asked_for) if asked_for and asked_for.isdecimal() else 0.5 * 2**attempt
    return min(stated, LONGEST_PAUSE)
