"""Acceptance on a running server.

Categories run one after the other, and within each, groups of as many prompts as run in parallel. With one at a time,
each prompt has its own counters, and a mean over requests can be given in addition to the one over steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..checkpoint.bytes import file_digest
from ..checkpoint.source import Source
from ..engines.counters import Counters, Counts, PerRequest, Totals, check_possible
from ..errors import ConnectionBroken, CountersDisturbed, CountersMissing, DefinitionsMixed
from ..installed import version
from ..measure.held_out import refuse_overlap
from ..serving.ask import again
from ..serving.client import Answer, Client, check_told, connect
from ..targets.prompts import Prompt, digest_prompts
from ..targets.suites import Suite
from .acceptance import OVERALL, AcceptanceFile, AcceptanceRow, Speed, SuiteRecord
from .forged import check_counts, check_settings
from .options import MeasureOptions
from .speed import Load, measure_loads, speed_rows
from .stats import make_rows, mean_of_categories

Say = Callable[[str], None]
CONFIG = "config.json"
ANSWER_SECONDS = 3600.0  # that one answer may take
LOSSY_NOTE = "the rejection sampling is lossy, so the answers are not the target's own"
PER_REQUEST = "counted by the engine for each request"
# Fields that a row of speed shares with the rows of acceptance.
SPEED_OF = ("draft_tokens", "tree", "engine", "engine_version", "target", "precision", "temperature", "max_tokens",
            "dataset", "revision", "date")  # fmt: skip
AS_TOLD = "stated by the user: no engine reports which weights it serves"


@dataclass(frozen=True)
class ServedHead:
    """The head with which a server drafts, as it was started.

    Attributes:
        draft_tokens: K.
        name: hub id or folder name.
        weights: sha256 of its weight files, if available.
        config: sha256 of its config.json, if available.
        folder: if available: prompts that the head was trained on according to its manifest are refused.
        loads: results of the server without a draft at each concurrency; otherwise measured at `baseline_url`.
        kernels: what the engine's figures depend on besides the engine itself; "" for nothing.
    """

    draft_tokens: int
    name: str = ""
    weights: Mapping[str, str] = field(default_factory=dict)
    config: str = ""
    folder: Path | None = None
    loads: Mapping[int, Load] = field(default_factory=dict)
    kernels: str = ""


@dataclass(frozen=True)
class PromptGroup:
    """The result of a group of prompts.

    Attributes:
        answers, seconds: with speculation.
        per_request: whether the counts come from the answers rather than the server's counters.
        beside: the server's counters for the same requests; None if inconclusive.
        baseline, baseline_seconds: without speculation.
    """

    counts: Counts
    answers: tuple[Answer, ...]
    seconds: float
    per_request: bool = False
    beside: Counts | None = None
    baseline: tuple[Answer, ...] = ()
    baseline_seconds: float = 0.0


def measure_served(
    url: str,
    suite: Suite,
    head: Source,
    served: ServedHead,
    options: MeasureOptions,
    *,
    fetch: bool = False,
    say: Say = lambda _: None,
) -> AcceptanceFile:
    """Measure a head with which a server drafts, and record its weights and config.

    Args:
        url: the engine's own address.
        served: how it is served; its `name`, `weights`, `config` and `folder` are filled in from `head`.
        fetch: whether to download a hub id's weights, so that the figures name their digests. Otherwise only the
            commit in its name identifies them.

    Raises:
        KconvError: see `measure_server`; or the head's files cannot be read or downloaded.
    """
    folder = head.open_weights().folder if fetch else Path(head.name)
    served = replace(served, name=head.name)
    if folder.is_dir():
        weights, config = sorted(folder.glob("*.safetensors")), folder / CONFIG
        served = replace(
            served,
            weights={file.name: file_digest(file) for file in weights},
            config=file_digest(config) if config.is_file() else "",
            folder=folder,
        )
    return measure_server(url, suite, served, options, say)


def measure_server(
    url: str, suite: Suite, served: ServedHead, options: MeasureOptions, say: Say = lambda _: None
) -> AcceptanceFile:
    """Run a suite on a server.

    Returns:
        A row for each category and for all, over verify steps, and also over requests if one ran at a time; for all,
        also the mean of the categories.

    Raises:
        EngineFailed: the server cannot be reached or answers with an error.
        CountersMissing: it does not speculate, or does not count.
        CountersReset: its counters went backwards.
        CountersDisturbed: they count requests from elsewhere.
        DefinitionsMixed: it counts in two ways, drafts or samples differently from what is stated, or the baseline
            speculates.
        AcceptanceInvalid: it counts more than K drafted tokens allow.
        AcceptanceForged: it accepts a fixed number of drafts, by its settings or by its counts.
        PromptsInvalid: the head was trained on one of the prompts.
    """
    if served.folder is not None:
        refuse_overlap((prompt.digest for prompt in suite.prompts), served.folder)
    server, steps = connect(url, options.model, options.extra, ANSWER_SECONDS), served.draft_tokens
    (engine, counters), told = server.recognize(), check_told(server, steps, options.tree)
    methods = _methods(check_settings(server, engine.sampling), options, server.url)
    baseline = _connect_baseline(options)
    shared = {
        "metric": "al_incl_bonus", "draft_tokens": steps, "tree": options.tree, "engine": engine.name,
        "engine_version": options.engine_version or server.version(counters),
        "target": options.target_name or server.model, "precision": options.precision,
        "temperature": options.temperature, "reasoning": options.reasoning,
        "dataset": suite.dataset, "revision": suite.revision, "max_tokens": options.max_tokens,
        "date": datetime.now(UTC).date().isoformat(), "measured_by": "self",
    } | methods  # fmt: skip
    lossy = bool(engine.sampling) and not set(engine.sampling.lossy).isdisjoint(methods.values())
    by_category: dict[str, list[PromptGroup]] = {}
    totals = server.rest(counters)
    rows: list[AcceptanceRow] = []
    for category, prompts in suite.groups:
        by_category[category] = groups = []
        for done, part in _parts(prompts, options.concurrency):
            say(f"{category or suite.dataset} {done}/{len(prompts)}")
            group, totals = _ask(server, engine.per_request, counters, totals, part, options, steps)
            groups.append(_with_baseline(group, baseline, part, options))
        shared["note"] = _note(groups, counters, lossy)
        rows += _rows(groups, shared | {"category": category, "prompts_sha256": digest_prompts(prompts)})
    everything = [group for groups in by_category.values() for group in groups]
    requests = sum(len(group.answers) for group in everything)
    check_counts([group.counts for group in everything], steps, requests, server.url)
    if list(by_category) != [OVERALL]:
        shared |= {"category": OVERALL, "prompts_sha256": suite.digest, "note": _note(everything, counters, lossy)}
        mean = mean_of_categories([row for row in rows if row.averaging == "micro_steps"], by_category)
        rows += _rows(everything, shared)
        shared |= {"averaging": "macro_category", "value": round(mean, 6), "prompts": len(suite.prompts)}
        rows.append(AcceptanceRow.model_validate(shared))
    speeds = ()
    if options.speed_at:
        say("speed")
        load = (suite.prompts, options.speed_at, options.max_tokens, options.temperature)
        loads = served.loads or (measure_loads(baseline, *load) if baseline else {})
        of = {name: shared[name] for name in SPEED_OF} | {"prompts": len(suite.prompts)}
        speeds = speed_rows(measure_loads(server, *load), loads, of | {"prompts_sha256": suite.digest})
    return AcceptanceFile(
        head=served.name,
        weights=dict(served.weights),
        config=served.config,
        suites=(SuiteRecord(dataset=suite.dataset, categories=tuple(by_category), whole=suite.whole),),
        rows=tuple(rows),
        speeds=speeds,
        kconv=version("kconv"),
        provenance={"model": server.model, "concurrency": options.concurrency, "extra": dict(options.extra)}
        | {"weights": AS_TOLD, "server": told}
        | ({"kernels": served.kernels} if served.kernels else {})
        | _both(everything, counters)
        | {"seconds": round(sum(group.seconds for group in everything), 1)},
    )


def _methods(shown: Mapping[str, str], options: MeasureOptions, where: str) -> dict[str, str]:
    """Return how the server samples, from its own report and from the options."""
    names = ("draft_sample_method", "rejection_sample_method")
    said = {name: value for name in names if (value := getattr(options, name))}
    if apart := [name for name in shown.keys() & said.keys() if shown[name] != said[name]]:
        told = "; ".join(f"{name} is {shown[name]}, but {said[name]} in the options" for name in sorted(apart))
        raise DefinitionsMixed(f"the server samples differently: {told}", where=where, fix="Remove the option.")
    return {**said, **shown}


def _both(groups: Sequence[PromptGroup], counters: Counters) -> dict[str, Any]:
    """Return the totals by requests and by counters, if both exist; they differ if others use the server.

    Counters of some engines omit tokens accepted past an answer's limit, and so do these totals.
    """
    both = [(group, group.beside) for group in groups if group.per_request and group.beside is not None]
    if not both or len(both) < len(groups):
        return {}
    drafts = sum(group.counts.drafts for group, _ in both)
    tokens = sum(answer.tokens - 1 for group, _ in both for answer in group.answers if answer.tokens)
    accepted = tokens - drafts if counters.cuts else sum(group.counts.accepted for group, _ in both)
    return {
        "by_request": {"drafts": drafts, "accepted": accepted},
        "by_counters": {"drafts": sum(o.drafts for _, o in both), "accepted": sum(o.accepted for _, o in both)},
    }


def _rows(groups: Sequence[PromptGroup], shared: Mapping[str, Any]) -> Iterator[AcceptanceRow]:
    # An answer of one token leaves nothing to draft: it has no length to average.
    counts = [group.counts for group in groups if group.counts.drafts]
    if not counts:
        raise CountersMissing(
            "nothing was drafted, because no answer has more than one token",
            where=shared["category"] or shared["dataset"],
            fix="Raise --max-tokens, or remove the category.",
        )
    answers = [(answer.text, answer.tokens, answer.cut) for group in groups for answer in group.answers]
    return make_rows(counts, answers, shared, speed=_speed(groups))


def _parts(prompts: Sequence[Prompt], size: int) -> Iterator[tuple[int, Sequence[Prompt]]]:
    return ((begin, prompts[begin : begin + size]) for begin in range(0, len(prompts), size))


def _note(groups: Sequence[PromptGroup], counters: Counters, lossy: bool) -> str:
    how = PER_REQUEST if all(group.per_request for group in groups) else counters.note
    return "; ".join(filter(None, (how, LOSSY_NOTE if lossy else "")))


def _ask(
    server: Client,
    asking: PerRequest | None,
    counters: Counters,
    before: Totals,
    prompts: Sequence[Prompt],
    options: MeasureOptions,
    steps: int,
) -> tuple[PromptGroup, Totals]:
    def ask() -> tuple[tuple[Answer, ...], float]:
        nonlocal before
        try:
            return _timed(server, prompts, options, asking)
        except ConnectionBroken:
            # Whether the server counted these requests, in part or at all, is unknown. So the whole group is asked
            # again, and counted from where the counters stay at rest for as long as an engine may count late.
            rest = server.rest(counters, lambda _: False)
            rest.since(before, server.url)
            before = rest
            raise

    answers, seconds = again(ask)
    where = f"{prompts[0].category} {prompts[0].id}".strip()
    asked, received = len(answers), sum(answer.tokens for answer in answers)
    told = [answer.histogram for answer in answers if answer.tokens > 1]
    if told and all(told):
        counts = Counts.pool([Counts.of_histogram(histogram or (), steps) for histogram in told])
        counts = replace(counts, prompts=len(prompts))
        check_possible(counts, steps, where)
        # Read for their other content, and because the next group may have no conclusive answer.
        after = server.rest(counters)
        try:
            beside = counters.count(after.since(before, server.url), steps, asked, len(prompts))
        except (CountersMissing, CountersDisturbed, DefinitionsMixed):
            beside = None
        return PromptGroup(counts, answers, seconds, per_request=True, beside=beside), after

    def count(totals: Totals) -> Counts:
        return counters.count(totals.since(before, server.url), steps, asked, len(prompts))

    def enough(totals: Totals) -> bool:
        # All but each request's first token come from verify steps, unless the end of the context leaves no room to
        # draft.
        try:
            counts = count(totals)
        except (CountersMissing, CountersDisturbed, DefinitionsMixed):
            return False
        return counts.drafts + counts.accepted >= received - asked

    after = server.rest(counters, enough)
    counts = count(after)
    if counts.drafts or received > asked:
        check_possible(counts, steps, where)
    emitted, most = counts.drafts + counts.accepted, received + asked * steps
    if emitted > most:
        raise CountersDisturbed(
            f"the server counts {emitted:.0f} tokens of verify steps, but {received} answered ones allow at most"
            f" {most}",
            where=where,
            fix="Make sure that nobody else uses the server, and pass the --draft-tokens that it was started with.",
        )
    return PromptGroup(counts, answers, seconds), after


def _with_baseline(
    group: PromptGroup, baseline: Client | None, prompts: Sequence[Prompt], options: MeasureOptions
) -> PromptGroup:
    if baseline is None:
        return group
    answers, seconds = again(lambda: _timed(baseline, prompts, options))
    return replace(group, baseline=answers, baseline_seconds=seconds)


def _timed(
    server: Client, prompts: Sequence[Prompt], options: MeasureOptions, asking: PerRequest | None = None
) -> tuple[tuple[Answer, ...], float]:
    start = time.monotonic()
    dialogues = server.converse(prompts, options.max_tokens, options.temperature, asking)
    return tuple(answer for dialogue in dialogues for answer in dialogue), time.monotonic() - start


def _speed(groups: Sequence[PromptGroup]) -> Speed | None:
    if not all(group.baseline for group in groups):
        return None
    pairs = [pair for g in groups for pair in zip(g.answers, g.baseline, strict=True)]
    own = sum(a.tokens for a, _ in pairs) / sum(g.seconds for g in groups)
    other = sum(b.tokens for _, b in pairs) / sum(g.baseline_seconds for g in groups)
    same = sum(a.text == b.text for a, b in pairs) / len(pairs)
    return Speed(tokens_per_second=own, baseline_tokens_per_second=other, speedup=own / other, same_answers=same)


def _connect_baseline(options: MeasureOptions) -> Client | None:
    if not options.baseline_url:
        return None
    server = connect(options.baseline_url, options.model, options.extra, ANSWER_SECONDS)
    try:
        _, counters = server.recognize()
        counted = counters.read(server.page(counters.metrics)).totals
    except CountersMissing:
        return server
    if counters.speculates(counted):
        raise DefinitionsMixed(
            "the baseline server speculates too", where=options.baseline_url, fix="Start it without a draft head."
        )
    return server
