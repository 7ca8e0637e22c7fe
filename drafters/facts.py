"""A fact that a drafter's files may leave open: one row, by which it is read, stated, measured and shown."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Protocol

from ..checkpoint.manifest import FactValue, Hints
from ..errors import Problem
from ..options import Answer
from ..rule import Rule
from .base import Config, Names, Spec
from .rope_keys import DEFAULT_THETA, states_theta

# A decoder layer in a tensor's name: its number, or none if the layout has only one layer.
LAYER = re.compile(r"(?:^|\.)(?:mid)?layers?\.(?:(\d+)\.)?")
# The rules about facts of every family.
UNDECIDED: Rule[Any] = Rule(
    "K006",
    "captured-undecided",
    "undecided",
    "The config does not say clearly which target layers the head reads. A wrong guess costs acceptance.",
    fix="Give --target, whose depth decides the default, or give --captured or --captured-are.",
    seen_in="https://github.com/vllm-project/vllm/pull/50170",
    says_fix=True,
)
TARGETS_DEPTH: Rule[Any] = Rule(
    "K023",
    "layers-of-the-target",
    "error",
    "num_hidden_layers is probably the target's, because the head stores fewer layers. Engines would"
    " build that many and leave them uninitialized.",
    fix="Convert the head with --layers and the number of stored layers; kconv's layouts write it.",
)
THETA_LOST: Rule[Any] = Rule(
    "K162",
    "rope-theta-lost",
    "undecided",
    "The config has no rope_theta. Engines use 10000; a Kimi-K2 target has 50000.",
    fix="Pass --rope-theta, or state the rope_theta that the head was trained with, at the top level and in"
    " rope_parameters.",
    seen_in="https://github.com/sgl-project/SpecForge/issues/265",
)
# RoPE bases of trainers and targets of Llama, Qwen, Kimi and DeepSeek.
BASES = (DEFAULT_THETA, 50000.0, 500000.0, 1000000.0)


@dataclass(frozen=True)
class Candidate:
    """A possible value of a fact, and why; the value is None if it depends on something unknown."""

    value: FactValue | None
    why: str


class Target(Protocol):
    """What a fact asks of the target."""

    @property
    def rope(self) -> Mapping[str, Any]:
        """Its keys of RoPE, in the spelling of its config."""
        ...


def _no_rivals(spec: Spec, target: Target) -> tuple[FactValue, ...]:
    return ()


def neighbors(spec: Spec, target: Target) -> Sequence[FactValue]:
    """Return the layers one early and one late: the difference between layer inputs and outputs."""
    return [tuple(layer + by for layer in spec.captured) for by in (-1, 1)]


def bases(spec: Spec, target: Target) -> Sequence[FactValue]:
    """Return the target's RoPE base, and those of trainers and targets."""
    own = target.rope.get("rope_theta")
    if isinstance(own, (int, float)) and not isinstance(own, bool) and own > 0:
        return [float(own), *BASES]
    return BASES


@dataclass(frozen=True)
class Fact:
    """A fact that a head's files may leave open.

    Attributes:
        name: the config key, or "captured".
        rule: the rule about files that leave it open.
        hint: the name under which the user states it: in `Hints`, and as an option.
        line: the line of `kconv inspect` in which it stands.
        path: its field of a spec, dotted.
        candidates: returns its possible values, for a config in the keys of `drafters.keys`.
        put: returns a spec with another value; None if no measurement can decide the fact.
        rivals: returns values to measure besides the candidates.
        stated: whether a config states it; None if nothing rests on a hint, or `drafters.captured` says so.
        answer: what its option takes, if that stands in for the config key of its name; kconv adds the option to each
            command that reads a head. A default of the key, if any, needs no other value.
        words: the fact in words, with `{}` for its value.
        beside: the values of other hints when this one is set.
    """

    name: str
    rule: Rule[Any]
    hint: str
    line: str
    path: str
    candidates: Callable[[Config, Hints, Names], Sequence[Candidate]]
    put: Callable[[Any, Any], Any] | None = None
    rivals: Callable[[Any, Target], Sequence[FactValue]] = _no_rivals
    stated: Callable[[Config], bool] | None = None
    answer: Answer | None = None
    words: str = "{}"
    beside: Mapping[str, FactValue | str] = field(default_factory=dict[str, FactValue | str])

    @property
    def option(self) -> str:
        """The option that states the fact."""
        return f"--{self.hint.replace('_', '-')}"

    def read(self, spec: Spec) -> FactValue:
        """Return its value from a spec."""
        return attrgetter(self.path)(spec)

    def options(self, value: FactValue) -> str:
        """Return the option that states a value of the fact, as a user may copy it."""
        if isinstance(value, bool):
            return f"{self.option} {'yes' if value else 'no'}"
        return f"{self.option} {','.join(map(repr, value)) if isinstance(value, tuple) else repr(value)}"

    def hints(self, value: FactValue) -> dict[str, Any]:
        """Return the hints that state a value of the fact."""
        return {self.hint: value, **self.beside}


def captured_layers(candidates: Callable[[Config, Hints, Names], Sequence[Candidate]]) -> Fact:
    """Return the fact of any family which of the target's layers it reads."""
    return Fact(
        "captured",
        UNDECIDED,
        hint="captured",
        line="captured",
        path="captured",
        candidates=candidates,
        put=lambda spec, value: replace(spec, captured=value),
        rivals=neighbors,
        words="outputs of layers {}",
        beside={"captured_are": "outputs"},
    )


def rope_base(*candidates: Candidate) -> Fact:
    """Return the fact of any family what its RoPE base is."""
    return Fact(
        "rope_theta",
        THETA_LOST,
        hint="rope_theta",
        line="rope",
        path="rope.theta",
        candidates=lambda config, hints, names: candidates,
        put=lambda spec, value: replace(spec, rope=replace(spec.rope, theta=value)),
        rivals=bases,
        stated=states_theta,
    )


# Of any family: how many decoder layers it has, where the config copies the target's number.
DEPTH = Fact(
    "num_hidden_layers",
    TARGETS_DEPTH,
    hint="layers",
    line="layers",
    path="layers",
    candidates=lambda config, hints, names: [Candidate(stored_layers(names), "stored in the file")],
)


def phrase(fact: str, value: FactValue) -> str:
    """Return a fact's value in words, with every digit.

    A manifest may name a fact that this version does not know.
    """
    known = find_fact(fact)
    return (known.words if known else "{}").format(json.dumps(value))


def find_fact(name: str) -> Fact | None:
    """Return a fact of any family; None if none has it."""
    from .registry import drafters

    return next((one.facts[name] for one in drafters() if name in one.facts), None)


def stored_layers(names: Iterable[str]) -> int:
    """Return how many decoder layers a checkpoint stores, from its tensors' names; 0 if unknown."""
    found = {int(number or 0) for name in names for number in LAYER.findall(name)[:1]}
    return len(found)


def measurable(facts: Mapping[str, Fact]) -> list[Fact]:
    """Return the facts that a measurement can decide."""
    return [fact for fact in facts.values() if fact.put is not None]


@dataclass(frozen=True)
class Undecided:
    """A fact that a head's files leave open.

    Attributes:
        fact: its name.
        what: one sentence that says what the files hold.
        candidates: the possible values.
        decide: what would decide it, as an imperative sentence.
    """

    fact: str
    what: str
    candidates: tuple[Candidate, ...]
    decide: str

    @property
    def phrases(self) -> list[str]:
        """The candidates in words."""
        return [
            one.why if one.value is None else f"{phrase(self.fact, one.value)}: {one.why}" for one in self.candidates
        ]


def find_undecided(
    facts: Mapping[str, Fact], problems: Sequence[Problem], config: Config, hints: Hints, names: Names
) -> tuple[Undecided, ...]:
    """Return the facts that a head's files leave open, each once.

    Args:
        facts: the family's.
        problems: the problems found while reading.
        config: in the keys of `drafters.keys`.
        hints: the user's options.
        names: the names of its tensors.
    """
    by_code = {fact.rule.id: fact for fact in facts.values()}
    found = {problem.code: problem for problem in reversed(problems) if problem.code in by_code}
    return tuple(
        Undecided(by_code[code].name, problem.what, tuple(by_code[code].candidates(config, hints, names)), problem.fix)
        for code, problem in reversed(found.items())
    )
