"""A server on the loopback that stands in for an engine's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.loopback import serving


@dataclass
class StandIn:
    """What the server answers, by path, as (status, text) or a function of the body; and the bodies it was sent."""

    url: str = ""
    answers: dict[str, tuple[int, str] | Callable[[Any], tuple[int, str]]] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    said = StandIn()

    def answer(path: str, body: Any) -> tuple[int, str]:
        said.asked.append((path, body))
        found = said.answers.get(path, (404, "not found"))
        return found(body) if callable(found) else found

    with serving(answer) as said.url:
        yield said
