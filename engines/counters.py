"""Counters of drafts, read from the text of a server's metrics page and brought to one form.

Which counters an engine has stands in its own file; what is common is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ..errors import AcceptanceInvalid, CountersMissing, CountersReset, DefinitionsMixed

SAY_K = "Say K as the server was started with (bench: --draft-tokens, validate: --steps)"
MOST_PLACES = 1000  # a page may say anything of a place


@dataclass(frozen=True)
class Counts:
    """What was counted over a group of prompts.

    Attributes:
        drafts: verify steps.
        accepted: drafted tokens that were accepted, without the bonus tokens.
        per_position: in how many drafts the token at each place and all before it were accepted; None where the
            engine does not count it.
        prompts: in the group.
    """

    drafts: float
    accepted: float
    per_position: tuple[float, ...] | None
    prompts: int = 1

    @classmethod
    def of_histogram(cls, histogram: Sequence[int], draft_tokens: int) -> Counts:
        """Count one request's drafts by how many tokens of each were accepted: `histogram[n]` accepted n."""
        # From the last place on: a server may send a long one.
        reached = [*accumulate(reversed(histogram))][::-1]
        places = tuple(map(float, [*reached[1:], *[0] * (draft_tokens + 1 - max(len(reached), 1))]))
        return cls(float(sum(histogram)), sum(places), places)

    @classmethod
    def pool(cls, counts: Sequence[Counts]) -> Counts:
        """Add up counts of requests, all of which have places."""
        places = zip(*(one.per_position or () for one in counts), strict=True)
        drafts, accepted = sum(one.drafts for one in counts), sum(one.accepted for one in counts)
        return cls(drafts, accepted, tuple(sum(place) for place in places), sum(one.prompts for one in counts))


@dataclass(frozen=True)
class PerRequest:
    """What an engine says in each answer of how it drafted that one: undisturbed by whoever else asks.

    A histogram is of a request's verify steps, by the number of drafted tokens accepted; None where the answer has
    none, as of a server that was started without them.

    Attributes:
        path: where token ids are continued.
        body: from the model's name, a prompt's token ids and the number of new tokens to the request.
        read: from the answer's JSON to token ids and histogram.
        chat: what a chat request asks for besides, to be answered with a histogram.
        read_chat: from a chat answer's JSON to the histogram.
        beside: a page that the engine's own address has beside `path`, which a router before it has not; "" where
            `path` is every server's.
    """

    path: str
    body: Callable[[str, Sequence[int], int], dict[str, Any]]
    read: Callable[[Any], tuple[list[int], list[int] | None]]
    chat: Mapping[str, Any]
    read_chat: Callable[[Any], list[int] | None]
    beside: str = ""


@dataclass(frozen=True)
class Totals:
    """What one look at a server's counters gave.

    Attributes:
        totals: by name; those of places as "name place".
        whole: every counter is there from the start, so that another set of them is another server's.
    """

    totals: Mapping[str, float]
    whole: bool = False

    def since(self, before: Totals, where: str) -> Mapping[str, float]:
        """Return the differences to an earlier look at the same server.

        Raises:
            CountersReset: a counter went backwards, or is gone.
        """
        back = [n for n, value in before.totals.items() if self.totals.get(n, -1.0) < value]
        if back:
            raise CountersReset(
                f"{', '.join(back)} went backwards: {[before.totals[n] for n in back]} before, "
                f"{[self.totals.get(n) for n in back]} now",
                where=where,
                fix="The server was restarted in between. Measure again.",
            )
        if self.whole and self.totals.keys() != before.totals.keys():
            new = ", ".join(sorted(self.totals.keys() - before.totals.keys()))
            raise CountersReset(
                f"the server now counts {new}, which it did not before",
                where=where,
                fix="The server was restarted in between. Measure again.",
            )
        return {name: value - before.totals.get(name, 0.0) for name, value in self.totals.items()}


@dataclass(frozen=True)
class Counters:
    """How an engine's counters are read.

    Attributes:
        marks: how their names begin.
        metrics: the path at which it serves them.
        version: the path at which it says its version, under the key "version".
        read: from the text of its metrics to totals.
        count: from differences, K, the number of requests and of prompts to counts.
        speculates: from totals or differences to whether something was drafted.
        needs: what it must be started with to show them; "" for nothing.
        note: what a reader of the figures has to know.
        otherwise: how they are read where the engine counts a draft for an answer that its prefill gave whole.
        cuts: whether accepted tokens past an answer's limit are left out.
    """

    marks: str
    metrics: str
    version: str
    read: Callable[[str], Totals]
    count: Callable[[Mapping[str, float], int, int, int], Counts]
    speculates: Callable[[Mapping[str, float]], bool]
    needs: str = ""
    note: str = ""
    otherwise: Counters | None = None
    cuts: bool = False

    def shown_on(self, page: str) -> bool:
        """Say whether a metrics page has one of them."""
        return any(line.startswith(self.marks) for line in page.splitlines())


def totals(metrics: str, names: Iterable[str], by_place: Iterable[str] = (), place: str = "") -> dict[str, float]:
    """Sum a page's samples over ranks and replicas, under "name", or "name place" for those of a place.

    Only `_total` samples count: a `_created` one beside each holds a time. Other lines of the page are not looked at.

    Args:
        metrics: the Prometheus text format.
        names: counters; one that was never raised may have no sample.
        by_place: counters of each place of a draft.
        place: the label that holds the place.

    Raises:
        CountersMissing: a line of one of them is no sample, or its value or place no number that a counter can have.
    """
    from prometheus_client.parser import text_string_to_metric_families as parse

    wanted, placed = frozenset(names), frozenset(by_place)
    found: dict[str, float] = {}
    for line in metrics.split("\n"):
        if not line.startswith(tuple(wanted | placed)):
            continue
        try:
            samples = [sample for family in parse(line + "\n") for sample in family.samples]
            for sample in samples:
                if sample.name not in wanted | placed:
                    continue
                if not math.isfinite(sample.value):
                    raise ValueError(sample.value)
                at = int(sample.labels[place]) if sample.name in placed else None
                if at is not None and not 0 <= at < MOST_PLACES:
                    raise ValueError(at)
                name = sample.name if at is None else f"{sample.name} {at}"
                found[name] = found.get(name, 0.0) + float(sample.value)
        except (ValueError, KeyError, IndexError) as fault:
            raise CountersMissing(
                f"a line of the server's metrics cannot be read: {line[:200]}",
                where="the metrics page",
                fix="Give the engine's own address.",
            ) from fault
    return found


def check_possible(counts: Counts, draft_tokens: int, where: str) -> None:
    """Refuse counts that no chain of K drafted tokens can give.

    Raises:
        CountersMissing: nothing was drafted.
        AcceptanceInvalid: the acceptance length is above K + 1.
        DefinitionsMixed: the places do not add up, or are not K: an engine that counts places counts all of them.
    """
    if counts.drafts <= 0:
        raise CountersMissing(
            f"nothing was drafted for {where}", fix="Check that the server speculates, and that answers are not empty."
        )
    length = 1 + counts.accepted / counts.drafts
    if length > draft_tokens + 1 + 1e-9:
        raise AcceptanceInvalid(
            f"an acceptance length of {length:.3f} is above the {draft_tokens + 1} of K = {draft_tokens}",
            where=where,
            fix=f"{SAY_K}, and let nobody else use the server meanwhile.",
        )
    places = counts.per_position
    if places is None:
        return
    if abs(sum(places) - counts.accepted) > 1e-6 * max(1.0, counts.accepted) or len(places) != draft_tokens:
        raise DefinitionsMixed(
            f"the {len(places)} positions count {sum(places):g} accepted tokens, the total is {counts.accepted:g}, and "
            f"K is {draft_tokens}",
            where=where,
            fix=f"{SAY_K}; these counters do not describe one chain.",
        )
