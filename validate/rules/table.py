"""Every rule there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...errors import KconvError, UnknownRule
from ..report import Finding
from . import (
    captured,
    captured_keys,
    comparisons,
    config_class,
    identity,
    keys,
    launch,
    limits,
    nulls,
    nvfp4,
    nvfp4_config,
    nvfp4_excludes,
    nvfp4_values,
    quantized,
    rope,
    rope_objects,
    tensors,
    unreadable,
    values,
    vocabulary,
)
from .head import HeadSubject
from .rule import Rule, run_rules
from .target import TargetSubject

HEAD_RULES: tuple[Rule[HeadSubject], ...] = (
    *unreadable.RULES,
    *keys.RULES,
    *nulls.RULES,
    *config_class.RULES,
    *tensors.RULES,
    *captured.RULES,
    *captured_keys.RULES,
    *rope.RULES,
    *rope_objects.RULES,
    *vocabulary.RULES,
    *identity.RULES,
    *launch.RULES,
    *quantized.RULES,
    *values.RULES,
    *limits.RULES,
)

# Over a target's checkpoint, quantized or not.
TARGET_RULES: tuple[Rule[TargetSubject], ...] = (
    *nvfp4.RULES,
    *nvfp4_config.RULES,
    *nvfp4_excludes.RULES,
    *nvfp4_values.RULES,
)
EVERY_RULE: tuple[Rule[Any], ...] = (
    *unreadable.UNOPENED,
    *HEAD_RULES,
    *unreadable.LAST,
    *TARGET_RULES,
    *comparisons.RULES,
)
# Rules that explain a fault whatever it says: every name, or the target itself, is wrong.
WHOLE = (tensors.prefix_model.id, captured.captured_outside_target.id)


def check_head(subject: HeadSubject) -> Iterator[Finding]:
    """Yield what is wrong with a head; a fault that no rule speaks of is reported all the same."""
    fault, explained = subject.fault, False
    for finding in run_rules(HEAD_RULES, subject):
        explained |= finding.severity == "error" and fault is not None and _speaks_of(finding, fault)
        yield finding
    if fault is not None and not explained:
        for last in unreadable.LAST:
            found = list(run_rules((last,), subject))
            yield from found
            if found:
                break


def _speaks_of(finding: Finding, fault: KconvError) -> bool:
    """Say whether a finding is about the key or tensor that stopped the reading."""
    about = finding.where.rpartition(": ")[2]
    return finding.rule in WHOLE or finding.message == fault.what or about in fault.what or about in fault.where


def all_rules() -> dict[str, Rule[Any]]:
    """Return every rule by its id, in the order of ids."""
    return {one.id: one for one in sorted(EVERY_RULE, key=lambda one: one.id)}


def find_rule(wanted: str) -> Rule[Any]:
    """Return a rule by its id or its name.

    Raises:
        UnknownRule: there is none.
    """
    for one in all_rules().values():
        if wanted in (one.id, one.name) or wanted.upper() == one.id:
            return one
    raise UnknownRule(f"no rule is called {wanted!r}", fix="Run kconv validate --explain all for the list.")
