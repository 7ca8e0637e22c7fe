"""Servers that forge acceptance: they accept a fixed number of drafts whatever the target says, to measure speed only.

Each engine's own file names the settings that do this. vLLM, SGLang and TensorRT-LLM then always accept the whole part
of the length, and one token more with the probability of the remainder. So the counts reveal a setting that the server
does not show: every position but one is accepted always or never.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..engines.base import Sampling
from ..engines.counters import Counts
from ..errors import AcceptanceForged
from ..serving.client import Client

# A setting and its value, in JSON and in Python's notation for a config.
_VALUE = r"""["']?\s*[:=]\s*["']?(?P<value>[^\s"',}\])]+)"""
# Values that turn these settings off.
OFF = {"null", "None", "false", "False", "0", "0.0", "-1", "-1.0", ""}
# So few drafts may all be alike by chance.
FEWEST = 64
FIX = "To measure acceptance, start the server without that setting; it is only for measuring speed."


def check_settings(server: Client, sampling: Sampling | None) -> dict[str, str]:
    """Refuse a server whose settings show that it forges acceptance.

    Returns:
        The sampling methods that it shows, under the names of `AcceptanceRow`.
    """
    found: dict[str, str] = {}
    if sampling is None:
        return found
    for page in dict.fromkeys(server.page(path) for path in sampling.pages):
        for name, values in sampling.forging.items():
            for shown in re.finditer(name + _VALUE, page):
                value = shown["value"]
                if value in values or (not values and value not in OFF):
                    raise AcceptanceForged(
                        f"the server forges its acceptance: {name} is {value}", where=server.url, fix=FIX
                    )
        for name in sampling.methods:
            if shown := re.search(name + _VALUE, page):
                found[name] = shown["value"]
    return found


def check_counts(groups: Sequence[Counts], draft_tokens: int, requests: int, where: str) -> None:
    """Refuse counts that no real drafting gives but a fixed acceptance length does.

    Accepting nothing and accepting everything are tolerated: a broken head does the former, and a target that repeats
    itself the latter.

    Args:
        draft_tokens: K.
        requests: the number answered; the last draft of each may be cut off.
    """
    drafts, accepted = sum(group.drafts for group in groups), sum(group.accepted for group in groups)
    if drafts < FEWEST:
        return
    length = 1 + accepted / drafts
    if all(group.per_position is not None for group in groups):
        places = [sum(group.per_position[at] for group in groups if group.per_position) for at in range(draft_tokens)]
        never = sum(count == 0 for count in places)
        # If a position is never reached, an answer's end may have cut some of the drafts before it.
        always = sum(count >= drafts - (requests if never else 0) for count in places)
        forged = 0 < always < draft_tokens and always + never >= draft_tokens - 1
    else:
        lengths = {group.accepted / group.drafts for group in groups if group.drafts}
        forged = len(groups) >= 8 and len(lengths) == 1 and 0 < min(lengths) < draft_tokens
    if forged:
        raise AcceptanceForged(
            f"the server's acceptance length of {length:.3f} is a fixed one: in {drafts:.0f} drafts every position but "
            "at most one was accepted always or never",
            where=where,
            fix=FIX,
        )
