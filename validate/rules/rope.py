"""RoPE."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from ...convert.rope_keys import read_rope
from ...engines import vllm
from ...engines.base import rows_as_stated
from ...engines.registry import engines
from ...errors import KconvError
from ...head.spec import Gqa, Yarn
from .head import HeadSubject
from .rule import SGLANG, TRTLLM, VLLM, Found, rule

LOST = "https://github.com/vllm-project/speculators/pull/574"
PLACES = ("rope_scaling", "rope_parameters")
# What ModelOpt's exporter claims by default of a head that was trained without scaling:
# https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/config.py
INJECTED = (32.0, 2048)


def _stated(subject: HeadSubject) -> Mapping[str, dict[str, Any]]:
    """Return each parameter's values by the places where they stand."""
    stated: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for place in PLACES:
        value = subject.flat.get(place)
        for name, one in value.items() if isinstance(value, Mapping) else ():
            # DeepSeek's code reads `type`, transformers `rope_type`; deepseek_yarn is yarn.
            key = "rope_type" if name == "type" else name
            if one is not None:
                stated[key][f"{place}.{name}"] = "yarn" if one == "deepseek_yarn" else one
    for name in ("rope_theta", "partial_rotary_factor"):
        if subject.flat.get(name) is not None:
            stated[name][name] = subject.flat[name]
    return stated


def _contradictions(subject: HeadSubject) -> Iterator[str]:
    for places in _stated(subject).values():
        values = list(places.values())
        if any(value != values[0] for value in values):
            yield ", ".join(f"{place} is {value!r}" for place, value in places.items())


@rule(
    "K160",
    "rope-contradiction",
    "error",
    "The config states one of RoPE's parameters twice and differently, and engines read one place each.",
    fix="Leave the value that the head was trained with.",
    seen_in="https://github.com/wejoncy/sfllm/pull/32",
)
def rope_contradiction(subject: HeadSubject) -> Iterator[Found]:
    for what in _contradictions(subject):
        yield Found("config.json", what)


@rule(
    "K161",
    "rope-invalid",
    "error",
    "RoPE is stated in a way that an engine refuses, or reads with a default of its own: a kind without its factor,"
    " a parameter that is no number, a kind that no engine has.",
    fix="State the kind and every parameter that the head was trained with.",
    seen_in="https://github.com/vllm-project/vllm/pull/51092",
)
def rope_invalid(subject: HeadSubject) -> Iterator[Found]:
    if subject.layout is None or any(_contradictions(subject)):
        return
    try:
        read_rope(subject.flat)
    except KconvError as fault:
        yield Found(fault.where or "config.json", fault.what, fault.fix)


@rule(
    "K162",
    "rope-theta-lost",
    "warning",
    "The config states no rope_theta, and engines take 10000; a Kimi-K2 target has 50000.",
    fix="State the rope_theta that the head was trained with, at the top level and in rope_parameters.",
    seen_in="https://github.com/sgl-project/SpecForge/issues/265",
)
def rope_theta_lost(subject: HeadSubject) -> Iterator[Found]:
    if subject.layout is not None and "rope_theta" not in _stated(subject):
        yield Found("config.json: rope_theta", "rope_theta stands nowhere in the config")


@rule(
    "K163",
    "rope-one-spelling",
    "warning",
    "RoPE is stated as transformers 5 does alone: releases that were built for transformers 4 look for the top-level"
    " rope_theta, and take 10000, and for rope_scaling, and take none.",
    fix="Convert the head with kconv, which writes both spellings, or write the keys of rope_parameters twice.",
    engines=(SGLANG, TRTLLM),
    seen_in=LOST,
)
def rope_one_spelling(subject: HeadSubject) -> Iterator[Found]:
    stated = _stated(subject)
    theta, kind = stated.get("rope_theta", {}), stated.get("rope_type", {})
    if theta and "rope_theta" not in theta:
        yield Found("config.json: rope_theta", f"rope_theta stands in {', '.join(theta)} only")
    if not subject.flat.get("rope_scaling") and any(value != "default" for value in kind.values()):
        yield Found("config.json: rope_scaling", f"{next(iter(kind.values()))} stands in {', '.join(kind)} only")


@rule(
    "K164",
    "rope-injected",
    "warning",
    "ModelOpt's exporter claims YaRN of factor 32 over 2,048 positions, by default, of a head that was trained without"
    " any; engines then serve another RoPE than the trained one.",
    fix="If the head was trained with default RoPE, remove rope_scaling; it may then read no further than it was"
    " trained.",
    seen_in="https://github.com/NVIDIA/Model-Optimizer/pull/917",
)
def rope_injected(subject: HeadSubject) -> Iterator[Found]:
    spec = subject.spec
    scaling = spec.rope.scaling if spec and isinstance(spec.attention, Gqa) else None
    if isinstance(scaling, Yarn) and (scaling.factor, scaling.original_max_positions) == INJECTED:
        yield Found("config.json: rope_scaling", "YaRN of factor 32 over 2048 positions, ModelOpt's own default")


@rule(
    "K165",
    "rope-not-the-targets",
    "info",
    "The head turns its queries by another RoPE than its target; that is right if it was trained so.",
    fix="Compare with the training config.",
    seen_in="https://github.com/vllm-project/speculators/pull/574",
)
def rope_not_the_targets(subject: HeadSubject) -> Iterator[Found]:
    if subject.spec is None or subject.target is None:
        return
    try:
        theirs = read_rope(subject.target.rope)
    except KconvError:
        return
    if theirs != subject.spec.rope:
        yield Found("config.json", f"the head has {subject.spec.rope}, the target {theirs}")


@rule(
    "K166",
    "positions-unstated",
    "error",
    "The config states no max_position_embeddings: TensorRT-LLM takes its class's default for an MLA head, 4,096, and"
    " reads its table of angles past the end.",
    fix="State the longest context that will be served; kconv's conversions take it with --max-positions.",
    engines=(TRTLLM,),
    seen_in="https://github.com/sgl-project/sglang/issues/10787",
)
def positions_unstated(subject: HeadSubject) -> Iterator[Found]:
    if subject.layout is not None and subject.flat.get("max_position_embeddings") is None:
        yield Found("config.json: max_position_embeddings", "the key is absent")


_rows_in_vllm = vllm.ENGINE.rope_rows
# Engines whose table of angles is as long as max_position_embeddings says.
AS_STATED = tuple(name for engine in engines() if engine.rope_rows is rows_as_stated for name in engine.runner_names)


@rule(
    "K167",
    "positions-short",
    "warning",
    "The head's table of angles is shorter than its target's context: TensorRT-LLM reads past its end, as vLLM does"
    " past the end of YaRN's, and SGLang does not start.",
    fix="Serve no more than that, or raise max_position_embeddings to what the head's RoPE was trained for.",
    seen_in="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/configs/model_config.py#L1295-L1316",
)
def positions_short(subject: HeadSubject) -> Iterator[Found]:
    spec, target = subject.spec, subject.target
    if spec is None or target is None:
        return
    if subject.engines.intersection(AS_STATED) and spec.max_positions < target.max_positions:
        yield Found(
            "config.json: max_position_embeddings",
            f"{spec.max_positions} positions, and the target has {target.max_positions}",
        )
    if subject.engines.intersection(VLLM) and _rows_in_vllm(spec) < target.max_positions:
        yield Found(
            "config.json: rope_scaling",
            f"YaRN reaches {_rows_in_vllm(spec)} positions, and the target has {target.max_positions}",
            "Serve no more than that (vllm serve --max-model-len).",
        )


@rule(
    "K169",
    "positions-past-yarn",
    "error",
    "The config states more positions than YaRN reaches, factor x original_max_position_embeddings: vLLM's table of"
    " angles ends there all the same, and the positions beyond are read past its end.",
    fix="State as many as YaRN reaches (--max-positions of kconv's conversions) and serve no more; where the head was"
    " trained without scaling, remove rope_scaling.",
    engines=VLLM,
    seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/rotary_embedding/"
    "yarn_scaling_rope.py#L78-L80",
)
def positions_past_yarn(subject: HeadSubject) -> Iterator[Found]:
    spec = subject.spec
    if spec and spec.max_positions > _rows_in_vllm(spec):
        yield Found(
            "config.json: max_position_embeddings",
            f"{spec.max_positions} positions, and YaRN reaches {_rows_in_vllm(spec)}",
        )


@rule(
    "K168",
    "rope-half-split",
    "error",
    "The config says that an MLA head's rotary dims are half-split (rope_interleave is false); vLLM and TensorRT-LLM"
    " turn neighbouring pairs whatever it says.",
    fix="Re-order the rotary rows of q_b_proj and kv_a_proj_with_mqa to pairs, as DeepSeek's, and remove the key.",
    seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_v2.py#L1126",
)
def rope_half_split(subject: HeadSubject) -> Iterator[Found]:
    if subject.is_mla and subject.flat.get("rope_interleave") is False:
        yield Found("config.json: rope_interleave", "false, of an MLA head")


RULES = (
    rope_contradiction,
    rope_invalid,
    rope_theta_lost,
    rope_one_spelling,
    rope_injected,
    rope_not_the_targets,
    positions_unstated,
    positions_short,
    positions_past_yarn,
    rope_half_split,
)
