"""Captured layers and their two conventions.

kconv counts captured layers as outputs of the 0-based decoder layer i. vLLM counts the layer's *inputs*:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/interfaces.py#L1712
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..checkpoint.manifest import Hints
from ..checkpoint.schema import Json
from ..errors import CapturedUndecided, ConfigInvalid, KconvError, Problem, in_config
from .contract import Problems
from .keys import CONVENTION, IDS, INPUTS, NESTED, OUTPUTS, TOP

EAGLE = "eagle_config"
# The rule about user options that contradict the head's own files.
AGAINST_MARKS = "K155"
# The option that gives the target, and so its depth.
TARGET = "--target"
# Above any target's depth, and the largest id that a list may hold.
MAX_DEPTH = 10_000
# Keys of eagle_config that ModelOpt's exporter writes and engines do not:
# https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/export/plugins/hf_spec_configs.py#L52-L53
MODELOPT_MARKS = ("next_layer_regular", "parallel_draft_step")
# TorchSpec's configs have only the first of these keys, and its exporter writes the second one. It counts outputs, for
# every target. When it renames `midlayer` for vLLM, it adds 1 to the lists of kimi_k2 heads and of no others:
# https://github.com/lightseekorg/TorchSpec/blob/6f21829cd0e333c3b54d9d2706a0b0c8dc10de9d/torchspec/inference/engine/vllm_engine.py#L155-L166
# https://github.com/lightseekorg/TorchSpec/blob/6f21829cd0e333c3b54d9d2706a0b0c8dc10de9d/tools/convert_to_hf.py#L145-L158
TORCHSPEC_MARK, TORCHSPEC_VERSION = "use_mtp_layernorm", "_torchspec_version"

TRAINER, FOR_VLLM, AS_TRAINED = "trainer", "for vllm", "as trained"
# Why a list that vLLM reads as inputs may hold outputs.
FIRST = "it names layer 1, which trainers capture as an output, and vLLM not as an input"
DOUBTS = {
    TRAINER: "the tensors have the trainer's own names, so these may be layer outputs",
    AS_TRAINED: "from TorchSpec, which counts outputs and adds 1 for vLLM only for kimi_k2 heads",
}


@dataclass(frozen=True)
class Captured:
    """Captured layers as outputs.

    Attributes:
        ids: 0-based decoder layers.
        how: a sentence that says how they were decided.
        word: the options, or the default, that decided them; "" if the head's own files do.
        against: the contradicting statement in the head's own files; "" if there is none.
        depth: the target's number of layers, if the drafter's config or an option states it and the family reads it.
    """

    ids: tuple[int, ...]
    how: str
    word: str = ""
    against: str = ""
    depth: int | None = None


def default_outputs(layers: int) -> tuple[int, int, int]:
    """Return ModelOpt's and TensorRT-LLM's default captures of a target, as layer outputs."""
    return (1, layers // 2 - 1, layers - 4)


def default_inputs(layers: int) -> tuple[int, int, int]:
    """Return vLLM's default captures of a target, as layer inputs; the same states as `default_outputs`."""
    return (2, layers // 2, layers - 3)


def default_formula() -> str:
    """Return the sentence about what engines and ModelOpt use if nothing is listed."""
    return "outputs of layers 1, N//2-1 and N-4 of a target with N layers: the default of trainers and engines"


def _default(default: Callable[[int], tuple[int, ...]], least: int, layers: int | None) -> tuple[int, ...]:
    """Return the default captures of the target; if it is unknown, of the depth that their last layer implies."""
    return default(layers if layers is not None else least)


def decide(config: Mapping[str, Any], hints: Hints, names: Iterable[str] = ()) -> Captured:
    """Decide which layers a head reads, as outputs of 0-based layers; see `read_captured` for the arguments.

    Raises:
        CapturedUndecided: the config does not say, or can be read in two ways, and no hint decides.
        ConfigInvalid: a list is not a list of ascending layer ids, two lists contradict each other, or the target does
        not have one of the layers.
    """
    problems = Problems()
    decided = read_captured(config, hints, names, problems)
    problems.refuse()
    if decided is None:
        raise RuntimeError("captured layers were neither decided nor refused")
    return decided


def read_captured(config: Mapping[str, Any], hints: Hints, names: Iterable[str], problems: Problems) -> Captured | None:
    """Decide which layers a head reads, as outputs of 0-based layers; None if a problem leaves it open.

    Args:
        config: in the keys of `drafters.keys`.
        hints: the user's options.
        names: the names of its tensors.
        problems: the list to which problems are added.
    """
    nested: Json = config.get(EAGLE) or {}
    if not isinstance(nested, Mapping):
        problems.append(
            ConfigInvalid("eagle_config is not an object", where=in_config(EAGLE), fix="Export it again.").problem(
                "K152"
            )
        )
        return None
    before = len(problems)
    for path, value in ((TOP, config.get(TOP)), (NESTED, nested.get(IDS))):
        with problems.catching():
            _ids(value, in_config(path))
    if len(problems) > before:
        return None
    decided, names = None, tuple(names)
    with problems.catching():
        decided = _against_marks(_decide(config, nested, hints, names), config, nested, hints, names)
    if decided and decided.against:
        problems.append(
            Problem(
                AGAINST_MARKS,
                "warning",
                in_config(),
                f"{decided.how}; {decided.against}",
                "Remove --captured and --captured-are, or let kconv validate measure both readings (--target with"
                " --prompts or --states).",
            )
        )
    if decided and hints.target_layers is not None and decided.ids[-1] >= hints.target_layers:
        error = ConfigInvalid(
            f"the head reads the output of layer {decided.ids[-1]}, but the target's last layer is"
            f" {hints.target_layers - 1} ({decided.how})",
            where="--captured" if hints.captured else in_config(TOP),
            fix="Pass the layers that the head was trained on (--captured), and its own target."
            if decided.word
            else "Pass the head's own target.",
        )
        problems.append(error.problem("K148"))
    return decided


def readings(config: Mapping[str, Any], hints: Hints, names: Iterable[str] = ()) -> tuple[Captured, ...]:
    """Return every possible reading of a head's captured layers, the decided one first.

    Args:
        config: in the keys of `drafters.keys`.
        hints: the user's options; the target's depth rules out layers that it does not have.
        names: the names of its tensors.

    Returns:
        Distinct readings: of a list, as outputs and as inputs; without a list, the default for the target's depth.
            Empty if
        no reading is possible.
    """
    nested: Json = config.get(EAGLE) or {}
    found: list[Captured] = []
    if decided := read_captured(config, hints, names, Problems()):
        found.append(decided)
    places = (config.get(TOP), nested.get(IDS) if isinstance(nested, Mapping) else None)
    if hints.captured is not None:
        places = (list(hints.captured), *places)
    for place in places:
        for convention in ("outputs", "inputs"):
            try:
                if ids := _ids(place, in_config()):
                    one = _told(ids, convention)
                    found.append(Captured(one.ids, f"{list(ids)} are layer {convention}"))
            except KconvError:
                continue
    if hints.target_layers is not None and not any(places):
        ids = default_outputs(hints.target_layers)
        if 0 <= ids[0] < ids[1] < ids[2]:
            ahead = tuple(i - 1 for i in ids)
            found.append(Captured(ids, f"the default of {hints.target_layers} layers, as outputs"))
            found.append(Captured(ahead, f"the default of {hints.target_layers} layers, one layer early"))
    depth = hints.target_layers or MAX_DEPTH
    return tuple({one.ids: one for one in reversed(found) if one.ids[-1] < depth}.values())[::-1]


def without_lists(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without captured layers, for a reader that does not need them."""
    bare = {key: value for key, value in config.items() if key not in (IDS, CONVENTION)}
    nested: Json = bare.get("eagle_config")
    if isinstance(nested, Mapping):
        bare["eagle_config"] = {key: value for key, value in nested.items() if key not in (IDS, CONVENTION)}
    return bare


def _decide(
    config: Mapping[str, Any], nested_config: Mapping[str, Any], hints: Hints, names: tuple[str, ...]
) -> Captured:
    if hints.captured is not None:
        _ids(hints.captured, "--captured", code="K008")
        _refuse_inputs(hints, config, nested_config)
        told = _told(hints.captured, hints.captured_are or "outputs", "--captured")
        return _by_word(_agreeing(told, config, nested_config), hints)
    top = _ids(config.get(TOP), in_config(TOP))
    nested = _ids(nested_config.get(IDS), in_config(NESTED))
    listed = nested or top
    if hints.captured_are is not None and listed:
        if top not in (None, listed):
            raise CapturedUndecided(
                f"there are two lists, {list(listed)} in eagle_config and {list(top)} at the top level",
                where=in_config(),
                fix="Pass --captured, or remove --captured-are. The top-level list always holds inputs.",
                needs="--captured",
            )
        return _by_word(_agreeing(_told(listed, hints.captured_are), config, nested_config), hints)
    if hints.captured_are is not None:
        raise ConfigInvalid(
            f"--captured-are {hints.captured_are} says how to read the config's list of layers, but it has none",
            where=in_config(TOP),
            fix=f"Remove --captured-are, or list the layers: --captured IDS --captured-are {hints.captured_are}.",
        )
    saved = saved_by(config, nested_config, names)
    if top:
        return _from_top(top, nested, config, nested_config, hints.target_layers, saved)
    if nested:
        return _from_nested(nested, nested_config, hints.target_layers, saved)
    if hints.target_layers is not None:
        ids = default_outputs(hints.target_layers)
        if not 0 <= ids[0] < ids[1] < ids[2]:
            raise CapturedUndecided(
                f"the config lists no captured layers, and {hints.target_layers} layers are too few for the default",
                where=in_config(TOP),
                fix="Pass --captured: the 0-based layer outputs that the head was trained on.",
                needs="--captured",
            )
        word = f"each engine's default for {hints.target_layers} layers"
        return Captured(ids, f"not in the config; {word}", word)
    raise CapturedUndecided(
        "the config does not say which target layers this head reads",
        where=in_config(TOP),
        fix="Pass --target (only its config is read) or --target-layers N. The depth N decides the default, the outputs"
        " of 1, N//2-1, N-4. If the head was trained on others, pass --captured with their 0-based ids.",
        needs=TARGET,
    )


def _refuse_inputs(hints: Hints, config: Mapping[str, Any], nested_config: Mapping[str, Any]) -> None:
    """Refuse vLLM's default inputs that an option gives as outputs, unless the config lists the layers too."""
    captured = hints.captured
    if captured is None or hints.captured_are or config.get(IDS) or nested_config.get(IDS):
        return
    if captured == _default(default_inputs, captured[-1] + 3, hints.target_layers):
        raise CapturedUndecided(
            f"--captured {','.join(map(str, captured))}: these are vLLM's default as layer inputs, and without"
            " --captured-are they would be outputs",
            where="--captured",
            fix="Pass --captured-are inputs (vLLM) or --captured-are outputs (trainers).",
            needs="--captured-are",
        )


def _told(ids: tuple[int, ...], convention: str, where: str = in_config()) -> Captured:
    outputs = ids if convention == "outputs" else tuple(i - 1 for i in ids)
    if min(outputs) < 0:
        raise CapturedUndecided(
            f"{list(ids)} cannot be layer inputs: the input of layer 0 is the embedding, not a layer's output",
            where=where,
            fix="Give --captured-are outputs.",
            needs="--captured-are outputs",
        )
    return Captured(outputs, f"set by the user: {list(ids)} are layer {convention}")


def _by_word(told: Captured, hints: Hints) -> Captured:
    """Return captured layers that the user stated, with the options that state them."""
    ids = f"--captured {','.join(map(str, hints.captured))}" if hints.captured is not None else ""
    kind = f"--captured-are {hints.captured_are}" if hints.captured_are else ""
    return replace(told, word=f"{ids} {kind}".strip())


def _against_marks(
    told: Captured, config: Mapping[str, Any], nested: Mapping[str, Any], hints: Hints, names: tuple[str, ...]
) -> Captured:
    """Return captured layers that the user decided, with what the head's own files say otherwise."""
    if hints.captured is None and hints.captured_are is None:
        return told
    try:
        own = _decide(config, nested, hints.model_copy(update={"captured": None, "captured_are": None}), names)
    except KconvError:  # the files leave it open, so the user's option decides
        return told
    if own.word:  # a default is a guess: it confirms nothing, and the user's option is better
        return told
    if own.ids == told.ids:
        return replace(told, word="")
    return replace(told, against=f"the head's own files say outputs of {list(own.ids)} ({own.how})")


def _agreeing(told: Captured, config: Mapping[str, Any], nested_config: Mapping[str, Any]) -> Captured:
    """Return the user's layers, unless the config states others, or has a list that cannot mean them."""
    for stated in (_stated(nested_config, "eagle_config"), _stated(config, "the config")):
        if stated is not None and stated.ids != told.ids:
            raise ConfigInvalid(
                f"{stated.how}, the outputs of {list(stated.ids)}, but --captured says {list(told.ids)}",
                where=in_config(),
                fix="Remove --captured and --captured-are, or correct the config if it is wrong.",
            )
    places = {TOP: config, NESTED: nested_config}
    found = [list(ids) for name, place in places.items() if (ids := _ids(place.get(IDS), in_config(name)))]
    if found and not any(list(told.ids) in (ids, [i - 1 for i in ids]) for ids in found):
        fix = "Pass --captured-are outputs or inputs for the listed layers, or correct the config if it is wrong."
        if [i - 1 for i in told.ids] in found:
            fix = "These are the listed layers as inputs, as vLLM counts: leave --captured out, which takes outputs."
        raise ConfigInvalid(
            f"--captured says {list(told.ids)}, but {' and '.join(map(str, found))} in the config cannot mean them",
            where=in_config(),
            fix=fix,
        )
    return told


def _from_top(
    top: tuple[int, ...],
    nested: tuple[int, ...] | None,
    config: Mapping[str, Any],
    nested_config: Mapping[str, Any],
    layers: int | None,
    saved: str,
) -> Captured:
    beside, stated = _stated(nested_config, "eagle_config"), _stated(config, "the config")
    if stated is None and beside is None and nested in (None, top):
        _refuse_outputs(top, layers, saved)
    found = stated or Captured(_told(top, "inputs").ids, f"the top-level list {list(top)} is vLLM's: layer inputs")
    if nested and ((beside and beside.ids != found.ids) or nested not in (top, found.ids)):
        raise ConfigInvalid(
            f"captured layers contradict: {TOP} is {list(top)}, in eagle_config {list(nested)}",
            where=in_config(),
            fix="Find out which layers the head was trained on and "
            + ("correct the other list." if beside or stated else "pass --captured."),
            code="K146",
        )
    return found


def _refuse_outputs(top: tuple[int, ...], layers: int | None, saved: str) -> None:
    """Refuse a list that vLLM reads as inputs, if a trainer that counts outputs may have written it."""
    is_default = top == _default(default_outputs, top[-1] + 4, layers)
    why = "the default as layer outputs" if is_default else DOUBTS.get(saved) or (FIRST if 1 in top else None)
    if why is None:
        return
    before = [layer - 1 for layer in top]
    raise CapturedUndecided(
        f"{TOP} lists {list(top)}: {why}. vLLM reads them as inputs, so it would take the outputs of {before}",
        where=in_config(TOP),
        fix="Pass --captured-are outputs (trainers) or --captured-are inputs (vLLM).",
        needs="--captured-are",
    )


def _from_nested(nested: tuple[int, ...], eagle_config: Mapping[str, Any], layers: int | None, saved: str) -> Captured:
    if stated := _stated(eagle_config, "eagle_config"):
        return stated
    if nested == _default(default_inputs, nested[-1] + 3, layers):
        raise CapturedUndecided(
            f"eagle_config lists {list(nested)}: vLLM's default as layer inputs, but the list may also mean outputs",
            where=in_config(NESTED),
            fix="Pass --captured-are inputs (published Kimi heads that list [2, 30, 58]) or --captured-are outputs.",
            needs="--captured-are",
        )
    if nested == _default(default_outputs, nested[-1] + 4, layers):
        default = f"the default layer outputs of {layers} layers" if layers else "a trainer's default as layer outputs"
        return Captured(nested, f"eagle_config lists {list(nested)}, {default}")
    if 1 in nested:
        return Captured(nested, f"{list(nested)} in eagle_config contains 1: layer outputs")
    if saved == TRAINER:
        return Captured(nested, f"{list(nested)} in eagle_config, with the trainer's own tensor names: layer outputs")
    if is_modelopts(eagle_config) or saved == AS_TRAINED or (TORCHSPEC_MARK in eagle_config and saved != FOR_VLLM):
        return Captured(nested, f"{list(nested)} in eagle_config with its producer's marks: layer outputs")
    raise CapturedUndecided(
        f"eagle_config lists {list(nested)} but does not say whether these are layer outputs or inputs",
        where=in_config(NESTED),
        fix="Pass --captured-are outputs (trainers) or --captured-are inputs (vLLM).",
        needs="--captured-are",
    )


def _stated(place: Mapping[str, Any], name: str) -> Captured | None:
    """Return the convention stated with a list: in eagle_config, or at the top level."""
    stated = place.get(CONVENTION)
    listed = None if stated is None else _ids(place.get(IDS), in_config(f"{IDS} in {name}"))
    if listed is None:
        return None
    if stated not in (OUTPUTS, INPUTS):
        raise ConfigInvalid(
            f"{CONVENTION} in {name} is {stated!r}", where=in_config(), fix=f"Write {OUTPUTS} or {INPUTS}."
        )
    ids = _told(listed, "outputs" if stated == OUTPUTS else "inputs").ids
    return Captured(ids, f"{name} states that {list(listed)} are {stated.replace('_', ' ')}")


def _ids(value: Json | tuple[Any, ...], where: str, code: str = "K145") -> tuple[int, ...] | None:
    if value is None or value == []:
        return None
    ids = tuple(value) if isinstance(value, (list, tuple)) else ()
    whole = all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < MAX_DEPTH for i in ids)
    if not ids or not whole or list(ids) != sorted(set(ids)):
        raise ConfigInvalid(
            f"{value!r} is not a list of distinct, ascending layer ids",
            where=where,
            fix="Correct the list. Engines always capture in ascending order.",
            code=code,
        )
    return ids


def saved_by(config: Mapping[str, Any], eagle_config: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Return who may have shifted a list.

    Args:
        config: in the keys of `drafters.keys`.
        eagle_config: the config's own.
        names: the names of the head's tensors.

    Returns:
        TRAINER if it has the trainer's own tensor names; if the layer is renamed for vLLM, FOR_VLLM if TorchSpec then
        shifts the list and AS_TRAINED if it does not; otherwise empty.
    """
    if any(name.startswith("midlayer.") for name in names):
        return TRAINER
    if not any(name.startswith("layers.0.") for name in names):
        return ""
    if config.get("model_type") == "kimi_k2":
        return FOR_VLLM
    torchspecs = TORCHSPEC_MARK in eagle_config and not is_modelopts(eagle_config)
    return AS_TRAINED if torchspecs or TORCHSPEC_VERSION in config else ""


def is_modelopts(eagle_config: Mapping[str, Any]) -> bool:
    """Return whether ModelOpt's exporter wrote an eagle_config."""
    return any(mark in eagle_config for mark in MODELOPT_MARKS)
