"""What a rule is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ...checkpoint.folder import Checkpoint
from ...checkpoint.header import TensorInfo
from ...drafters.base import Drafter
from ...drafters.eagle3 import EAGLE3
from ...engines import sglang, trtllm, vllm
from ...engines.base import Engine
from ...engines.registry import engines, runners
from ...errors import Problem, Severity
from ..report import Finding

# The engine names in rules about one engine. vLLM has two model runners, which look for the captured layers in
# different places.
VLLM_V1, VLLM_V2 = VLLM = vllm.ENGINE.runner_names
(SGLANG,), (TRTLLM,) = sglang.ENGINE.runner_names, trtllm.ENGINE.runner_names
ENGINES = runners()
EVERY_FAMILY: tuple[str, ...] = ()


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

    where: the tensor, key or file.
    message: what was found, one sentence with its figures.
    fix: what to do, if it differs from the rule's own.
    engines: the engines concerned, if these are not all of the rule's.
    needs: the option that decides a fact left open.
    severity: if it differs from the rule's own; one of its `also`.
    """

    where: str
    message: str
    fix: str = ""
    engines: tuple[str, ...] = ()
    needs: str = ""
    severity: Severity | None = None


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


S = TypeVar("S")
R = TypeVar("R", bound=Subject)
Check = Callable[[S], Iterable[Found]]


@dataclass(frozen=True)
class Rule(Generic[S]):
    """Something that must not be, with everything known about it.

    Attributes:
        id: e.g. "K101"; never reused.
        name: e.g. "lm-head-missing".
        severity: "error" if a requested engine would fail or serve wrong numbers; "undecided" if that depends on a
            fact that the head's files leave open and an option decides; "warning" if only the target or a user could
            decide; "note" for what a launch flag must supply.
        sentence: what goes wrong.
        fix: what to do.
        check: yields each place where it applies; None if a comparison, or reading the head, makes the finding: such
            problems carry the rule's id.
        engines: the engines concerned; empty for all, and for kconv itself.
        seen_in: the public thread or the line of code from which the rule comes.
        values: whether it reads weights.
        says_fix: whether a problem's own fix is more specific than `fix`.
        versions: the engine releases for which it holds, if these differ from `Engine.release`.
        drafters: the families for which it holds; `EVERY_FAMILY` for all. A problem of reading is any family's.
        also: the other severities that one of its findings may have.
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
    drafters: tuple[str, ...] = (EAGLE3.name,)
    also: tuple[Severity, ...] = ()

    def finding(self, found: Found, asked: Iterable[str] = ENGINES) -> Finding:
        """Return the findings in a report's form, for the engines requested among its own."""
        asked, severity = frozenset(asked), found.severity or self.severity
        if severity not in (self.severity, *self.also):
            raise ValueError(f"a finding of {self.id} is not of severity {severity}")
        return Finding(
            rule=self.id,
            severity=severity,
            where=found.where,
            message=found.message,
            fix=found.fix or self.fix,
            engines=tuple(engine for engine in found.engines or self.engines if engine in asked),
            seen_in=self.seen_in,
            needs=found.needs,
        )

    def findings(self, subject: S, asked: Iterable[str] = ENGINES) -> Iterator[Finding]:
        """Yield the findings of its own check."""
        for found in self.check(subject) if self.check else ():
            yield self.finding(found, asked)

    def of_problem(self, problem: Problem, asked: Iterable[str] = ENGINES) -> Finding:
        """Return a problem from reading a head in a report's form."""
        fix = problem.fix if self.says_fix else ""
        return self.finding(Found(problem.where, problem.what, fix, needs=problem.needs), asked)


def run_rules(rules: Iterable[Rule[R]], subject: R) -> Iterator[Finding]:
    """Run the rules that concern a requested engine and read only what they may."""
    for one in rules:
        if one.engines and not subject.engines.intersection(one.engines):
            continue
        if one.values and not subject.with_values:
            continue
        if one.check and one.drafters and subject.drafter and subject.drafter.name not in one.drafters:
            continue
        if one.check is None:
            for problem in subject.problems:
                if problem.code == one.id:
                    yield one.of_problem(problem, subject.engines)
        else:
            yield from one.findings(subject, subject.engines)
