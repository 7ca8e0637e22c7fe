"""Speed under load: output tokens per second, time to the first token and time per further token, at a concurrency.

As many dialogues as the concurrency are always in flight, so a slow one delays no other. The server without a draft
gets the same load, so that a speed-up applies to one concurrency and the same prompts. Each server first answers all of
them once, since a prefix cache would favor whichever is asked second.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import EngineFailed
from ..serving.ask import again, ask_each
from ..serving.client import Client
from ..targets.prompts import Prompt
from .acceptance import Interval, SpeedFigure, SpeedRow
from .stats import DRAWS, LEVEL


@dataclass(frozen=True)
class Dialogue:
    """The timing of a dialogue: its answers' tokens, their seconds, and seconds to the first token of each turn."""

    texts: tuple[str, ...]
    tokens: int
    seconds: float
    firsts: tuple[float, ...]

    @property
    def further(self) -> tuple[int, float]:
        """Tokens after the first of each turn, and their seconds."""
        return self.tokens - len(self.firsts), self.seconds - sum(self.firsts)


@dataclass(frozen=True)
class Load:
    """The result of a load: each dialogue, in the order of the prompts, and the total wall clock."""

    dialogues: tuple[Dialogue, ...]
    seconds: float


def put_load(server: Client, prompts: Sequence[Prompt], concurrency: int, max_tokens: int, temperature: float) -> Load:
    """Run all dialogues, `concurrency` of them in parallel."""

    def hold(prompt: Prompt) -> Dialogue:
        messages: list[dict[str, str]] = []
        texts, firsts, tokens, seconds = [], [], 0, 0.0
        for turn in prompt.turns:
            messages.append({"role": "user", "content": turn})
            answer = server.chat_timed(messages, max_tokens, temperature)
            messages.append({"role": "assistant", "content": answer.text})
            texts.append(answer.text)
            firsts.append(answer.first)
            tokens, seconds = tokens + answer.tokens, seconds + answer.seconds
        return Dialogue(tuple(texts), tokens, seconds, tuple(firsts))

    begin = time.monotonic()
    found = ask_each(hold, prompts, concurrency)
    return Load(tuple(found), time.monotonic() - begin)


def measure_loads(
    server: Client, prompts: Sequence[Prompt], concurrencies: Sequence[int], max_tokens: int, temperature: float
) -> dict[int, Load]:
    """Return the load of each concurrency, after one that only warms up the server.

    Raises:
        EngineFailed: the server cannot be reached, answers with an error, or does not stream; or there are fewer
            prompts than the concurrency.
    """
    if len(prompts) < max(concurrencies):
        raise EngineFailed(
            f"{len(prompts)} prompts are too few for a concurrency of {max(concurrencies)}",
            where=server.url,
            fix="Use a suite with more prompts, or lower concurrencies.",
        )

    def put(concurrency: int) -> Load:
        # A load with a broken connection is no full load, so the whole of it is put again.
        return again(lambda: put_load(server, prompts, concurrency, max_tokens, temperature))

    put(max(concurrencies))
    return {each: put(each) for each in concurrencies}


def speed_rows(
    loads: Mapping[int, Load], baseline: Mapping[int, Load], shared: Mapping[str, Any]
) -> tuple[SpeedRow, ...]:
    """Return a row for each concurrency.

    Args:
        baseline: without the draft, for the same prompts; empty if not measured.
    """
    return tuple(_row(each, load, baseline.get(each), shared) for each, load in loads.items())


def _row(concurrency: int, load: Load, other: Load | None, shared: Mapping[str, Any]) -> SpeedRow:
    count = len(load.dialogues)
    # The first sample is the prompts themselves; the others are the same for both servers, since they are paired.
    drawn = np.random.default_rng(0).integers(count, size=(DRAWS, count))
    drawn = np.vstack([np.arange(count), drawn])
    own = _drawn(load, drawn)
    more: dict[str, Any] = {}
    if other is not None:
        theirs = _drawn(other, drawn)
        pairs = [pair for a, b in zip(load.dialogues, other.dialogues, strict=True)
                 for pair in zip(a.texts, b.texts, strict=True)]  # fmt: skip
        more = {f"baseline_{name}": _figure(values, count) for name, values in theirs.items()}
        more["speedup"] = _figure(own["tokens_per_second"] / theirs["tokens_per_second"], count)
        more["same_answers"] = sum(a == b for a, b in pairs) / len(pairs)
    figures = {name: _figure(values, count) for name, values in own.items()}
    return SpeedRow(concurrency=concurrency, **figures, **more, **shared)


def _drawn(load: Load, drawn: np.ndarray) -> dict[str, np.ndarray]:
    """Return each figure for each sample of dialogues.

    A sample has no wall clock: tokens per second are those of one dialogue, times the number in flight.
    """
    tokens = np.array([d.tokens for d in load.dialogues], float)[drawn].sum(1)
    each = np.array([d.seconds for d in load.dialogues])
    seconds = each[drawn].sum(1)
    under_way = each.sum() / load.seconds
    firsts = np.array([np.mean(d.firsts) for d in load.dialogues])[drawn].mean(1)
    further, further_seconds = (np.array(one, float)[drawn].sum(1)
                                for one in zip(*(d.further for d in load.dialogues), strict=True))  # fmt: skip
    per_token = np.divide(further_seconds, further, out=np.zeros_like(further_seconds), where=further > 0)
    return {"tokens_per_second": under_way * tokens / seconds, "ttft": firsts, "tpot": per_token}


def _figure(values: np.ndarray, units: int) -> SpeedFigure:
    if units < 2:
        return SpeedFigure(value=float(values[0]))
    low, high = np.quantile(values[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    interval = Interval(low=float(low), high=float(high), level=LEVEL, over="prompts", units=units)
    return SpeedFigure(value=float(values[0]), interval=interval)
