"""RoPE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...drafters.facts import THETA_LOST
from ...drafters.rope_keys import PLACES, read_rope, stated_places
from ...drafters.spec import Gqa, HeadSpec, Rope, Yarn
from ...engines.base import UNSTATED_POSITIONS, rows_as_stated, unlimited
from ...engines.registry import engines
from ...errors import KconvError
from ...rule import Found, Rule
from .head import HeadSubject
from .subject import ENGINES, concerned, readers

LOST = "https://github.com/vllm-project/speculators/pull/574"
# What ModelOpt's exporter claims by default for a head that was trained without scaling:
# https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/speculative/config.py
INJECTED = (32.0, 2048)


def rope_one_spelling(subject: HeadSubject) -> Iterator[Found]:
    theta = stated_places(subject.flat).get("rope_theta", {})
    if theta and "rope_theta" not in theta:
        yield Found("config.json: rope_theta", f"rope_theta is only in {', '.join(theta)}")
    # For the engines of K158, that is an error.
    warned = tuple(name for name in concerned("K163") if name in subject.engines and name not in concerned("K158"))
    if warned:
        yield from (replace(found, engines=warned) for found in scaling_one_spelling(subject))


def scaling_one_spelling(subject: HeadSubject) -> Iterator[Found]:
    kind = stated_places(subject.flat).get("rope_type", {})
    if not subject.flat.get("rope_scaling") and any(value != "default" for value in kind.values()):
        yield Found("config.json: rope_scaling", f"{next(iter(kind.values()))} is only in {', '.join(kind)}")


def rope_injected(subject: HeadSubject) -> Iterator[Found]:
    spec = subject.spec
    scaling = spec.rope.scaling if spec and isinstance(spec.attention, Gqa) else None
    if isinstance(scaling, Yarn) and (scaling.factor, scaling.original_max_positions) == INJECTED:
        yield Found("config.json: rope_scaling", "YaRN of factor 32 over 2048 positions, ModelOpt's own default")


def rope_not_the_targets(subject: HeadSubject) -> Iterator[Found]:
    if subject.spec is None or subject.target is None:
        return
    try:
        theirs = read_rope(subject.target.rope)
    except KconvError:
        return
    own = subject.spec.rope
    if theirs != own:
        message, severity = f"the head has {own}; the target has {theirs}", None
        # Trainers build MLA heads from the target's config; what lacks its scaling most likely lost it.
        lost = subject.is_mla and "kv_lora_rank" in subject.target.text and theirs.scaling and not own.scaling
        # One that kconv converted to MLA has the RoPE that was fitted.
        if lost and not (subject.manifest and subject.manifest.conversion):
            message, severity = f"{message}, as MLA heads of such targets do", "warning"
        yield Found("config.json", message, severity=severity)


# Engines whose RoPE table is as long as max_position_embeddings.
AS_STATED = tuple(name for engine in engines() if engine.rope_rows is rows_as_stated for name in engine.runner_names)
RUNNERS = tuple(runner for engine in engines() for runner in engine.runners)
DRAFTS_TO = tuple(runner.name for runner in RUNNERS if runner.drafts_to is not unlimited)
SERVES_TO = tuple(runner.name for runner in RUNNERS if runner.serves_to is not unlimited)


def _served(subject: HeadSubject) -> tuple[HeadSpec | None, int | None]:
    """Return the head as engines read its max_position_embeddings, and the context to serve, if known.

    --max-positions is the user's context, not what the file states.
    """
    if (spec := subject.spec) is None:
        return None, None
    stated = subject.flat.get("max_position_embeddings")
    if stated is None:
        stated = UNSTATED_POSITIONS[type(spec.attention)]
    elif not isinstance(stated, int):
        stated = spec.max_positions
    context = subject.hints.max_positions or (subject.target.max_positions if subject.target else None)
    return replace(spec, max_positions=stated), context


def _longer(spec: HeadSpec, context: int, limit: float) -> str:
    """Return how to serve a context that is longer than a limit that follows from a head's config."""
    within, less = spec.rope.within(context), f"serve no longer context than {limit}"
    if within > limit:
        return f"Convert the head with --max-positions {within} (e.g. kconv to-vllm), or {less}."
    return f"{less.capitalize()}, or use another head if you need it."


def positions_short(subject: HeadSubject) -> Iterator[Found]:
    spec, context = _served(subject)
    if spec is None or context is None:
        return
    stated = spec.max_positions
    if subject.engines.intersection(AS_STATED) and stated < context:
        said = f"{stated} positions, but the context is {context}"
        yield Found("config.json: max_position_embeddings", said, _longer(spec, context, stated), AS_STATED)
    for engine, runner in ((one, runner) for one in engines() for runner in one.runners):
        if runner.name in subject.engines and (limit := runner.serves_to(spec)) < context:
            past = "0.32 reads past its table, and " if engine.rope_rows(spec) < context else ""
            said = f"{limit} positions with YaRN, but the context is {context}: {past}from 0.33 on the server accepts"
            fix = _longer(spec, context, limit)
            yield Found("config.json: rope_scaling", f"{said} no longer prompts", fix, (runner.name,))


def positions_undrafted(subject: HeadSubject) -> Iterator[Found]:
    spec, context = _served(subject)
    if spec is None or context is None:
        return
    for runner in RUNNERS:
        if runner.name in subject.engines and (limit := runner.drafts_to(spec)) < context:
            yield Found(
                "config.json: max_position_embeddings",
                f"{runner.name} drafts only while every sequence of the batch, drafts included, has at most"
                f" {limit} tokens; the context is {context}",
                _longer(spec, context, limit),
                (runner.name,),
            )


def positions_below_yarn(subject: HeadSubject) -> Iterator[Found]:
    spec, context = _served(subject)
    scaling = spec.rope.scaling if spec else None
    # With a context, K215 and K167 are more precise.
    if spec and context is None and isinstance(scaling, Yarn) and 2 * spec.max_positions <= scaling.reach:
        yield Found(
            "config.json: max_position_embeddings",
            f"{spec.max_positions} positions, but the head's own YaRN reaches {scaling.reach}",
        )


# An engine reads only one of two objects and ignores the keys of the other. The config classes of transformers 5, with
# which vLLM and SGLang read a head, read rope_scaling:
# https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/modeling_rope_utils.py#L754
TAKEN_BY: Mapping[str, tuple[str, ...]] = readers(lambda engine: engine.rope_objects)


def rope_in_parts(subject: HeadSubject) -> Iterator[Found]:
    if subject.layout is None or not all(subject.flat.get(place) for place in PLACES):
        return
    try:
        whole = read_rope(subject.flat)
    except KconvError:
        return
    for place, read_by in TAKEN_BY.items():
        taken_by = ", ".join(sorted(subject.engines.intersection(read_by)))
        alone = {key: value for key, value in subject.flat.items() if key == place or key not in PLACES}
        lost = _lost(alone, whole) if taken_by else ""
        if lost:
            yield Found(f"config.json: {place}", f"{taken_by} may read only this: {lost}")


def _lost(alone: Mapping[str, Any], whole: Rope) -> str:
    """Return how a config with only one of its RoPE objects differs from both; nothing if it does not."""
    try:
        read = read_rope(alone)
    except KconvError as fault:
        return fault.what
    return "" if read == whole else f"{read}, but both together state {whole}"


RULES: tuple[Rule[HeadSubject], ...] = (
    Rule(
        "K160",
        "rope-contradiction",
        "error",
        "The config states a RoPE parameter twice with different values. Engines differ in which they read.",
        fix="Keep the value that the head was trained with, and remove the other.",
        seen_in="https://github.com/wejoncy/sfllm/pull/32",
    ),
    Rule(
        "K161",
        "rope-invalid",
        "error",
        "An engine refuses this RoPE, or fills it with defaults. Its kind is unknown or lacks its factor, or a "
        "parameter is not a number.",
        fix="State the kind and every parameter that the head was trained with.",
        seen_in="https://github.com/vllm-project/vllm/pull/51092",
        says_fix=True,
    ),
    THETA_LOST,
    Rule(
        "K163",
        "rope-one-spelling",
        "warning",
        "RoPE is written only as transformers 5 does. Releases built for transformers 4 look for the"
        " top-level rope_theta and use 10000, and look for rope_scaling and use none.",
        fix="Convert the head with kconv, which writes both spellings, or write the keys of rope_parameters twice.",
        engines=concerned("K163"),
        seen_in=LOST,
        check=rope_one_spelling,
    ),
    Rule(
        "K158",
        "rope-scaling-lost",
        "error",
        "RoPE's scaling is only in rope_parameters. TensorRT-LLM up to 1.3.0rc14 looks for rope_scaling and uses"
        " none, without a message.",
        fix="Convert the head with kconv, which writes both, or copy rope_parameters to rope_scaling.",
        engines=concerned("K158"),
        # These releases pin transformers 4.57, whose configs keep the two apart. 1.3.0rc15 pins 5.5.3, in which they
        # are one attribute (https://github.com/NVIDIA/TensorRT-LLM/pull/13994). Newer code also falls back to
        # rope_parameters itself (RopeParams.from_config, lines 714 to 716 of engines.trtllm's `ROPE`).
        seen_in="https://github.com/ai-dynamo/dynamo/pull/10025",
        check=scaling_one_spelling,
        versions="TensorRT-LLM before 1.3.0rc15",
    ),
    Rule(
        "K164",
        "rope-injected",
        "warning",
        "ModelOpt's exporter wrote a YaRN that the head was not trained with. Its default is factor 32 over 2,048 "
        "positions. Engines then serve a different RoPE.",
        fix="If the head was trained with default RoPE, remove rope_scaling. The head may then read no further"
        " than it was trained.",
        seen_in="https://github.com/NVIDIA/Model-Optimizer/pull/917",
        check=rope_injected,
    ),
    Rule(
        "K165",
        "rope-not-the-targets",
        "note",
        "The head's RoPE differs from the target's. That is right if it was trained so.",
        fix="Compare with the training config.",
        seen_in="https://github.com/vllm-project/speculators/pull/574",
        check=rope_not_the_targets,
        also=("warning",),
    ),
    Rule(
        "K167",
        "positions-short",
        "warning",
        "The head's table of angles is shorter than its target's context. TensorRT-LLM reads past its end, and SGLang"
        " does not start. With YaRN, vLLM's V2 runner reads past it too in vLLM 0.32; from vLLM 0.33 on, it lowers"
        " max_model_len to the head's and says so only in its log.",
        fix="Serve no longer context than the head's, or raise max_position_embeddings to what its RoPE was trained"
        " for.",
        seen_in="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/configs/model_config.py#L1295-L1316",
        check=positions_short,
        versions="vLLM 0.32 and 0.33 differ "
        "(https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/config/vllm.py#L3025-L3051)",
    ),
    Rule(
        "K215",
        "positions-undrafted",
        "warning",
        "The head's max_position_embeddings are fewer than its target's context. vLLM's V1 runner drafts nothing while"
        " any sequence of the batch is longer: it serves one token per step and logs nothing.",
        fix="Convert the head with --max-positions, or serve no longer context than the head's.",
        engines=DRAFTS_TO,
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/worker/gpu_model_runner.py#L4288-L4301",
        check=positions_undrafted,
    ),
    Rule(
        "K157",
        "positions-below-yarn",
        "warning",
        "The config states at most half of the positions of the head's own YaRN. Beyond them TensorRT-LLM"
        " reads past the end of its table of angles, SGLang does not start, vLLM's V1 runner drafts nothing, and from"
        " 0.33 on its V2 runner lowers max_model_len.",
        fix="State the longest context that you will serve (kconv's conversions take --max-positions), or give"
        " --target.",
        engines=tuple(name for name in ENGINES if name in (*AS_STATED, *DRAFTS_TO, *SERVES_TO)),
        seen_in="https://github.com/vllm-project/vllm/issues/48894",
        check=positions_below_yarn,
    ),
    Rule(
        "K168",
        "rope-half-split",
        "error",
        "rope_interleave is false: the rotary dims of an MLA head are half-split. vLLM and TensorRT-LLM"
        " rotate neighboring pairs whatever it says.",
        fix="Reorder the rotary rows of q_b_proj and kv_a_proj_with_mqa into pairs, as in DeepSeek, and remove"
        " the key.",
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_v2.py#L1126",
    ),
    Rule(
        "K159",
        "rope-in-parts",
        "error",
        "RoPE is in rope_scaling and in rope_parameters, and one of them is incomplete. Engines read only one"
        " of the two, and fail or use defaults for the rest.",
        fix="State every parameter in both, as kconv's conversions do, or remove the incomplete one.",
        engines=ENGINES,
        seen_in="https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/modeling_rope_utils.py#L754",
        check=rope_in_parts,
    ),
)
