"""Captured layers."""

from __future__ import annotations

from collections.abc import Iterator

from ...convert.captured import CONVENTION, INPUTS, NESTED, TOP, default_outputs
from .captured_readings import IDS, READ_BY_CONFIG, as_outputs, has_deepseeks_class, seen_by
from .head import HeadSubject, listed_ids
from .rule import SGLANG, TRTLLM, VLLM, Found, rule

IN_VLLM = "https://github.com/vllm-project/vllm/pull/43671"


def _readers(subject: HeadSubject, engines: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    for engine in engines:
        if engine in subject.engines and subject.captured is not None:
            yield engine, seen_by(engine, subject)


def _otherwise(subject: HeadSubject, engines: tuple[str, ...]) -> Iterator[Found]:
    for engine, seen in _readers(subject, engines):
        if seen is not None and seen != subject.captured:
            where = TOP if listed_ids(subject.flat.get(TOP)) and engine in VLLM else NESTED
            yield Found(
                f"config.json: {where}",
                f"the head was trained on the outputs of layers {list(subject.captured or ())}, and {engine} would"
                f" feed it those of {list(seen)}",
            )


@rule(
    "K140",
    "captured-untranslated",
    "error",
    "vLLM counts layer inputs, and a list of layer outputs makes it capture each state one layer too early.",
    fix="Convert the head (kconv to-vllm), which writes the list in vLLM's convention.",
    engines=VLLM,
    seen_in=IN_VLLM,
)
def captured_untranslated(subject: HeadSubject) -> Iterator[Found]:
    yield from _otherwise(subject, VLLM)


@rule(
    "K141",
    "captured-misread",
    "error",
    "SGLang takes the list in eagle_config for layer outputs if it begins with 1 or the target is no DeepSeek or Kimi,"
    " and for layer inputs if not.",
    fix="Convert the head (kconv to-sglang), which writes the list as SGLang reads it for a DeepSeek or Kimi-K2 target;"
    " for any other, write the outputs.",
    engines=(SGLANG,),
    seen_in="https://github.com/sgl-project/sglang/pull/25454",
)
def captured_misread(subject: HeadSubject) -> Iterator[Found]:
    yield from _otherwise(subject, (SGLANG,))


def _is_default(subject: HeadSubject) -> bool | None:
    """Say whether the captured layers are the engines' default; None where the target's depth would have to tell."""
    captured = subject.captured or ()
    if subject.target is not None:
        return captured == default_outputs(subject.target.layers)
    return None if captured and captured == default_outputs(captured[-1] + 4) else False


def _unlisted(subject: HeadSubject, is_default: bool | None) -> Iterator[Found]:
    for engine, seen in _readers(subject, READ_BY_CONFIG):
        if seen is None and _is_default(subject) is is_default:
            yield Found(
                "config.json: eagle_aux_hidden_state_layer_ids",
                f"{engine} finds no list where it looks and takes its default; the head was trained on the outputs of"
                f" layers {list(subject.captured or ())}",
            )


@rule(
    "K142",
    "captured-not-found",
    "error",
    "An engine finds no list of captured layers where it looks, and its default is not what the head was trained on.",
    fix="Convert the head to the engine's layout, which puts the list where it is read.",
    engines=READ_BY_CONFIG,
    seen_in="https://github.com/vllm-project/vllm/pull/50170",
)
def captured_not_found(subject: HeadSubject) -> Iterator[Found]:
    yield from _unlisted(subject, False)


@rule(
    "K143",
    "captured-by-default",
    "warning",
    "An engine finds no list of captured layers where it looks; whether its default is the head's own list only the"
    " target's depth tells.",
    fix="Give --target to have it decided, or convert the head, which puts the list where the engine reads it.",
    engines=READ_BY_CONFIG,
    seen_in="https://github.com/vllm-project/vllm/pull/50170",
)
def captured_by_default(subject: HeadSubject) -> Iterator[Found]:
    yield from _unlisted(subject, None)


@rule(
    "K144",
    "captured-by-flag",
    "info",
    "TensorRT-LLM reads no list of captured layers from the head; its serving YAML must have it.",
    fix="Serve with eagle3_layers_to_capture in speculative_config; kconv to-trtllm writes such a file.",
    engines=(TRTLLM,),
    seen_in="https://github.com/NVIDIA/TensorRT-LLM/issues/15182",
)
def captured_by_flag(subject: HeadSubject) -> Iterator[Found]:
    if subject.captured is not None:
        yield Found("config.json", f"serve with eagle3_layers_to_capture: {list(subject.captured)}")


def lists(subject: HeadSubject) -> Iterator[tuple[str, object]]:
    for where, value in ((TOP, subject.flat.get(TOP)), (NESTED, subject.eagle.get(IDS))):
        if value is not None and value != []:
            yield where, value


@rule(
    "K145",
    "captured-no-list",
    "error",
    "The list of captured layers is none of distinct, ascending layer ids: engines capture in ascending order whatever"
    " it says, and fail on one that stands there twice.",
    fix="Put the list right; fc's columns are in ascending order of the layers.",
    engines=READ_BY_CONFIG,
)
def captured_no_list(subject: HeadSubject) -> Iterator[Found]:
    for where, value in lists(subject):
        ids = listed_ids(value)
        if ids is None or list(ids) != sorted(set(ids)) or ids[0] < 0:
            yield Found(f"config.json: {where}", f"{value!r} is no list of distinct, ascending layer ids")


@rule(
    "K146",
    "captured-contradict",
    "error",
    "The two lists of captured layers mean different layers, and engines read one each.",
    fix="Find out which layers the head was trained on, and say --captured when you convert it.",
    engines=READ_BY_CONFIG,
    seen_in=IN_VLLM,
)
def captured_contradict(subject: HeadSubject) -> Iterator[Found]:
    top, nested = listed_ids(subject.flat.get(TOP)), listed_ids(subject.eagle.get(IDS))
    if top and nested and nested not in (top, as_outputs(top)):
        yield Found("config.json", f"{TOP} is {list(top)}, and in eagle_config it is {list(nested)}")


@rule(
    "K147",
    "captured-embedding",
    "error",
    "Layer input 0 is the embedding, the output of no layer: vLLM fails on it for a DeepSeek or Kimi target.",
    fix="Capture layers from the input of layer 1 on.",
    engines=VLLM,
    seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/deepseek_v2.py#L1561",
)
def captured_embedding(subject: HeadSubject) -> Iterator[Found]:
    top = listed_ids(subject.flat.get(TOP))
    if top and 0 in top:
        yield Found(f"config.json: {TOP}", f"{list(top)} asks for the input of layer 0")


@rule(
    "K148",
    "captured-outside-target",
    "error",
    "The head reads a layer that the target does not have.",
    fix="Give the target that the head was trained on.",
)
def captured_outside_target(subject: HeadSubject) -> Iterator[Found]:
    if subject.target is None:
        return
    layers = subject.target.layers
    for where, value in lists(subject):
        ids = listed_ids(value)
        # As an input, the number of layers is the output of the last one.
        as_inputs = where == TOP or subject.eagle.get(CONVENTION) == INPUTS
        if ids and max(ids) >= layers + as_inputs:
            yield Found(f"config.json: {where}", f"{list(ids)} of a target of {layers} layers")


@rule(
    "K154",
    "captured-last-layer",
    "error",
    "SGLang captures before a layer of a DeepSeek or Kimi target runs, and so never the output of the last one.",
    fix="Serve this head with vLLM or TensorRT-LLM.",
    engines=(SGLANG,),
    seen_in="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/deepseek_v2.py#L3193-L3194",
)
def captured_last_layer(subject: HeadSubject) -> Iterator[Found]:
    captured, target = subject.captured, subject.target
    if captured and target and has_deepseeks_class(subject) and captured[-1] == target.layers - 1:
        yield Found("config.json", f"the head reads the output of layer {captured[-1]}, the target's last")


RULES = (
    captured_untranslated,
    captured_misread,
    captured_not_found,
    captured_by_default,
    captured_by_flag,
    captured_no_list,
    captured_contradict,
    captured_embedding,
    captured_outside_target,
    captured_last_layer,
)
