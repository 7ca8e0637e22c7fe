"""Serve a head with a real engine, and compare it with kconv's own chain.

kconv starts two servers: one without speculation, whose greedy output is the reference, and one with the head. A server
reached by its address already speculates; then the target's own forward is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...checkpoint.source import Source
from ...convert.read import Head
from ...drafters.chain import Acceptance
from ...engines.base import Engine, Serving
from ...engines.counters import Counters, Counts, check_possible
from ...engines.registry import engine, startable
from ...errors import EngineFailed
from ...measure.figures import EngineFigures
from ...measure.held_out import HeldOut
from ...serving.client import Client, check_told, connect
from ...serving.start import check_start, serve
from ...targets.config import read_target_config
from ...targets.forward import generate_greedy
from ...targets.model import load_target
from ...targets.tokenizer import Tokenizer, load_tokenizer
from ..options import ValidateOptions
from ..report import Finding
from .judge import counts_agree, judge
from .simulate import find_reading, simulate

Say = Callable[[str], None]
WITHOUT, FORWARD = "the same engine without speculation", "kconv's forward of the target"
PER_REQUEST = "counted by the engine for each request"
# Kernels of quantized linear layers do not accept fp32, in which kconv computes, so counts are close but not equal.
QUANTIZED_IN = "bfloat16"
MARGIN = 16  # extra tokens of context


@dataclass(frozen=True)
class EngineFound:
    """An engine's result: findings, figures, and how they were measured."""

    findings: tuple[Finding, ...]
    figures: EngineFigures
    provenance: dict[str, object]


@dataclass(frozen=True)
class _Bench:
    """The common input: the target in memory, its tokenizer, the prompts' token ids, and K."""

    folder: Path
    model: torch.nn.Module
    tokenizer: Tokenizer
    prompts: list[list[int]]
    steps: int


@dataclass(frozen=True)
class _Served:
    """A server's result: how many outputs equal the reference, and what it counted.

    Attributes:
        cut: whether accepted tokens past the limit are not counted.
    """

    engine: str
    same: int
    drafts: int
    accepted: int
    per_position: tuple[int, ...] | None
    cut: bool = False
    note: str = ""


def refuse_start(head: Head, options: ValidateOptions) -> None:
    """Refuse a head that the engine to start would not draft with, before anything slow.

    Raises:
        EngineFailed: there is no environment with the engine, or its build does not serve such a head.
        ConfigInvalid: it drafts another number of tokens.
    """
    if not options.url:
        started, told = _to_start(head, options)
        check_start(told, started)


def _to_start(head: Head, options: ValidateOptions) -> tuple[Engine, Serving]:
    """Return the engine to start, and how with the head, except for what depends on the target."""
    started = engine(options.engine or startable()[0])
    if options.python is None:
        raise EngineFailed(
            f"there is no Python environment with {started.title}",
            fix="Pass --engine-python, or --url of a running server.",
        )
    steps = options.steps(head.spec)
    return started, Serving(options.python, Path(), head.checkpoint.folder, head.spec, draft_tokens=steps)


def check_engine(
    head: Head,
    options: ValidateOptions,
    target: Source,
    prompts: HeldOut,
    say: Say,
    *,
    readings: Sequence[tuple[int, ...]] = (),
) -> EngineFound:
    """Let an engine serve a head, and compare its output and counters with kconv's expectation.

    Args:
        head: the head.
        options: how to query the engine.
        target: the target.
        prompts: the prompts as the target reads them.
        say: called with progress messages.
        readings: captured layers, as outputs, that engines may read from this folder's config; tried if the counts do
            not match the head's own layers.

    Raises:
        EngineFailed: the engine does not start, dies, cannot be reached or answers with an error.
        CountersMissing, CountersReset: its counters are missing or unusable.
        DefinitionsMixed, AcceptanceInvalid: it drafts another number of tokens than stated.
        PromptsInvalid: a prompt is too long.
        TargetInvalid: the target cannot be read, or is not this head's target.
    """
    say("loading the target")
    folder, ids = target.fetch_model(), [row[: options.prompt_tokens] for row in prompts.tokens if row]
    tokenizer = load_tokenizer(folder, trust_remote_code=options.trust_remote_code)
    bench = _Bench(folder, load_target(folder, torch.float32), tokenizer, ids, options.steps(head.spec))
    ahead = options.new_tokens + bench.steps - 1
    dtype = QUANTIZED_IN if head.is_quantized else "float32"
    if options.url:
        reference = generate_greedy(bench.model, bench.prompts, ahead)  # pyright: ignore[reportArgumentType]
        say("asking the server")
        served, strict, of, unreached = _reach(options, bench, reference), False, FORWARD, None
        kernels = ""
    else:
        started, told = _to_start(head, options)
        with_head = replace(told, target=bench.folder, max_model_len=_context(bench, ahead), dtype=dtype)
        serving = replace(with_head, head=None, spec=None)
        say(f"starting {started.title} without speculation")
        with serve(serving, started) as plain:
            say(f"generating with {started.title} without speculation")
            reference = [_continue(plain.client, started, prompt, ahead) for prompt in bench.prompts]
        say(f"starting {started.title} with the head")
        with serve(with_head, started) as speculating:
            say(f"generating with {started.title} and the head")
            served = _count(speculating.client, started, started.counters, bench, reference, options)
            unreached = speculating.unreached()
        strict, of = not head.is_quantized, WITHOUT
        kernels = started.starter.note(told.python) if started.starter else ""
    say("simulating the chain")

    def chain(one: Head) -> Acceptance:
        return simulate(one, bench.model, bench.folder, bench.prompts, reference, bench.steps)

    expected = chain(head)
    # One token of each answer comes from its prefill, and each verify step gives one more than it accepts.
    kept = len(bench.prompts) * (options.new_tokens - 1) - expected.drafts if served.cut else None
    figures = EngineFigures(
        engine=served.engine,
        url=options.url or "",
        prompts=len(bench.prompts),
        new_tokens=options.new_tokens,
        steps=bench.steps,
        same_output=served.same,
        reference=of,
        drafts=served.drafts,
        accepted=served.accepted,
        per_position=served.per_position,
        length=1 + served.accepted / served.drafts,
        expected_drafts=expected.drafts,
        expected_per_position=tuple(int(count) for count in expected.accepted),
        expected_length=expected.length if kept is None else 1 + kept / expected.drafts,
        expected_accepted=kept,
        unreached=unreached,
    )
    about: dict[str, object] = {
        "engine": {"name": served.engine, "note": served.note, "dtype": "the server's" if options.url else dtype}
        | ({"kernels": kernels} if kernels else {})
    }
    read_as = None
    if figures.per_position is not None and not counts_agree(figures):
        say("searching for the layers that the engine read")
        counted, layers = (figures.drafts, *figures.per_position), read_target_config(bench.folder).layers
        read_as = find_reading(head, chain, counted, readings, layers=layers)
    return EngineFound(tuple(judge(figures, strict=strict, read_as=read_as)), figures, about)


def _context(bench: _Bench, new_tokens: int) -> int:
    return max(256, max(map(len, bench.prompts)) + new_tokens + MARGIN)


def _reach(options: ValidateOptions, bench: _Bench, reference: Sequence[Sequence[int]]) -> _Served:
    server = connect(options.url or "", None, {}, 600.0)
    found, counters = server.recognize()
    if options.engine and found.name != options.engine:
        raise EngineFailed(
            f"--engine is {options.engine}, but this server is {found.name}", where=server.url, fix="Check the address."
        )
    check_told(server, bench.steps, "chain")
    return _count(server, found, counters, bench, reference, options)


def _continue(client: Client, engine: Engine, prompt: list[int], new_tokens: int) -> list[int]:
    if engine.per_request is None:
        raise EngineFailed(f"{engine.title} returns no token ids", fix="Pass the --url of a running server.")
    return client.continue_counted(engine.per_request, prompt, new_tokens, 0)[0]


def _count(
    client: Client,
    engine: Engine,
    counters: Counters | None,
    bench: _Bench,
    reference: Sequence[Sequence[int]],
    options: ValidateOptions,
) -> _Served:
    """Let a server continue the prompts, and count what it drafted: from each answer, or else from its counters."""
    if counters is None:
        raise EngineFailed(f"{engine.title} has no counters that kconv reads", fix="Use another engine.")
    before = client.rest(counters)
    own = [list(row[: options.new_tokens]) for row in reference]
    answers = _ask(client, engine, bench, options.new_tokens)
    if answers is not None:
        same = sum(mine == output for mine, (output, _) in zip(own, answers, strict=True))
        told = [counts for _, counts in answers if counts is not None]
        if len(told) == len(own):
            counts = Counts.pool(told)
            check_possible(counts, bench.steps, client.url)
            return _Served(engine.name, same, *_whole(counts), note=PER_REQUEST)
    else:
        texts = [client.complete_text(prompt, options.new_tokens).strip() for prompt in bench.prompts]
        decode = bench.tokenizer.inner.decode
        same = sum(
            str(decode(mine, skip_special_tokens=True)).strip() == text for mine, text in zip(own, texts, strict=True)
        )
    found = client.rest(counters).since(before, client.url)
    counts = counters.count(found, bench.steps, len(own), len(own))
    check_possible(counts, bench.steps, client.url)
    drafts, accepted, places = _whole(counts)
    # Positions are compared only if tokens are: a text may hide a token that the engine did not count.
    return _Served(
        engine.name, same, drafts, accepted, None if answers is None else places, counters.cuts, counters.note
    )


def _ask(
    client: Client, engine: Engine, bench: _Bench, new_tokens: int
) -> list[tuple[list[int], Counts | None]] | None:
    """Return each prompt's continuation with what was drafted for it; None if the server returns only text."""
    asking = engine.per_request
    if asking is None or (asking.beside and not client.page(asking.beside)):
        return None
    return [client.continue_counted(asking, prompt, new_tokens, bench.steps) for prompt in bench.prompts]


def _whole(counts: Counts) -> tuple[int, int, tuple[int, ...] | None]:
    places = counts.per_position
    whole = None if places is None else tuple(round(count) for count in places)
    return round(counts.drafts), round(counts.accepted), whole
