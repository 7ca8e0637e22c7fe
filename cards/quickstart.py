"""How to serve a head, for its card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..checkpoint.schema import read_text
from ..engines.base import HEAD, TARGET, Launch
from ..engines.registry import engine, engines_of
from ..errors import KconvError
from ..escape import shell, yaml
from .evidence import Evidence


@dataclass(frozen=True)
class Start:
    """How to start one engine.

    Attributes:
        engine: its title.
        command: for a shell; "" if the head cannot be served there.
        config: the YAML that goes with it, "" if there is none.
        file: the command's name for that YAML.
        notes: anything else to know.
    """

    engine: str
    command: str
    config: str
    file: str
    notes: tuple[str, ...]


def starts(evidence: Evidence) -> tuple[Start, ...]:
    """Return how to start each engine that a head is for."""
    named = engines_of(evidence.manifest.layout) if evidence.manifest else map(engine, evidence.facts.serve)
    return tuple(_start(one.name, one.title, one.launch, evidence) for one in named if one.launch)


def _start(name: str, title: str, launch: Launch, evidence: Evidence) -> Start:
    facts = evidence.facts
    said = facts.serve.get(name)
    if said and said.unsupported:
        return Start(title, "", "", "", (said.unsupported,))
    config, notes = "", []
    if said and said.requires:
        notes.append(f"Requires {said.requires}.")
    # The file that a conversion writes next to the weights.
    written = evidence.folder / launch.file if evidence.folder else None
    if written is not None and written.is_file():
        lines = read_text(written, KconvError, fix="Convert the head again.").splitlines()
        comments = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
        notes += [line for line in comments if not line.startswith(launch.command.split()[0])]
        if launch.is_config:
            config = "\n".join(line for line in lines if not line.startswith("#"))
    elif said and said.config:
        config = said.config
    elif launch.unwritten:
        notes.append(launch.unwritten)
    if said and said.note:
        notes.append(said.note)
    target = (said.target if said else None) or facts.base_model
    place = shell(" ".join(target.split())) if target else TARGET
    # The owner's own words, as they would type them.
    command = launch.command.replace(TARGET, " ".join((place, *(said.arguments if said else ()))), 1)
    command = _named(command, facts.name, shell).replace(" --", " \\\n    --")
    config = _named(config, facts.name, yaml)
    if target:
        config = config.replace(TARGET, yaml(" ".join(target.split())))
    return Start(title, command, config, launch.file, tuple(notes))


def _named(text: str, name: str | None, quote: Callable[[str], str]) -> str:
    return text.replace(HEAD, quote(" ".join(name.split()))) if name else text
