"""What three engines count about drafts, brought to one form. What belongs here: which counters, and their arithmetic.

vLLM counts verify steps and places itself. SGLang counts verify calls, generated tokens and requests: a verify call
gives the accepted tokens and a bonus token, and the first token of each request comes from the prefill
(SGLang's python/sglang/srt/observability/metrics_collector.py, observe_one_finished_request, counts them together).
TensorRT-LLM counts drafted and accepted tokens (tensorrt_llm/metrics/collector.py), and drafts K in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import CountersDisturbed, CountersMissing, CountersReset, DefinitionsMixed
from .acceptance_stats import SAY_K, Counts
from .engines.counters import SAMPLE, parse_counters

VERIFY = "sglang:spec_verify_calls_total"
GENERATED, REQUESTS = "sglang:generation_tokens_total", "sglang:num_requests_total"
DRAFTED, ACCEPTED = "trtllm_spec_decode_num_draft_tokens_total", "trtllm_spec_decode_num_accepted_tokens_total"

NOTES = {
    "vllm": "",
    "sglang": "accepted tokens are generated tokens less one a request, for its prefill, and one a verify call; "
    "what an answer's limit cuts off the last draft is not counted",
    "trtllm": "verify steps are drafted tokens over K",
}


@dataclass(frozen=True)
class Reading:
    """What one look at a server's counters gave: totals by name, places under "0", "1", ..."""

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
    """

    name: str
    marks: str
    metrics: str
    version: str
    read: Callable[[str], Reading]
    count: Callable[[Mapping[str, float], int, int, int], Counts]


def _totals(metrics: str, names: tuple[str, ...]) -> dict[str, float]:
    """Sum samples by name, over ranks and replicas."""
    totals: dict[str, float] = {}
    for line in metrics.splitlines():
        sample = SAMPLE.match(line)
        if sample and sample["name"] in names:
            totals[sample["name"]] = totals.get(sample["name"], 0.0) + float(sample["value"])
    return totals


def _read_vllm(metrics: str) -> Reading:
    counters = parse_counters(metrics)
    places = {str(place): float(n) for place, n in enumerate(counters.accepted_per_position)}
    return Reading({"drafts": float(counters.drafts), "accepted": float(counters.accepted)} | places)


def _count_vllm(d: Mapping[str, float], _k: int, _requests: int, prompts: int) -> Counts:
    places = tuple(d[str(i)] for i in range(len(d) - 2))
    return Counts(d["drafts"], d["accepted"], places, prompts)


def _read_sglang(metrics: str) -> Reading:
    # A counter that was never raised has no sample yet, but its server has others.
    return Reading(dict.fromkeys((VERIFY, GENERATED, REQUESTS), 0.0) | _totals(metrics, (VERIFY, GENERATED, REQUESTS)))


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
    totals = _totals(metrics, (DRAFTED, ACCEPTED))
    absent = [name for name in (DRAFTED, ACCEPTED) if name not in totals]
    if absent:
        raise CountersMissing(
            f"the server does not count {', '.join(absent)}",
            where="/prometheus/metrics",
            fix="Serve with a speculative_config and return_perf_metrics: true.",
        )
    return Reading(totals)


def _count_trtllm(d: Mapping[str, float], k: int, _requests: int, prompts: int) -> Counts:
    if d[DRAFTED] % k:
        raise DefinitionsMixed(
            f"{d[DRAFTED]:g} drafted tokens are no whole number of steps of {k}",
            where=DRAFTED,
            fix=f"{SAY_K}, by its max_draft_len, and let it draft as many in each step.",
        )
    return Counts(d[DRAFTED] / k, d[ACCEPTED], None, prompts)


ENGINES = {
    "vllm": Engine("vllm", "vllm:", "/metrics", "/version", _read_vllm, _count_vllm),
    "sglang": Engine("sglang", "sglang:", "/metrics", "/server_info", _read_sglang, _count_sglang),
    "trtllm": Engine("trtllm", "trtllm_", "/prometheus/metrics", "/version", _read_trtllm, _count_trtllm),
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
            fix="Give the engine's own address; SGLang needs --enable-metrics, TensorRT-LLM return_perf_metrics: true.",
        )
    if len(found) > 1:
        raise DefinitionsMixed(
            f"the server shows counters of {' and '.join(e.name for e in found)}, which count differently",
            where=where,
            fix="Give the address of one engine, not of a router before several.",
        )
    return found[0]
