"""Limits of an engine's layout, as rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...checkpoint.header import FLOAT_DTYPES
from ...engines.layout import Limit
from ...engines.registry import engines, own_layouts
from ...rule import Found, Rule
from .head import HeadSubject

OWN = {engine: own_layouts(engine) for engine in engines()}
LIMITS = tuple(dict.fromkeys(limit for own in OWN.values() for layout in own for limit in layout.limits))


def _rule(limit: Limit) -> Rule[HeadSubject]:
    of = {engine: [layout for layout in own if limit in layout.limits] for engine, own in OWN.items()}
    concerned = tuple(name for engine, found in of.items() if found for name in engine.runner_names)
    families = tuple(dict.fromkeys(layout.drafter.name for found in of.values() for layout in found))

    def check(subject: HeadSubject) -> Iterator[Found]:
        if subject.spec is None:
            return
        # Engines cast the weights to the dtype that the config states; transformers 5 reads `dtype` first.
        stated = str(subject.flat.get("dtype") or subject.flat.get("torch_dtype")).removeprefix("torch.")
        spec = replace(subject.spec, dtype=FLOAT_DTYPES.get(stated, subject.spec.dtype))
        if limit.applies(spec, subject.slots):
            yield Found("config.json", limit.what)

    return Rule(
        limit.id, limit.name, "error", f"{limit.what}.", limit.fix, check, concerned, limit.source, drafters=families
    )


RULES = tuple(map(_rule, LIMITS))
