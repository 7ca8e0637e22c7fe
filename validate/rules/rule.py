"""What a rule is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ...checkpoint.folder import Checkpoint
from ...checkpoint.header import TensorInfo
from ...engines import sglang, trtllm, vllm
from ...engines.base import Engine
from ...engines.registry import engines, runners
from ...errors import Problem, Severity
from ..report import Finding

# Those that rules of one engine's own name. vLLM has two model runners, which look for the captured layers in
# different places.
VLLM_V1, VLLM_V2 = VLLM = vllm.ENGINE.runner_names
(SGLANG,), (TRTLLM,) = sglang.ENGINE.runner_names, trtllm.ENGINE.runner_names
ENGINES = runners()


def readers(keys: Callable[[Engine], Iterable[str]]) -> dict[str, tuple[str, ...]]:
    """Return, for each config key that engines name, the runners that read it."""
    found: dict[str, tuple[str, ...]] = {}
    for engine in engines():
        for key in keys(engine):
            found[key] = (*found.get(key, ()), *engine.runner_names)
    return found


@dataclass(frozen=True)
class Found:
    """One place where a rule was broken.

    Attributes:
        where: the tensor, key or file.
        message: what was found, one sentence with its figures.
        fix: what to do, where it is not the rule's own.
        engines: those that it concerns, where these are not all of the rule's.
    """

    where: str
    message: str
    fix: str = ""
    engines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Subject:
    """What rules look at: a checkpoint, and for whom.

    Attributes:
        checkpoint: its config and headers.
        engines: who will serve it; names of `ENGINES`.
        with_values: whether weights may be read; rules that need them are not run otherwise.
    """

    checkpoint: Checkpoint
    engines: frozenset[str] = frozenset(ENGINES)
    with_values: bool = True

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json, as it is."""
        return self.checkpoint.config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Header entries by name."""
        return self.checkpoint.tensors

    @property
    def problems(self) -> Sequence[Problem]:
        """What its reading found, by the ids of rules."""
        return ()


S = TypeVar("S", bound=Subject)
Check = Callable[[S], Iterable[Found]]


@dataclass(frozen=True)
class Rule(Generic[S]):
    """Something that must not be, and what is known about it.

    Attributes:
        id: e.g. "K101"; never given to another rule.
        name: e.g. "lm-head-missing".
        severity: "error" where an engine that was asked for would fail or serve wrong numbers; "warning" where
            only the target or a user could decide; "note" for what a launch flag must supply.
        sentence: what goes wrong.
        fix: what to do.
        check: yields each place where it is so; None where the finding is made elsewhere: by a comparison, or by the
            reading of a head, whose problems bear the rule's id.
        engines: the engines concerned; empty for all, and for kconv itself.
        seen_in: the public thread or the line of code that taught the rule.
        values: whether it reads weights.
        says_fix: whether a problem of the reading says better than `fix` what to do.
        versions: for which releases of an engine it holds, where these differ from `Engine.release`.
    """

    id: str
    name: str
    severity: Severity
    sentence: str
    fix: str
    check: Check[S] | None = None
    engines: tuple[str, ...] = ()
    seen_in: str = ""
    values: bool = False
    says_fix: bool = False
    versions: str = ""

    def finding(self, found: Found, asked: Iterable[str] = ENGINES) -> Finding:
        """Return what was found in a report's shape, about those of its engines that were asked for."""
        asked = frozenset(asked)
        return Finding(
            rule=self.id,
            severity=self.severity,
            where=found.where,
            message=found.message,
            fix=found.fix or self.fix,
            engines=tuple(engine for engine in found.engines or self.engines if engine in asked),
            seen_in=self.seen_in,
        )

    def of_problem(self, problem: Problem, asked: Iterable[str] = ENGINES) -> Finding:
        """Return a problem of a head's reading in a report's shape."""
        return self.finding(Found(problem.where, problem.what, problem.fix if self.says_fix else ""), asked)


def run_rules(rules: Iterable[Rule[S]], subject: S) -> Iterator[Finding]:
    """Run those rules that concern an engine that was asked for, and that read no more than they may."""
    for one in rules:
        if one.engines and not subject.engines.intersection(one.engines):
            continue
        if one.values and not subject.with_values:
            continue
        if one.check is None:
            for problem in subject.problems:
                if problem.code == one.id:
                    yield one.of_problem(problem, subject.engines)
        else:
            for found in one.check(subject):
                yield one.finding(found, subject.engines)
