"""vLLM's counters of speculative decoding.

The counters, and the acceptance length that vLLM itself logs:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/spec_decode/metrics.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import CountersMissing, CountersReset

PREFIX = "vllm:spec_decode_num_"
DRAFTS, DRAFT_TOKENS = f"{PREFIX}drafts_total", f"{PREFIX}draft_tokens_total"
ACCEPTED, PER_POSITION = f"{PREFIX}accepted_tokens_total", f"{PREFIX}accepted_tokens_per_pos_total"

# `name{label="a value, quoted"} 16.0`; a model's name, which is a label, may hold spaces and braces.
SAMPLE = re.compile(r'(?P<name>[\w:]+)(?:\{(?P<labels>(?:[^"}]|"(?:\\.|[^"\\])*")*)\})?\s+(?P<value>\S+)')
POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')


@dataclass(frozen=True)
class SpecCounters:
    """What a server counted since it was started, or between two readings.

    Attributes:
        drafts: verify steps in which something was drafted.
        draft_tokens: tokens drafted.
        accepted: drafted tokens that the target accepted, without the bonus tokens.
        accepted_per_position: in how many drafts the token at each place and all before it were accepted.
    """

    drafts: int
    draft_tokens: int
    accepted: int
    accepted_per_position: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify step, between 1 and K + 1, the bonus token included.

        Raises:
            CountersMissing: nothing was drafted.
        """
        if not self.drafts:
            raise CountersMissing("the server drafted nothing", fix="Let it generate before the counters are read.")
        return 1 + self.accepted / self.drafts

    def since(self, before: SpecCounters) -> SpecCounters:
        """Return what was counted after an earlier reading of the same server.

        Raises:
            CountersReset: a counter went backwards.
        """
        # Every place has its sample from the start, so another number of places is another server's.
        places, earlier = self.accepted_per_position, before.accepted_per_position
        difference = SpecCounters(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted - before.accepted,
            tuple(now - then for now, then in zip(places, earlier, strict=False)),
        )
        counts = (difference.drafts, difference.draft_tokens, difference.accepted, *difference.accepted_per_position)
        if min(counts) < 0 or len(places) != len(earlier):
            raise CountersReset(
                f"the server counted {before.drafts} drafts of {len(earlier)} tokens before, "
                f"and counts {self.drafts} of {len(places)} now",
                where="/metrics",
                fix="It was restarted in between; measure again.",
            )
        return difference


def parse_counters(metrics: str) -> SpecCounters:
    """Read the counters out of the text of /metrics, summed over the engines behind the server.

    Only `_total` samples count: a `_created` one beside each holds a time.

    Args:
        metrics: the Prometheus text format.

    Raises:
        CountersMissing: one of the counters is not there.
    """
    totals: dict[str, int] = {}
    places: dict[int, int] = {}
    for name, labels, value in _samples(metrics):
        totals[name] = totals.get(name, 0) + value
        if name == PER_POSITION:
            place = int(labels)
            places[place] = places.get(place, 0) + value
    absent = [name for name in (DRAFTS, DRAFT_TOKENS, ACCEPTED, PER_POSITION) if name not in totals]
    if absent:
        raise CountersMissing(
            f"the server does not count {', '.join(absent)}",
            where="/metrics",
            fix="Start vLLM with --speculative-config and without --disable-log-stats.",
        )
    return SpecCounters(
        totals[DRAFTS],
        totals[DRAFT_TOKENS],
        totals[ACCEPTED],
        tuple(places.get(place, 0) for place in range(max(places) + 1)),
    )


def _samples(metrics: str) -> Iterator[tuple[str, str, int]]:
    """Yield name, position (empty where there is none) and value of each of the four counters' samples."""
    for line in metrics.splitlines():
        sample = SAMPLE.match(line)
        if sample and sample["name"] in (DRAFTS, DRAFT_TOKENS, ACCEPTED, PER_POSITION):
            position = POSITION.search(sample["labels"] or "")
            yield sample["name"], position[1] if position else "", int(float(sample["value"]))
