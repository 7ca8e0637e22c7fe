"""Captured layers, and which layers an engine captures for a config; each engine's own file says how it reads one."""

from __future__ import annotations

from collections.abc import Iterator

from ...checkpoint.schema import Json
from ...drafters.captured import default_outputs
from ...drafters.keys import CONVENTION, IDS, INPUTS, NESTED, TOP
from ...engines.checks import seen_by
from ...engines.common import as_outputs
from ...engines.registry import engines
from ...rule import Found, Rule
from .head import HeadSubject, listed_ids
from .subject import concerned

RUNNERS = {runner.name: runner for engine in engines() for runner in engine.runners}
READ_BY_CONFIG = tuple(name for name, runner in RUNNERS.items() if runner.aux_layers)


def other_readings(subject: HeadSubject) -> list[tuple[int, ...]]:
    """Return the layers, as outputs, that engines would capture for a config but the head was not trained on."""
    default = default_outputs(subject.target.layers) if subject.target else None
    seen = {seen_by(RUNNERS[engine], subject) or default for engine in READ_BY_CONFIG}
    return sorted(ids for ids in seen if ids and ids != subject.captured)


IN_VLLM = "https://github.com/vllm-project/vllm/pull/43671"


def _is_default(subject: HeadSubject) -> bool | None:
    """Return whether the captured layers are the engines' default; None if that depends on the target's depth."""
    captured, depth = subject.captured or (), subject.hints.target_layers
    if subject.target is not None:
        depth = subject.target.layers
    if depth is not None:
        return captured == default_outputs(depth)
    return None if captured and captured == default_outputs(captured[-1] + 4) else False


def _unlisted(subject: HeadSubject, is_default: bool | None) -> Iterator[Found]:
    if _is_default(subject) is not is_default:
        return
    read = subject.engines.intersection(READ_BY_CONFIG) if subject.captured is not None else ()
    without = {name for name in read if seen_by(RUNNERS[name], subject) is None}
    for engine in engines():
        if own := tuple(runner for runner in engine.runner_names if runner in without):
            name = engine.title if own == engine.runner_names else ", ".join(own)
            yield Found(
                "config.json: eagle_aux_hidden_state_layer_ids",
                f"{name} finds no list where it looks and uses its default; the head was trained on the outputs of"
                f" layers {list(subject.captured or ())}",
                engines=own,
            )


def lists(subject: HeadSubject) -> Iterator[tuple[str, Json]]:
    for where, value in ((TOP, subject.flat.get(TOP)), (NESTED, subject.eagle.get(IDS))):
        if value is not None and value != []:
            yield where, value


def captured_contradict(subject: HeadSubject) -> Iterator[Found]:
    top, nested = listed_ids(subject.flat.get(TOP)), listed_ids(subject.eagle.get(IDS))
    if top and nested and nested not in (top, as_outputs(top)):
        yield Found("config.json", f"{TOP} is {list(top)}, but in eagle_config it is {list(nested)}")


def captured_outside_target(subject: HeadSubject) -> Iterator[Found]:
    if subject.target is None:
        return
    layers = subject.target.layers
    for where, value in lists(subject):
        ids = listed_ids(value)
        # As an input, the number of layers means the output of the last one.
        as_inputs = where == TOP or subject.eagle.get(CONVENTION) == INPUTS
        if ids and max(ids) >= layers + as_inputs:
            yield Found(f"config.json: {where}", f"{list(ids)}, but the target has {layers} layers")


def captured_last_layer(subject: HeadSubject) -> Iterator[Found]:
    captured, target = subject.captured, subject.target
    if captured is None or target is None or captured[-1] != target.layers - 1:
        return
    for engine in engines():
        kind = engine.capture(target.model_type)
        asked = subject.engines.intersection(engine.runner_names)
        # Every class can capture from a list that begins with 1, if it has the layer.
        if asked and kind is not None and kind.listed((1, captured[-1]), target.layers) is None:
            yield Found(
                "config.json",
                f"the head reads the output of layer {captured[-1]}, the target's last, which {engine.title} never"
                f" captures for a {target.model_type}",
            )


def target_captures_nothing(subject: HeadSubject) -> Iterator[Found]:
    kind = subject.target.model_type if subject.target else ""
    for engine in engines():
        asked = subject.engines.intersection(engine.runner_names)
        if kind and asked and engine.captures and engine.capture(kind) is None:
            yield Found(
                "the target's config.json: model_type",
                f"kconv knows no class of {engine.title} for a {kind} that captures hidden states",
            )


def captured_count_unstated(subject: HeadSubject) -> Iterator[Found]:
    for engine, runner in RUNNERS.items():
        built = runner.aux_count(subject.flat, subject.is_mla) if runner.aux_count else None
        read = runner.aux_count is not None and engine in subject.engines
        if subject.spec and read and (built or 3) != len(subject.spec.captured):
            yield Found(
                "config.json: num_aux_hidden_states",
                f"{engine} builds fc for {built or 3} states, but the head has {len(subject.spec.captured)}",
                engines=(engine,),
            )


RULES: tuple[Rule[HeadSubject], ...] = (
    Rule(
        "K142",
        "captured-not-found",
        "error",
        "An engine finds no list of captured layers where it looks, and its default is wrong.",
        fix="Convert the head to the engine's layout, which puts the list where it is read.",
        engines=READ_BY_CONFIG,
        seen_in="https://github.com/vllm-project/vllm/pull/50170",
        check=lambda s: _unlisted(s, False),
    ),
    Rule(
        "K143",
        "captured-by-default",
        "warning",
        "An engine finds no list of captured layers where it looks. Only the target's depth shows whether its"
        " default is right.",
        fix="Convert the head, which puts the list where the engine reads it, or check the default with --target.",
        engines=READ_BY_CONFIG,
        seen_in="https://github.com/vllm-project/vllm/pull/50170",
        check=lambda s: _unlisted(s, None),
    ),
    Rule(
        "K145",
        "captured-no-list",
        "error",
        "The captured layers are not a list of distinct, ascending layer ids. Engines capture in ascending"
        " order whatever the list says, and fail on a duplicate.",
        fix="Correct the list. The columns of fc are in ascending order of the layers.",
        engines=READ_BY_CONFIG,
    ),
    Rule(
        "K146",
        "captured-contradict",
        "error",
        "The two lists of captured layers contradict each other. Engines differ in which they read.",
        fix="Find out which layers the head was trained on, and convert it with --captured.",
        engines=READ_BY_CONFIG,
        seen_in=IN_VLLM,
        check=captured_contradict,
    ),
    Rule(
        "K148",
        "captured-outside-target",
        "error",
        "The head reads a layer that the target does not have.",
        fix="Give the target that the head was trained on.",
        check=captured_outside_target,
    ),
    Rule(
        "K154",
        "captured-last-layer",
        "error",
        "An engine cannot capture the output of the target's last layer. This is so in SGLang (except for gpt-oss), "
        "and in vLLM for DeepSeek-V3.2 and GLM-5, which capture a layer's input.",
        fix="Serve this head with another engine.",
        engines=concerned("K154"),
        seen_in="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/deepseek_v2.py#L3193-L3194",
        check=captured_last_layer,
    ),
    Rule(
        "K156",
        "target-captures-nothing",
        "warning",
        "kconv knows no class of the engine that captures states from this target. Without one the engine"
        " serves no Eagle3 head.",
        fix="See docs/reference/support.md for the targets that kconv knows. For others vLLM has transformers' own"
        " class (--model-impl transformers).",
        seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py#L19",
        check=target_captures_nothing,
    ),
    Rule(
        "K149",
        "captured-count-contradicts",
        "error",
        "num_aux_hidden_states is not the number of captured layers.",
        fix="Correct the one that contradicts the width of fc.weight.",
        seen_in="https://github.com/vllm-project/vllm/issues/54526",
    ),
    Rule(
        "K150",
        "captured-count-unstated",
        "error",
        "An engine builds fc for another number of captured states. It cannot load the head's.",
        fix="Write num_aux_hidden_states, and the list in eagle_config too. kconv's conversions do.",
        engines=READ_BY_CONFIG,
        seen_in="https://github.com/vllm-project/vllm/pull/54598",
        check=captured_count_unstated,
    ),
    Rule(
        "K151",
        "captured-off",
        "error",
        "use_aux_hidden_state is false, but the head has fc. Some engines then skip fc.",
        fix="Remove the key, or set it to true.",
        versions="vLLM's V1 runner reads it, and its V2 runner from 0.33 on "
        "(https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py#L15-L22)",
        seen_in="https://github.com/sgl-project/sglang/pull/21272",
    ),
    Rule(
        "K152",
        "eagle-config-no-object",
        "error",
        "eagle_config is not an object, so no engine finds its keys.",
        fix="Export the head again.",
    ),
    Rule(
        "K155",
        "captured-against-marks",
        "warning",
        "Your --captured or --captured-are contradicts the head's own files. These are its trainer's marks, its "
        "tensor names, or the only convention that its list allows.",
        fix="Leave these options out, or measure both readings: give --target with --prompts or --states.",
    ),
)
