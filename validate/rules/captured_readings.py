"""Which layers an engine captures for a config.

https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/worker/gpu_model_runner.py#L5268-L5280 (V1: the top-level
list, else the one in eagle_config),
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py#L106 (V2: the
top-level list alone), https://github.com/sgl-project/sglang/pull/25454 (SGLang: the one in eagle_config). No launch
option of vLLM says otherwise: its --hf-overrides are the target's alone, where they are keys
(https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/config/speculative.py#L1084-L1107).
"""

from __future__ import annotations

from ...convert.captured import NESTED, TOP, default_outputs
from ...engines.sglang import DEEPSEEKS
from .head import EAGLE, HeadSubject, listed_ids
from .rule import SGLANG, VLLM, VLLM_V1, VLLM_V2

IDS = NESTED.removeprefix(f"{EAGLE}.")
READ_BY_CONFIG = (*VLLM, SGLANG)


def as_outputs(inputs: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return layers that are counted by their inputs as outputs."""
    return tuple(i - 1 for i in inputs) if inputs else None


def seen_by(engine: str, subject: HeadSubject) -> tuple[int, ...] | None:
    """Return the layers that an engine would capture for a config, as outputs; None where it takes its default."""
    top, nested = listed_ids(subject.flat.get(TOP)), listed_ids(subject.eagle.get(IDS))
    if engine == VLLM_V1:
        return as_outputs(top or nested)
    if engine == VLLM_V2:
        return as_outputs(top or listed_ids(subject.eagle.get("layer_ids")))
    if engine == SGLANG and nested:
        # DeepSeek's class, which a Kimi target has, takes a list that begins with 1 for outputs; others take each so.
        outputs = nested[0] == 1 or not has_deepseeks_class(subject)
        return nested if outputs else as_outputs(nested)
    return None


def has_deepseeks_class(subject: HeadSubject) -> bool:
    """Say whether SGLang runs the target by DeepSeek's class; taken to be so where the target is not known."""
    return subject.target is None or subject.target.model_type in DEEPSEEKS


def other_readings(subject: HeadSubject) -> list[tuple[int, ...]]:
    """Return the layers, as outputs, that engines would capture for a config and the head was not trained on."""
    default = default_outputs(subject.target.layers) if subject.target else None
    seen = {seen_by(engine, subject) or default for engine in READ_BY_CONFIG}
    return sorted(ids for ids in seen if ids and ids != subject.captured)
