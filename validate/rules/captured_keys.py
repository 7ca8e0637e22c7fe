"""What stands beside the captured layers."""

from __future__ import annotations

from collections.abc import Iterator

from .captured import lists
from .captured_readings import READ_BY_CONFIG, RUNNERS
from .head import EAGLE, HeadSubject, listed_ids
from .rule import Found, rule


@rule(
    "K149",
    "captured-count-contradicts",
    "error",
    "num_aux_hidden_states is not the number of captured layers that are listed.",
    fix="Correct the one that fc.weight's width contradicts.",
    seen_in="https://github.com/vllm-project/vllm/issues/54526",
)
def captured_count_contradicts(subject: HeadSubject) -> Iterator[Found]:
    count = subject.flat.get("num_aux_hidden_states")
    for where, value in lists(subject):
        ids = listed_ids(value)
        if count is not None and ids and count != len(ids):
            yield Found("config.json: num_aux_hidden_states", f"{count!r} states, and {where} lists {len(ids)}")


@rule(
    "K150",
    "captured-count-unstated",
    "error",
    "An engine builds fc for another number of captured states than the head has, and cannot load it.",
    fix="Write num_aux_hidden_states, and the list in eagle_config too; kconv's layouts do.",
    engines=READ_BY_CONFIG,
    seen_in="https://github.com/vllm-project/vllm/pull/54598",
)
def captured_count_unstated(subject: HeadSubject) -> Iterator[Found]:
    for engine, runner in RUNNERS.items():
        built = runner.aux_count(subject.flat, subject.is_mla) if runner.aux_count else None
        read = runner.aux_count is not None and engine in subject.engines
        if subject.spec and read and (built or 3) != len(subject.spec.captured):
            yield Found(
                "config.json: num_aux_hidden_states",
                f"{engine} builds fc for {built or 3} states, and the head has {len(subject.spec.captured)}",
            )


@rule(
    "K151",
    "captured-off",
    "error",
    "use_aux_hidden_state is false, though the head has an fc for captured states: some engines skip it.",
    fix="Remove the key, or set it to true.",
    seen_in="https://github.com/sgl-project/sglang/pull/21272",
)
def captured_off(subject: HeadSubject) -> Iterator[Found]:
    if subject.eagle.get("use_aux_hidden_state") is False and "fc.weight" in subject.tensors:
        yield Found("config.json: eagle_config.use_aux_hidden_state", "false, beside an fc.weight")


@rule(
    "K152",
    "eagle-config-no-object",
    "error",
    "eagle_config is no object, and no engine finds a key in it.",
    fix="Export the head again.",
)
def eagle_config_no_object(subject: HeadSubject) -> Iterator[Found]:
    value = subject.flat.get(EAGLE)
    if value is not None and not isinstance(value, dict):
        yield Found(f"config.json: {EAGLE}", f"{EAGLE} is {value!r}")


RULES = (captured_count_contradicts, captured_count_unstated, captured_off, eagle_config_no_object)
