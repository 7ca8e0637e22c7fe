"""Which layers an engine captures for a config; how each reads one stands in its own file in engines/."""

from __future__ import annotations

from ...convert.captured import default_outputs
from ...engines.common import as_outputs as as_outputs
from ...engines.keys import IDS as IDS
from ...engines.registry import engines
from ...engines.sglang import DEEPSEEKS
from .head import HeadSubject

RUNNERS = {runner.name: runner for engine in engines() for runner in engine.runners}
READ_BY_CONFIG = tuple(name for name, runner in RUNNERS.items() if runner.aux_layers)


def seen_by(engine: str, subject: HeadSubject) -> tuple[int, ...] | None:
    """Return the layers that an engine would capture for a config, as outputs; None where it takes its default."""
    reads = RUNNERS[engine].aux_layers
    return reads(subject.flat, subject.target.model_type if subject.target else None) if reads else None


def has_deepseeks_class(subject: HeadSubject) -> bool:
    """Say whether SGLang runs the target by DeepSeek's class; taken to be so where the target is not known."""
    return subject.target is None or subject.target.model_type in DEEPSEEKS


def other_readings(subject: HeadSubject) -> list[tuple[int, ...]]:
    """Return the layers, as outputs, that engines would capture for a config and the head was not trained on."""
    default = default_outputs(subject.target.layers) if subject.target else None
    seen = {seen_by(engine, subject) or default for engine in READ_BY_CONFIG}
    return sorted(ids for ids in seen if ids and ids != subject.captured)
