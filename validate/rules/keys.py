"""Keys of the config.

Which keys there are is stated by `convert.keys`; the rules here report by its tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...convert.config_checks import KINDS, phrase
from ...engines.keys import COMMON, FIXED, GQA, MLA, Key
from ...engines.registry import engines
from .head import MISSING, HeadSubject
from .rule import ENGINES, Found, rule

# Keys with rules of their own.
ELSEWHERE = frozenset(
    "q_lora_rank tie_word_embeddings rope_interleave quantization_config eagle_config.use_aux_hidden_state".split()
)
FLAGS = "https://github.com/vllm-project/vllm/pull/42143"


def _keys(subject: HeadSubject) -> Iterator[Key]:
    if subject.layout is not None:
        yield from (*COMMON, *(MLA if subject.flat.get("kv_lora_rank") else GQA))


def _values(subject: HeadSubject, key: Key) -> dict[str, object]:
    stated = {name: subject.stated(name) for name in key.names + key.also}
    return {name: value for name, value in stated.items() if value is not MISSING and value is not None}


@rule(
    "K010",
    "key-missing",
    "error",
    "The config lacks a key without which an engine cannot build the head.",
    fix="Take it from the head's training config.",
)
def key_missing(subject: HeadSubject) -> Iterator[Found]:
    for key in _keys(subject):
        if key.default is None and key.names[0] not in ELSEWHERE and not _values(subject, key):
            yield Found(f"config.json: {key.names[0]}", "the key is absent or null")


@rule(
    "K011",
    "key-contradiction",
    "error",
    "Two keys that mean one thing have different values, and engines read one each.",
    fix="Leave the one that the head was trained with.",
    seen_in=FLAGS,
)
def key_contradiction(subject: HeadSubject) -> Iterator[Found]:
    for key in _keys(subject):
        values = _values(subject, key)
        if len(set(map(repr, values.values()))) > 1:
            yield Found("config.json", ", ".join(f"{name} is {value!r}" for name, value in values.items()))


@rule(
    "K012",
    "key-type",
    "error",
    "A key has a value of a kind that it cannot have.",
    fix="Put the key right; the head's training config has it.",
)
def key_type(subject: HeadSubject) -> Iterator[Found]:
    for key in _keys(subject):
        right, phrase = KINDS[key.kind]
        for name, value in _values(subject, key).items():
            if not right(value):
                yield Found(f"config.json: {name}", f"{value!r} is not {phrase}")


@rule(
    "K013",
    "key-unsupported",
    "error",
    "A key asks for another computation than that of an Eagle3 head as the engines run it.",
    fix="If the key has no effect on this head, remove it; else serve it with the engine it was made for.",
)
def key_unsupported(subject: HeadSubject) -> Iterator[Found]:
    for path, allowed in FIXED.items() if subject.layout is not None else ():
        value = subject.stated(path)
        if path not in ELSEWHERE and value is not MISSING and value not in allowed:
            yield Found(f"config.json: {path}", f"{value!r}; kconv carries heads {phrase(allowed)} only")


@rule(
    "K014",
    "sliding-window",
    "error",
    "The config asks for a sliding window, which not every engine has for a draft head.",
    fix="If the head was trained with full attention, set use_sliding_window to false.",
    seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/llama.py#L186-L204",
)
def sliding_window(subject: HeadSubject) -> Iterator[Found]:
    kinds, window = subject.flat.get("layer_types"), subject.flat.get("sliding_window")
    if isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds):
        yield Found("config.json: layer_types", f"{kinds!r}")
    elif window is not None and subject.flat.get("use_sliding_window") is not False and not kinds:
        yield Found("config.json: sliding_window", f"{window!r}")


@rule(
    "K015",
    "residual-unstated",
    "error",
    "A speculators config does not state norm_before_residual: vLLM takes true, the speculators library false.",
    fix="State it as the head was trained; kconv takes it with --norm-before-residual.",
    seen_in="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/transformers_utils/configs/speculators/algos.py#L33",
)
def residual_unstated(subject: HeadSubject) -> Iterator[Found]:
    if subject.layout is None or subject.hints.norm_before_residual is not None:
        return
    for name, why in subject.layout.config.must_state.items():
        if subject.flat.get(name) is None:
            yield Found(f"config.json: {name}", f"the key is absent: {why.partition(' (')[0]}")


@rule(
    "K016",
    "root-contradicts",
    "error",
    "A nested config and its root state one key differently.",
    fix="Leave the one that the head was trained with.",
    seen_in="https://github.com/vllm-project/speculators/issues/610",
)
def root_contradicts(subject: HeadSubject) -> Iterator[Found]:
    fault = subject.fault
    if (
        subject.layout is not None
        and subject.layout.config.nested
        and fault
        and fault.what.startswith("the config contradicts itself")
    ):
        yield Found(fault.where, fault.what, fault.fix)


@rule(
    "K017",
    "flag-of-another-meaning",
    "error",
    "SpecForge states norm_output for the norm before lm_head; engines take it for EAGLE-3.1's and feed the next step"
    " the normed state.",
    fix="Convert the head with kconv, which leaves the key out.",
    engines=ENGINES,
    seen_in="https://github.com/sgl-project/sglang/pull/26506",
)
def flag_of_another_meaning(subject: HeadSubject) -> Iterator[Found]:
    otherwise = subject.layout.config.otherwise if subject.layout is not None else {}
    if "norm_output" in otherwise and subject.config.get("norm_output") is True:
        yield Found("config.json: norm_output", "true, in a head that feeds on the state before the norm")


def _places(key: Key) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return where a flag is read by engines that do not read it everywhere, and by whom."""
    found: dict[tuple[str, ...], tuple[str, ...]] = {}
    for engine in engines():
        if read := engine.flags.get(key.field):
            found[read] = (*found.get(read, ()), *engine.runner_names)
    return found


class Place(NamedTuple):
    """Where an engine reads a flag; a flag that stands elsewhere alone it does not see."""

    flag: tuple[str, ...]
    engines: tuple[str, ...]
    read: tuple[str, ...]


PLACES = tuple(Place(key.names + key.also, names, read) for key in COMMON for read, names in _places(key).items())


@rule(
    "K018",
    "flag-not-read",
    "error",
    "A flag stands under a name, or in a place, where an engine does not look for it: norm_before_fc outside of"
    " eagle_config, use_aux_norm, return_hidden_post_norm.",
    fix="Convert the head with kconv, which writes each flag wherever an engine reads it.",
    engines=ENGINES,
    seen_in="https://github.com/vllm-project/speculators/issues/610",
)
def flag_not_read(subject: HeadSubject) -> Iterator[Found]:
    for place in PLACES:
        stated = [name for name in place.flag if subject.stated(name) is True]
        blind = sorted(subject.engines.intersection(place.engines))
        if stated and blind and not any(subject.stated(name) is True for name in place.read):
            yield Found(f"config.json: {stated[0]}", f"true, where {', '.join(blind)} reads {place.read[0]}")


RULES = (
    key_missing,
    key_contradiction,
    key_type,
    key_unsupported,
    sliding_window,
    residual_unstated,
    root_contradicts,
    flag_of_another_meaning,
    flag_not_read,
)
