"""The captured layers of a DFlash or DSpark drafter: five keys list them, in two conventions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..checkpoint.manifest import Hints
from ..checkpoint.schema import Json
from ..errors import CapturedUndecided, ConfigInvalid, ConfigUnsupported, in_config
from .base import Config, Names
from .captured import MAX_DEPTH, Captured
from .contract import Problems
from .facts import Candidate
from .keys import ABSENT, MAX_LAYERS, find

NESTED = "dflash_config"
# Where a config lists the captured layers, and by how much each number is above the layer's, counted by its output:
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py#L113-L150
OUTPUT_LISTS = ("target_layer_ids", f"{NESTED}.target_layer_ids")
LISTS: Mapping[str, int] = {
    **dict.fromkeys((*OUTPUT_LISTS, "dspark_target_layer_ids"), 0),
    **dict.fromkeys(("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids", f"{NESTED}.layer_ids"), 1),
}
# What kconv writes next to a list; no engine reads it.
CONVENTION = "target_layer_ids_are"


def stated(config: Config, key: str) -> Any:
    """Return a key's value at the top level or in `dflash_config`; None if it is in neither place."""
    return next((v for n in (key, f"{NESTED}.{key}") if (v := find(config, n)) not in (ABSENT, None)), None)


def _depth(config: Config, hints: Hints, captured: int | None = None) -> int | None:
    """Return the target's number of layers; TorchSpec writes the number of captured layers under this key."""
    depth: Json = config.get("num_target_layers")
    own = depth if isinstance(depth, int) and not isinstance(depth, bool) and depth != captured else None
    return hints.target_layers if hints.target_layers is not None else own


def _layer_ids(value: Json | tuple[int, ...], where: str, less: int, code: str = "K145") -> tuple[int, ...]:
    """Return a list of layers as outputs.

    Raises:
        ConfigInvalid: it is not a list of distinct layers.
        ConfigUnsupported: they do not ascend, or one of them is the target's embedding.
    """
    ids = tuple(value) if isinstance(value, (list, tuple)) else ()
    whole = all(isinstance(i, int) and not isinstance(i, bool) and -1 <= i < MAX_DEPTH for i in ids)
    if not ids or not whole or len(ids) != len(set(ids)):
        raise ConfigInvalid(
            f"{value!r} is not a list of distinct layer ids", where=where, fix="Correct the list.", code=code
        )
    if list(ids) != sorted(ids):
        raise ConfigUnsupported(
            f"{list(ids)} does not ascend, and engines capture from the first layer to the last",
            where=where,
            fix="Serve it with the code that it was trained with. Leave the list: the columns of fc follow it.",
            code=code,
        )
    if ids[0] - less < 0:
        raise ConfigUnsupported(
            f"{list(ids)} asks for the target's embedding, which is no layer's output",
            where=where,
            fix="Serve it with the code that it was trained with; no engine captures the embedding.",
            code=code,
        )
    return tuple(i - less for i in ids)


def read_captured(config: Config, hints: Hints, names: Names, problems: Problems) -> Captured | None:
    """Decide which layers a drafter reads, as outputs of 0-based layers; see `Drafter.captured`."""
    found: dict[str, tuple[int, ...]] = {}
    before = len(problems)
    for path, above in LISTS.items():
        if (value := find(config, path)) not in (ABSENT, None, []):
            less = {"outputs": 0, "inputs": 1}[hints.captured_are] if hints.captured_are else above
            with problems.catching():
                found[path] = _layer_ids(value, in_config(path), less)
    if len(problems) > before:
        return None
    with problems.catching():
        decided = _decide(found, config, hints)
        depth = _depth(config, hints, len(decided.ids))
        if depth is not None and decided.ids[-1] >= depth:
            raise ConfigInvalid(
                f"it reads the output of layer {decided.ids[-1]}, but the target's last layer is {depth - 1}"
                f" ({decided.how})",
                where="--captured" if hints.captured else in_config(next(iter(found), "")),
                fix="Pass the layers that it was trained on (--captured), and its own target.",
                code="K148",
            )
        return replace(decided, depth=depth)
    return None


def _decide(found: Mapping[str, tuple[int, ...]], config: Config, hints: Hints) -> Captured:
    if len(set(found.values())) > 1:
        said = ", ".join(f"{path} means the outputs of {list(ids)}" for path, ids in found.items())
        raise ConfigInvalid(
            f"the config lists other captured layers in each place: {said}",
            where=in_config(", ".join(found)),
            fix="Each engine would pick one of them; keep the one that it was trained with.",
            code="K146",
        )
    listed = next(iter(found.values()), None)
    if hints.captured is not None:
        ids = _layer_ids(hints.captured, "--captured", 1 if hints.captured_are == "inputs" else 0, "K008")
        if listed not in (None, ids):
            raise ConfigInvalid(
                f"{next(iter(found))} means the outputs of {list(listed or ())}, but --captured says {list(ids)}",
                where=in_config(next(iter(found))),
                fix="Remove --captured, or correct the config if it is wrong.",
            )
        word = f"--captured {','.join(map(str, hints.captured))}"
        return Captured(ids, f"set by the user: {list(ids)} are layer outputs", "" if listed else word)
    if listed is None:
        raise CapturedUndecided(
            "the config does not say which target layers it reads",
            where=in_config(OUTPUT_LISTS[1]),
            fix="Pass --captured with the 0-based layer outputs that it was trained on. SGLang guesses them, wrongly"
            " for most published drafters.",
            needs="--captured",
        )
    path = next(iter(found))
    counted = "inputs" if LISTS[path] else "outputs"
    if hints.captured_are and hints.captured_are != counted:
        word = f"--captured-are {hints.captured_are}"
        how = f"set by the user: {path} counts layer {hints.captured_are}"
        return Captured(listed, how, word, f"engines read the key as layer {counted}")
    return Captured(listed, f"{path} lists {[i + LISTS[path] for i in listed]}: layer {counted}")


def guessed(depth: int, layers: int) -> tuple[int, ...]:
    """Return the layers that z-lab's code and SGLang take if a config lists none.

    https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/speculative/dflash_utils.py#L348
    """
    if layers == 1:
        return (depth // 2,)
    return tuple(round(1 + i * (depth - 4) / (layers - 1)) for i in range(layers))


def guesses(config: Config, hints: Hints, names: Names) -> Sequence[Candidate]:
    depth, layers = _depth(config, hints), config.get("num_hidden_layers")
    known = depth is not None and isinstance(layers, int) and 0 < layers <= MAX_LAYERS and depth > 4
    return [Candidate(guessed(depth or 0, layers or 0) if known else None, "what z-lab's code and SGLang take for it")]
