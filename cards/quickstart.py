"""How to serve a head, for its card."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..engines.base import HEAD, TARGET, Deployment, Launch
from ..engines.registry import engine, engines_of
from ..escape import command_lines, yaml
from . import target_card
from .evidence import Evidence

# Names that no card has, to find where a serve line has one.
MARKS = ("kconv-names/the-head", "kconv-names/the-target")


@dataclass(frozen=True)
class Start:
    """How to start one engine.

    Attributes:
        command: for a shell; "" if the head cannot be served there.
        config: the YAML that goes with it, "" if there is none.
        file: the command's name for that YAML.
    """

    engine: str
    command: str
    config: str
    file: str
    notes: tuple[str, ...]


def starts(evidence: Evidence) -> tuple[Start, ...]:
    """Return how to start each engine that a head is for."""
    named = engines_of(evidence.manifest.layout) if evidence.manifest else map(engine, evidence.facts.serve)
    return tuple(
        _start(one.name, one.title, one.launch, evidence)
        for one in named
        if one.launch and evidence.drafter.name in one.launch.drafters
    )


def served_names(evidence: Evidence, card: str) -> tuple[set[str], set[str]]:
    """Return the names by which a card's serve lines call what it is of, and those by which they call its target."""
    marked = replace(evidence, facts=evidence.facts.model_copy(update={"name": MARKS[0], "base_model": MARKS[1]}))
    if target_card.is_target(evidence.manifest):
        texts = [command for _, command in target_card.commands(marked)]
    else:
        texts = [text for one in starts(marked) for text in (one.command, one.config)]
    found: dict[str, set[str]] = {mark: set() for mark in MARKS}
    for line in (line.strip() for text in texts for line in text.splitlines()):
        for mark in MARKS:
            before, stands, _ = line.partition(mark)
            if stands and before:
                found[mark] |= set(re.findall(name_after(before), card))
    return found[MARKS[0]], found[MARKS[1]]


def name_after(before: str) -> str:
    """Return the pattern of the name that a serve line has behind its beginning, in which marks are other names."""
    pattern = re.escape(before) + r"([^\s'\"\\]+)"
    for other in MARKS:
        pattern = pattern.replace(re.escape(other), r"\S+")
    return pattern


def _start(name: str, title: str, launch: Launch, evidence: Evidence) -> Start:
    facts = evidence.facts
    said = facts.serve.get(name)
    if said and said.unsupported:
        return Start(title, "", "", "", (said.unsupported,))
    config, notes = "", []
    if said and said.requires:
        notes.append(f"Requires {said.requires}.")
    target = (said.target if said else None) or facts.base_model
    names = {placeholder: name for placeholder, name in ((TARGET, target), (HEAD, facts.name)) if name}
    served = Deployment(
        target=names.get(TARGET, TARGET),
        head=names.get(HEAD, HEAD),
        spec=evidence.spec,
        own_code=evidence.own_code,
        arguments=said.words if said else (),
    )
    if served.spec is not None:
        notes += launch.notes(served.spec)
        if launch.config:
            lines = launch.config(served.spec, served).splitlines()
            config = "\n".join(line for line in lines if not line.startswith("#"))
    elif said and said.config:
        config = _named(said.config, names)
    elif launch.unwritten:
        notes.append(launch.unwritten)
    if said and said.note:
        notes.append(said.note)
    return Start(title, command_lines(launch.words(served)), config, launch.file, tuple(notes))


def _named(config: str, names: Mapping[str, str]) -> str:
    """Return a YAML with each value that is a placeholder replaced by a name."""
    from yaml import SafeLoader, ScalarEvent, YAMLError, parse

    try:
        scalars = [one for one in parse(config, SafeLoader) if isinstance(one, ScalarEvent) and one.value in names]
    except YAMLError:  # the owner's or a stranger's: shown as it is
        return config
    for one in reversed(scalars):
        config = f"{config[: one.start_mark.index]}{yaml(names[one.value])}{config[one.end_mark.index :]}"
    return config
