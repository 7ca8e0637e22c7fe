"""What three engines count about drafts, brought to one form.

vLLM counts verify steps and places itself. SGLang counts verify calls, generated tokens and requests, all three when
a request ends: a verify call gives the accepted tokens and a bonus token, and the first token of each request comes
from the prefill.
https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/observability/metrics_collector.py#L2109-L2112

TensorRT-LLM counts the drafted and the accepted tokens of each place when a request ends (log_request_metrics_dict),
and, with enable_iter_perf_stats, the totals of each iteration (log_iteration_stats), where every step drafts K:
https://github.com/NVIDIA/TensorRT-LLM/blob/050f80def8df236e326949c8bd9dee10fd896a83/tensorrt_llm/metrics/collector.py
Places came with https://github.com/NVIDIA/TensorRT-LLM/pull/12636, and until
https://github.com/NVIDIA/TensorRT-LLM/pull/17082 each prefill counted as a draft that is rejected: the totals are read
of a server that has no places or counts so. They may miss drafted tokens of id 0 (_update_iter_stats), places do not:
https://github.com/NVIDIA/TensorRT-LLM/blob/0004396720054fd8e205cbf616f21f0b57c6b412/tensorrt_llm/_torch/pyexecutor/py_executor.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..errors import CountersDisturbed, CountersMissing, CountersReset, DefinitionsMixed
from ..validate.engines.counters import SAMPLE, parse_counters
from .stats import SAY_K, Counts

VERIFY = "sglang:spec_verify_calls_total"
GENERATED, REQUESTS = "sglang:generation_tokens_total", "sglang:num_requests_total"
# TensorRT-LLM's totals of iterations, the tokens of each place, and the tokens of all answers.
DRAFTED, ACCEPTED = "trtllm_spec_decode_num_draft_tokens_total", "trtllm_spec_decode_num_accepted_tokens_total"
DRAFTED_AT, ACCEPTED_AT = "trtllm_spec_decode_drafted_tokens_total", "trtllm_spec_decode_accepted_tokens_total"
ANSWERED = "trtllm_generation_tokens_total"
PLACE = re.compile(r'(?:^|,)\s*token_position="(\d+)"')
TRTLLM_NEEDS = "return_perf_metrics: true and enable_iter_perf_stats: true"

NOTES = {
    "vllm": "",
    "sglang": "accepted tokens are generated tokens less one a request, for its prefill, and one a verify call; "
    "what an answer's limit cuts off the last draft is not counted",
    "trtllm": "verify steps are drafts of a first token; of a server that does not count places, drafted tokens over K",
}


@dataclass(frozen=True)
class Reading:
    """What one look at a server's counters gave: totals by name, those of places with the place in it."""

    totals: Mapping[str, float]

    def since(self, before: Reading, where: str) -> Mapping[str, float]:
        """Return the differences to an earlier reading.

        Raises:
            CountersReset: one went backwards, or is gone.
        """
        back = [n for n, value in before.totals.items() if self.totals.get(n, -1.0) < value]
        if back:
            raise CountersReset(
                f"{', '.join(back)} went backwards: {[before.totals[n] for n in back]} before, "
                f"{[self.totals.get(n) for n in back]} now",
                where=where,
                fix="The server was restarted in between; measure again.",
            )
        return {name: value - before.totals.get(name, 0.0) for name, value in self.totals.items()}


@dataclass(frozen=True)
class Engine:
    """How an engine is read.

    Attributes:
        name: as acceptance.json names it.
        marks: how its counters' names begin.
        metrics: where it serves them.
        version: where it says its version, under the key "version".
        read: from the text of its metrics to a reading.
        count: from differences, K, the number of requests and of prompts to counts.
        speculates: from totals or differences to whether something was drafted.
        otherwise: how it is read where it counts a draft for an answer that its prefill gave whole.
    """

    name: str
    marks: str
    metrics: str
    version: str
    read: Callable[[str], Reading]
    count: Callable[[Mapping[str, float], int, int, int], Counts]
    speculates: Callable[[Mapping[str, float]], bool]
    otherwise: Engine | None = None


def _totals(metrics: str, names: tuple[str, ...], by_place: tuple[str, ...] = ()) -> dict[str, float]:
    """Sum samples over ranks and replicas, under "name", or "name place" for those of a place.

    A counter that was never raised has no sample yet; `names` are 0 then.
    """
    totals = dict.fromkeys(names, 0.0)
    for line in metrics.splitlines():
        sample = SAMPLE.match(line)
        if sample and sample["name"] in (*names, *by_place):
            place = PLACE.search(sample["labels"] or "")
            name = f"{sample['name']} {place[1]}" if place else sample["name"]
            totals[name] = totals.get(name, 0.0) + float(sample["value"])
    return totals


def _read_vllm(metrics: str) -> Reading:
    counters = parse_counters(metrics)
    places = {str(place): float(n) for place, n in enumerate(counters.accepted_per_position)}
    return Reading({"drafts": float(counters.drafts), "accepted": float(counters.accepted)} | places)


def _count_vllm(d: Mapping[str, float], _k: int, _requests: int, prompts: int) -> Counts:
    places = tuple(d[str(i)] for i in range(len(d) - 2))
    return Counts(d["drafts"], d["accepted"], places, prompts)


def _read_sglang(metrics: str) -> Reading:
    return Reading(_totals(metrics, (VERIFY, GENERATED, REQUESTS)))


def _count_sglang(d: Mapping[str, float], _k: int, requests: int, prompts: int) -> Counts:
    if not d[VERIFY] and d[GENERATED] > d[REQUESTS]:
        raise CountersMissing(
            f"the server answered {d[REQUESTS]:g} requests without a verify call: it serves without speculation",
            where=VERIFY,
            fix="Start SGLang with --speculative-algorithm EAGLE3 and --enable-metrics.",
        )
    if d[REQUESTS] != requests:
        raise CountersDisturbed(
            f"the server counted {d[REQUESTS]:g} requests where {requests} were sent",
            where=REQUESTS,
            fix="Let no one else use the server meanwhile.",
        )
    return Counts(d[VERIFY], d[GENERATED] - requests - d[VERIFY], None, prompts)


def _read_trtllm(metrics: str) -> Reading:
    return Reading(_totals(metrics, (DRAFTED, ACCEPTED, ANSWERED), (DRAFTED_AT, ACCEPTED_AT)))


def _count_trtllm(d: Mapping[str, float], k: int, requests: int, prompts: int) -> Counts:
    places = sum(name.startswith(f"{DRAFTED_AT} ") for name in d)
    if places:
        # A place whose token was never accepted has no sample.
        accepted = tuple(d.get(f"{ACCEPTED_AT} {place}", 0.0) for place in range(places))
        return Counts(d.get(f"{DRAFTED_AT} 0", 0.0), sum(accepted), accepted, prompts)
    return _count_iterations(d, k, requests, prompts)


def _read_iterations(metrics: str) -> Reading:
    return Reading(_totals(metrics, (DRAFTED, ACCEPTED, ANSWERED)))


def _count_iterations(d: Mapping[str, float], k: int, requests: int, prompts: int) -> Counts:
    if not d[DRAFTED] and d[ANSWERED] > requests:
        raise CountersMissing(
            f"the server gave {d[ANSWERED]:g} tokens to {requests} requests without counting a draft",
            where="/prometheus/metrics",
            fix=f"Serve with a speculative_config, {TRTLLM_NEEDS}.",
        )
    if d[DRAFTED] % k:
        raise DefinitionsMixed(
            f"{d[DRAFTED]:g} drafted tokens are no whole number of steps of {k}",
            where=DRAFTED,
            fix=f"{SAY_K}, by its max_draft_len, and let it draft as many in each step; "
            "a TensorRT-LLM that counts drafts by token_position needs no such number.",
        )
    return Counts(d[DRAFTED] / k, d[ACCEPTED], None, prompts)


_TRTLLM = Engine(
    "trtllm", "trtllm_", "/prometheus/metrics", "/version", _read_iterations, _count_iterations,
    lambda d: any(d[name] for name in d if name.startswith((DRAFTED, DRAFTED_AT))),
)  # fmt: skip
ENGINES = {
    # vLLM shows its counters where it speculates, and nowhere else.
    "vllm": Engine("vllm", "vllm:", "/metrics", "/version", _read_vllm, _count_vllm, lambda _: True),
    "sglang": Engine(
        "sglang", "sglang:", "/metrics", "/server_info", _read_sglang, _count_sglang, lambda d: bool(d[VERIFY])
    ),
    "trtllm": replace(_TRTLLM, read=_read_trtllm, count=_count_trtllm, otherwise=_TRTLLM),
}


def recognise(pages: Mapping[str, str], where: str) -> Engine:
    """Return the engine whose counters a server shows.

    Args:
        pages: the text of each metrics page, "" where there is none.
        where: the server, for messages.

    Raises:
        CountersMissing: none of the three is.
        DefinitionsMixed: more than one is, as behind a router.
    """
    found = [e for e in ENGINES.values() if any(line.startswith(e.marks) for line in pages[e.metrics].splitlines())]
    if not found:
        raise CountersMissing(
            "the server shows no counters of vLLM, SGLang or TensorRT-LLM",
            where=where,
            fix=f"Give the engine's own address; SGLang needs --enable-metrics, TensorRT-LLM {TRTLLM_NEEDS}.",
        )
    if len(found) > 1:
        raise DefinitionsMixed(
            f"the server shows counters of {' and '.join(e.name for e in found)}, which count differently",
            where=where,
            fix="Give the address of one engine, not of a router before several.",
        )
    return found[0]
