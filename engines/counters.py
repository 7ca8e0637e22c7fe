"""Draft counters, read from the text of a server's metrics page and brought to one form.

Each engine's own file lists its counters; the common part is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ..errors import AcceptanceInvalid, CountersMissing, CountersReset, DefinitionsMixed

SAY_K = "Pass the K that the server was started with (--draft-tokens)"
NO_DRAFTS = "the result has no draft figures"
# More than any engine counts or uses as a token id, and exact as a float.
MOST = 1 << 48
MOST_PLACES = 1000  # a page may claim any number of positions


@dataclass(frozen=True)
class Counts:
    """Counts over a group of prompts.

    Attributes:
        drafts: verify steps.
        accepted: drafted tokens that were accepted, without the bonus tokens.
        per_position: in how many drafts the tokens up to each position were all accepted; None if the engine does not
            count it.
    """

    drafts: float
    accepted: float
    per_position: tuple[float, ...] | None
    prompts: int = 1

    @classmethod
    def of_histogram(cls, histogram: Sequence[int], draft_tokens: int) -> Counts:
        """Count one request's drafts by their number of accepted tokens: `histogram[n]` drafts accepted n."""
        # From the last position on: a server may send a long list.
        reached = [*accumulate(reversed(histogram))][::-1]
        places = tuple(map(float, [*reached[1:], *[0] * (draft_tokens + 1 - max(len(reached), 1))]))
        return cls(float(sum(histogram)), sum(places), places)

    @classmethod
    def pool(cls, counts: Sequence[Counts]) -> Counts:
        """Add up counts of requests, all of which have positions."""
        places = zip(*(one.per_position or () for one in counts), strict=True)
        drafts, accepted = sum(one.drafts for one in counts), sum(one.accepted for one in counts)
        return cls(drafts, accepted, tuple(sum(place) for place in places), sum(one.prompts for one in counts))


@dataclass(frozen=True)
class PerRequest:
    """How an engine reports in each answer how it drafted that answer, undisturbed by other users.

    A histogram covers a request's verify steps, by the number of accepted drafted tokens; None if the answer has none,
    e.g. from a server that was started without them.

    Attributes:
        path: the path that continues token ids.
        body: builds the request from the model's name, a prompt's token ids and the number of new tokens.
        read: returns token ids and histogram from the answer's JSON.
        chat: additional fields of a chat request that make the server return a histogram.
        read_chat: returns the histogram from a chat answer's JSON.
        beside: a page that the engine's own address has but a router in front of it has not; "" if every server has
            `path`.
    """

    path: str
    body: Callable[[str, Sequence[int], int], dict[str, Any]]
    read: Callable[[Any], tuple[list[int], list[int] | None]]
    chat: Mapping[str, Any]
    read_chat: Callable[[Any], list[int] | None]
    beside: str = ""


@dataclass(frozen=True)
class Totals:
    """One reading of a server's counters.

    Attributes:
        totals: by name; counters of positions as "name position".
        whole: all counters exist from the start, so a different set of them means a different server.
    """

    totals: Mapping[str, float]
    whole: bool = False

    def since(self, before: Totals, where: str) -> Mapping[str, float]:
        """Return the differences to an earlier reading of the same server."""
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
                f"the server now has the counter {new}, which it did not have before",
                where=where,
                fix="The server was restarted in between. Measure again.",
            )
        return {name: value - before.totals.get(name, 0.0) for name, value in self.totals.items()}


@dataclass(frozen=True)
class Counters:
    """How to read an engine's counters.

    Attributes:
        marks: prefixes of their names.
        metrics: the path that serves them.
        version: the path that reports the engine's version, under the key "version".
        read: returns totals from the text of the metrics page.
        count: returns counts from differences, K, and the number of requests and of prompts.
        speculates: returns whether anything was drafted, from totals or differences.
        needs: the option that makes the engine show them; "" for none.
        note: what a reader of the figures has to know.
        otherwise: how to read them if the engine counts a draft for an answer that its prefill completed.
        cuts: whether accepted tokens past an answer's limit are not counted.
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
        """Return whether a metrics page has one of them."""
        return any(line.startswith(self.marks) for line in page.splitlines())


def totals(metrics: str, names: Iterable[str], by_place: Iterable[str] = (), place: str = "") -> dict[str, float]:
    """Sum a page's samples over ranks and replicas, under "name", or "name position" for samples of a position.

    Only `_total` samples count: each has a `_created` one next to it that holds a time. Other lines are ignored.

    Args:
        names: counters; one that was never raised may have no sample.
        by_place: counters of each position of a draft.
        place: the label that holds the position.

    Raises:
        CountersMissing: a line of one of them is not a sample, or its value or position is impossible for a counter.
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
                # The parser returns a number without a point as an int, of any length.
                if not 0 <= sample.value < MOST:
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
                fix="Pass the engine's own address.",
            ) from fault
    return found


def check_possible(counts: Counts, draft_tokens: int, where: str) -> None:
    """Refuse counts that a chain of K drafted tokens cannot produce.

    Raises:
        CountersMissing: nothing was drafted.
        AcceptanceInvalid: the acceptance length is above K + 1.
        DefinitionsMixed: the positions do not add up, or are not K: an engine that counts positions counts all of them.
    """
    if counts.drafts <= 0:
        raise CountersMissing(
            f"nothing was drafted for {where}", fix="Check that the server speculates, and that answers are not empty."
        )
    length = 1 + counts.accepted / counts.drafts
    if length > draft_tokens + 1 + 1e-9:
        raise AcceptanceInvalid(
            f"an acceptance length of {length:.3f} is above {draft_tokens + 1}, the maximum for K = {draft_tokens}",
            where=where,
            fix=f"{SAY_K}, and make sure that nobody else uses the server.",
        )
    places = counts.per_position
    if places is None:
        return
    if abs(sum(places) - counts.accepted) > 1e-6 * max(1.0, counts.accepted) or len(places) != draft_tokens:
        raise DefinitionsMixed(
            f"the {len(places)} positions count {sum(places):.0f} accepted tokens, but the total is"
            f" {counts.accepted:.0f} and K is {draft_tokens}",
            where=where,
            fix=f"{SAY_K}; these counters do not describe one chain.",
        )
