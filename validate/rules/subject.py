"""What rules are applied to, and for which engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ...checkpoint.folder import Checkpoint
from ...checkpoint.header import TensorInfo
from ...drafters.base import Drafter
from ...drafters.eagle3 import EAGLE3
from ...engines.base import Engine
from ...engines.registry import engines, runners
from ...errors import Problem
from ...rule import Finding, Rule

ENGINES = runners()


def readers(keys: Callable[[Engine], Iterable[str]]) -> dict[str, tuple[str, ...]]:
    """Return, for each config key that engines name, the runners that read it."""
    found: dict[str, tuple[str, ...]] = {}
    for engine in engines():
        for key in keys(engine):
            found[key] = (*found.get(key, ()), *engine.runner_names)
    return found


def concerned(rule: str) -> tuple[str, ...]:
    """Return the runners of the engines that say that a rule of the tables holds for them."""
    return tuple(name for engine in engines() if rule in engine.shared_rules for name in engine.runner_names)


@dataclass(frozen=True)
class Subject:
    """The input of rules: a checkpoint, and the engines to check for.

    Attributes:
        checkpoint: its config and headers.
        engines: the engines that will serve it; names of `ENGINES`.
        with_values: whether weights may be read; otherwise rules that need them do not run.
    """

    checkpoint: Checkpoint
    engines: frozenset[str] = frozenset(ENGINES)
    with_values: bool = True

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json, unchanged."""
        return self.checkpoint.config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Header entries by name."""
        return self.checkpoint.tensors

    @property
    def drafter(self) -> Drafter | None:
        """The family of a drafter, if known."""
        return None

    @property
    def problems(self) -> Sequence[Problem]:
        """Problems found while reading it, by the ids of rules."""
        return ()


R = TypeVar("R", bound=Subject)


def run_rules(rules: Iterable[Rule[R]], subject: R) -> Iterator[Finding]:
    """Run the rules that concern a requested engine and read only what they may."""
    for one in rules:
        if one.engines and not subject.engines.intersection(one.engines):
            continue
        if one.values and not subject.with_values:
            continue
        families = (EAGLE3.name,) if one.drafters is None else one.drafters
        if one.check and families and subject.drafter and subject.drafter.name not in families:
            continue
        if one.check is None:
            for problem in subject.problems:
                if problem.code == one.id:
                    yield one.of_problem(problem, subject.engines)
        else:
            yield from one.findings(subject, subject.engines)
