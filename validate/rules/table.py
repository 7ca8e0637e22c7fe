"""All rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...drafters.registry import OWN, drafters
from ...engines.registry import OWN_ID, OWN_ID_FIX, engines, own_layouts
from ...errors import (
    ConfigInvalid,
    ConfigUnsupported,
    CorruptHeader,
    CorruptIndex,
    KconvError,
    NotACheckpoint,
    PluginInvalid,
    UnknownRule,
)
from ...lines import Table
from ...rule import Found, Rule
from ..report import Finding
from . import (
    captured,
    comparisons,
    config,
    identity,
    limits,
    nvfp4,
    nvfp4_config,
    quantized_head,
    rope,
    tensors,
    values,
    vocabulary,
)
from .head import HeadSubject
from .subject import run_rules
from .target import TargetSubject

# The subject of each file of rules, for a report's table.
OF_COMPARISON, OF_LIMITS = "Measurements, and the source", "Limits of the engine"
_TABLES: dict[str, tuple[Rule[Any], ...]] = {
    "Config": config.RULES,
    "Tensors": tensors.RULES,
    "Captured layers": captured.RULES,
    "RoPE": rope.RULES,
    "Vocabulary": vocabulary.RULES,
    "Model type and class": identity.RULES,
    "Quantized linears": quantized_head.RULES,
    "Values of the weights": values.RULES,
    OF_LIMITS: limits.RULES,
    "NVFP4 tensors": nvfp4.RULES,
    "NVFP4 config": nvfp4_config.RULES,
    OF_COMPARISON: comparisons.RULES,
}
OF_TARGET = frozenset(("NVFP4 tensors", "NVFP4 config"))


def by_subject() -> dict[str, tuple[Rule[Any], ...]]:
    """Return every rule by its subject: kconv's tables, and what families and engines bring.

    Raises:
        PluginInvalid: a rule of another package has an id of kconv's, an id or a name of another rule, or a subject
            that no report about a head has.
    """
    families: dict[str, tuple[Rule[Any], ...]] = {}
    foreign = {one.title: one for one in drafters() if one not in OWN}
    known = {rule for rules in _TABLES.values() for rule in rules}
    for one in (*OWN, *foreign.values()):
        # The rule of a fact that several families have is told once.
        of_facts = [fact.rule for fact in one.facts.values() if fact.rule not in known]
        known.update(of_facts)
        families[one.title] = tuple(replace(rule, drafters=(one.name,)) for rule in (*of_facts, *one.rules()))
    of_head = [title for title in (*_TABLES, *families) if title not in (*OF_TARGET, OF_COMPARISON)]
    every = [(title, "kconv", rule) for title, rules in _TABLES.items() for rule in rules]
    every += [(rule.subject or title, title, rule) for title, rules in families.items() for rule in rules]
    every += [(rule.subject or OF_LIMITS, one.title, rule) for one in engines() for rule in one.rules]
    taken: dict[str, str] = {}
    for title, by, rule in every:
        named = f"the rule {rule.id} {rule.name} of {by}"
        if by in foreign and OWN_ID.fullmatch(rule.id):
            raise PluginInvalid(f"{named} has an id that is reserved for kconv's own", fix=OWN_ID_FIX)
        for name in (rule.id, rule.name):
            if name in taken:
                raise PluginInvalid(f"{named} is called like {taken[name]}", fix="Give it an id and a name of its own.")
            taken[name] = named
        if by != "kconv" and title not in of_head:
            raise PluginInvalid(
                f"{named} has the subject {title!r}, which no report about a head has",
                fix=f"Choose one of {', '.join(of_head)}.",
            )
    found = {title: tuple(rule for of, _, rule in every if of == title) for title in (*_TABLES, *families)}
    return {title: rules for title, rules in found.items() if rules}


SUBJECTS = by_subject()
HEAD_RULES: tuple[Rule[HeadSubject], ...] = tuple(
    rule for title, rules in SUBJECTS.items() if title not in (*OF_TARGET, OF_COMPARISON) for rule in rules
)
# For a target's checkpoint, quantized or not.
TARGET_RULES: tuple[Rule[TargetSubject], ...] = tuple(
    rule for title, rules in SUBJECTS.items() if title in OF_TARGET for rule in rules
)
EVERY_RULE: tuple[Rule[Any], ...] = (*HEAD_RULES, *TARGET_RULES, *comparisons.RULES)
BY_ID: dict[str, Rule[Any]] = {one.id: one for one in sorted(EVERY_RULE, key=lambda one: one.id)}
# Rules about a checkpoint that cannot be opened.
UNOPENED: dict[type[KconvError], str] = {
    NotACheckpoint: "K001",
    CorruptHeader: "K002",
    CorruptIndex: "K003",
    ConfigInvalid: "K008",
    ConfigUnsupported: "K008",
}


def check_head(subject: HeadSubject) -> Iterator[Finding]:
    """Yield the findings about a head: those of its rules, and each problem of reading it.

    A problem is reported even if its rule concerns engines that were not requested: kconv itself cannot read the head.
    """
    said: set[str] = set()
    for finding in run_rules(HEAD_RULES, subject):
        said.add(finding.rule)
        yield finding
    family = subject.layout.drafter if subject.layout is not None else None
    for engine in engines():
        asked = subject.engines.intersection(engine.runner_names)
        if family is not None and asked and not any(layout.drafter is family for layout in own_layouts(engine)):
            what = f"kconv knows no layout of {family.title}s for {engine.title}"
            fix = f"Serve it with an engine that has one, or ask {engine.title}'s makers."
            yield BY_ID["K007"].finding(Found("config.json", what, fix, tuple(sorted(asked))), asked)
    for problem in subject.problems:
        if problem.code not in said:
            yield BY_ID[problem.code].of_problem(problem, subject.engines)


def of_error(error: KconvError) -> Finding:
    """Return the error that prevented opening a checkpoint as a finding.

    Raises:
        KconvError: the error itself, if it is not about the checkpoint.
    """
    if type(error) not in UNOPENED:
        raise error
    code = UNOPENED[type(error)]
    return BY_ID[code].of_problem(error.problem(code))


def all_rules() -> dict[str, Rule[Any]]:
    """Return every rule by its id, in the order of ids."""
    return dict(BY_ID)


def list_rules(rules: Mapping[str, Rule[Any]]) -> Table:
    """Return a table of rules, each on one line."""
    columns = ("rule", "name", "severity", "engines", "what goes wrong")
    return Table(
        columns,
        [(one.id, one.name, one.severity, ", ".join(one.engines) or "all", one.sentence) for one in rules.values()],
    )


def find_rule(wanted: str) -> Rule[Any]:
    """Return a rule by its id or its name.

    Raises:
        UnknownRule: there is no such rule.
    """
    for one in BY_ID.values():
        if wanted in (one.id, one.name) or wanted.upper().removeprefix("K") == one.id.removeprefix("K"):
            return one
    raise UnknownRule(f"no rule is called {wanted!r}", fix="Run kconv validate --explain all for the list.")
