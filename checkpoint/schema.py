"""JSON and YAML files, read as if they lied."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

# JSON as strangers send it.
#
# The standard parser takes a name that stands twice, NaN, half a surrogate pair and numbers of any length;
# each of these is read differently by different engines, or can be neither printed nor written again.

# Digits of the largest 64-bit count, and a sign.
MAX_DIGITS = 21


def parse_object(text: bytes) -> dict[str, Any]:
    """Parse one JSON object.

    Raises:
        ValueError: it is something else; the message is a phrase that says what.
    """
    try:
        value = json.loads(
            text.decode(), object_pairs_hook=_unique, parse_int=_whole, parse_float=_finite, parse_constant=_finite
        )
        if b"\\u" in text:
            # Half a surrogate pair, smuggled in as an escape, has no bytes.
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as fault:
        raise ValueError("it is nested too deeply") from fault
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{twice!r} stands twice")
    return found


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it holds a number of {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"it holds {digits[:MAX_DIGITS]}, which is no finite number")
    return value


def first_wrong(fault: ValidationError) -> str:
    """Return the first thing that is wrong and its place, e.g. "draft_tokens: Field required"."""
    first = fault.errors()[0]
    place = ".".join(map(str, first["loc"]))
    # What pydantic puts before the words of a validator of kconv's.
    what = first["msg"].removeprefix("Value error, ")
    return f"{place}: {what}" if place else what
