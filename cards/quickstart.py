"""How to serve a head, for its card."""

from __future__ import annotations

from dataclasses import dataclass

from ..engines.launch import ENGINES, HEAD, TARGET, serve_command
from .evidence import Evidence

TITLES = {"vllm": "vLLM", "trtllm": "TensorRT-LLM", "sglang": "SGLang"}
# What a conversion writes beside the weights for each engine.
FILES = {"vllm": "serve-vllm.sh", "trtllm": "serve-trtllm.yaml", "sglang": "serve-sglang.sh"}


@dataclass(frozen=True)
class Start:
    """How one engine is started.

    Attributes:
        engine: its title.
        command: for a shell; "" where it cannot be served there.
        config: the YAML that goes with it, "" where there is none.
        notes: what else to know.
    """

    engine: str
    command: str
    config: str
    notes: tuple[str, ...]


def starts(evidence: Evidence) -> tuple[Start, ...]:
    """Return how each engine that a head is for is started."""
    layout = evidence.manifest.layout if evidence.manifest else None
    engines = ENGINES.get(layout, (layout,)) if layout else tuple(evidence.facts.serve)
    return tuple(_start(engine, evidence) for engine in engines if engine in TITLES)


def _start(engine: str, evidence: Evidence) -> Start:
    facts = evidence.facts
    said = next((serve for name, serve in facts.serve.items() if name == engine), None)
    if said and said.unsupported:
        return Start(TITLES[engine], "", "", (said.unsupported,))
    config, notes = "", []
    if said and said.requires:
        notes.append(f"Requires {said.requires}.")
    written = evidence.folder / FILES[engine] if evidence.folder else None
    if written is not None and written.is_file():
        lines = written.read_text().splitlines()
        comments = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
        notes += [line for line in comments if not line.startswith(serve_command(engine).split()[0])]
        if engine == "trtllm":
            config = "\n".join(line for line in lines if not line.startswith("#"))
    elif engine == "trtllm":
        notes.append("Its YAML lists the captured layers, which are not stated.")
    command = _name(serve_command(engine), evidence)
    if said and said.arguments:
        place = facts.base_model or TARGET
        command = command.replace(place, " ".join((place, *said.arguments)), 1)
    return Start(TITLES[engine], command.replace(" --", " \\\n    --"), _name(config, evidence), tuple(notes))


def _name(text: str, evidence: Evidence) -> str:
    if evidence.facts.name:
        text = text.replace(HEAD, evidence.facts.name)
    return text.replace(TARGET, evidence.facts.base_model) if evidence.facts.base_model else text
