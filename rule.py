"""What a rule is, and the finding that it makes. Nothing else makes one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .errors import Problem, Severity
from .lines import Part
from .strict import StrictModel

EVERY_FAMILY: tuple[str, ...] = ()


class Finding(StrictModel):
    """A problem, or something that a user must know.

    Attributes:
        rule: its id, e.g. "K101".
        severity: "error" if an engine would fail or serve wrong numbers; "undecided" if that depends on a fact that the
            head's files leave open; "warning" if only the target or a user could decide; "note" for what a launch flag
            must supply.
        where: the tensor, key or file.
        message: what was found, one sentence with its figures.
        fix: what to do.
        engines: the engines concerned, by the names of `provenance.for`; empty for all of them.
        seen_in: the public thread that taught the rule.
        needs: the option that decides a fact left open, e.g. "--target org/name"; empty for any other finding.
    """

    rule: str
    severity: Severity
    where: str
    message: str
    fix: str
    engines: tuple[str, ...] = ()
    seen_in: str = ""
    needs: str = ""

    def concerns(self, runners: Iterable[str]) -> bool:
        """Return whether it concerns one of these runners; a finding without engines concerns all."""
        return not self.engines or not set(runners).isdisjoint(self.engines)


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


S = TypeVar("S")
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
        drafters: the families for which it holds; `EVERY_FAMILY` for all, None for the first, Eagle3. A problem of
            reading is any family's.
        also: the other severities that one of its findings may have.
        subject: the title under which a report counts it, for a rule that an engine brings.
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
    drafters: tuple[str, ...] | None = None
    also: tuple[Severity, ...] = ()
    subject: str = ""

    def finding(self, found: Found, asked: Iterable[str] | None = None) -> Finding:
        """Return the findings in a report's form, for the engines requested among its own."""
        severity, concerned = found.severity or self.severity, found.engines or self.engines
        asked = frozenset(concerned if asked is None else asked)
        if severity not in (self.severity, *self.also):
            raise ValueError(f"a finding of {self.id} is not of severity {severity}")
        return Finding(
            rule=self.id,
            severity=severity,
            where=found.where,
            message=found.message,
            fix=found.fix or self.fix,
            engines=tuple(engine for engine in concerned if engine in asked),
            seen_in=self.seen_in,
            needs=found.needs,
        )

    def findings(self, subject: S, asked: Iterable[str] | None = None) -> Iterator[Finding]:
        """Yield the findings of its own check."""
        for found in self.check(subject) if self.check else ():
            yield self.finding(found, asked)

    def of_problem(self, problem: Problem, asked: Iterable[str] | None = None) -> Finding:
        """Return a problem from reading a head in a report's form."""
        fix = problem.fix if self.says_fix or problem.knows else ""
        return self.finding(Found(problem.where, problem.what, fix, needs=problem.needs), asked)

    def lines(self) -> Iterator[Part]:
        yield f"{self.id} {self.name} ({self.severity})"
        yield f"  {self.sentence}"
        # A check of a card or a release concerns no engine.
        engines = ", ".join(self.engines) or "all" * self.id.startswith("K")
        facts = {"fix": self.fix, "engines": engines, "releases": self.versions, "seen in": self.seen_in}
        yield from (f"  {name}: {fact}" for name, fact in facts.items() if fact)

    def to_json(self) -> dict[str, Any]:
        told = ("name", "severity", "sentence", "fix", "engines", "versions", "seen_in")
        return {"rule": self.id} | {name: getattr(self, name) for name in told}
