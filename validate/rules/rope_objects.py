"""RoPE's two objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...convert.rope_keys import read_rope
from ...errors import KconvError
from ...head.spec import Rope
from .head import HeadSubject
from .rule import ENGINES, Found, readers, rule

PLACES = ("rope_scaling", "rope_parameters")
# Of two objects an engine takes one, whole; the keys of the other are not looked at. The classes of transformers 5, by
# which vLLM and SGLang read a head, take rope_scaling:
# https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/modeling_rope_utils.py#L754
TAKEN_BY: Mapping[str, tuple[str, ...]] = readers(lambda engine: engine.rope_objects)


@rule(
    "K159",
    "rope-in-parts",
    "error",
    "RoPE stands in rope_scaling and in rope_parameters, and one of them lacks what the other states: engines read one"
    " of the two, and fail or take a default for the rest.",
    fix="State each parameter in both, as kconv's conversions do, or remove the one that is in part.",
    engines=ENGINES,
    seen_in="https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/modeling_rope_utils.py#L754",
)
def rope_in_parts(subject: HeadSubject) -> Iterator[Found]:
    if subject.layout is None or not all(subject.flat.get(place) for place in PLACES):
        return
    try:
        whole = read_rope(subject.flat)
    except KconvError:
        return
    for place, engines in TAKEN_BY.items():
        taken_by = ", ".join(sorted(subject.engines.intersection(engines)))
        alone = {key: value for key, value in subject.flat.items() if key == place or key not in PLACES}
        lost = _lost(alone, whole) if taken_by else ""
        if lost:
            yield Found(f"config.json: {place}", f"{taken_by} may take it alone: {lost}")


def _lost(alone: Mapping[str, Any], whole: Rope) -> str:
    """Say how a config that states RoPE in one object differs from the RoPE of both; nothing where it does not."""
    try:
        read = read_rope(alone)
    except KconvError as fault:
        return fault.what
    return "" if read == whole else f"{read}, where both together state {whole}"


RULES = (rope_in_parts,)
