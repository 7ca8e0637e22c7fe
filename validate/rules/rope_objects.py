"""RoPE's two objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...convert.rope_keys import read_rope
from ...errors import KconvError
from ...head.spec import Rope
from .head import HeadSubject
from .rule import ENGINES, TRTLLM, Found, rule

PLACES = ("rope_scaling", "rope_parameters")
# Of two objects an engine takes one, whole; the keys of the other are not looked at. The classes of transformers 5, by
# which vLLM and SGLang read a head, take rope_scaling:
# https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/modeling_rope_utils.py#L754
# TensorRT-LLM reads rope_scaling as well, which its own class for kimi_k2 overwrites by rope_parameters where
# transformers is of version 5, as the two are then one attribute:
# https://github.com/NVIDIA/TensorRT-LLM/blob/b386a7fff981548964f58eb5f7e2a8e015c661bb/tensorrt_llm/_torch/attention/backends/interface.py#L714-L716
# https://github.com/NVIDIA/TensorRT-LLM/blob/65b31db1b401d3752b8ebe7c29093cbfb6af04b7/tensorrt_llm/_torch/configs/deepseek_v3.py#L92-L103
# https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/configuration_utils.py#L584-L590
TAKEN_BY: Mapping[str, tuple[str, ...]] = {"rope_scaling": ENGINES, "rope_parameters": (TRTLLM,)}


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
