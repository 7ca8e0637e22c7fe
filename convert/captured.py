"""Captured layers and their two conventions. What belongs here: the table that decides which one a config speaks.

kconv holds captured layers as outputs of the 0-based decoder layer i. vLLM counts the layer's *inputs*:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/interfaces.py#L1712
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CapturedUndecided, ConfigInvalid

TOP = "eagle_aux_hidden_state_layer_ids"
NESTED = "eagle_config.eagle_aux_hidden_state_layer_ids"
CONVENTION = "aux_hidden_state_layer_ids_are"
OUTPUTS, INPUTS = "layer_outputs", "layer_inputs"
# Keys of eagle_config that trainers write (ModelOpt's exporter, TorchSpec) and engines do not:
# https://github.com/NVIDIA/Model-Optimizer/blob/0.47.0/modelopt/torch/export/plugins/hf_spec_configs.py
PRODUCER_MARKS = ("next_layer_regular", "parallel_draft_step", "use_mtp_layernorm")


@dataclass(frozen=True)
class Hints:
    """What the user says where a config is silent or ambiguous.

    Attributes:
        captured: layer ids, in `captured_are`'s convention (outputs if that is None too).
        captured_are: "outputs" or "inputs".
        target_layers: number of decoder layers of the target.
        max_positions: rows of the RoPE table, tokens.
    """

    captured: tuple[int, ...] | None = None
    captured_are: str | None = None
    target_layers: int | None = None
    max_positions: int | None = None


@dataclass(frozen=True)
class Captured:
    """Captured layers as outputs, and the sentence that says how that was decided."""

    ids: tuple[int, ...]
    how: str


def default_outputs(layers: int) -> tuple[int, int, int]:
    """Return ModelOpt's and TensorRT-LLM's default captures of a target, as layer outputs."""
    return (1, layers // 2 - 1, layers - 4)


def default_inputs(layers: int) -> tuple[int, int, int]:
    """Return vLLM's default captures of a target, as layer inputs; the same states as `default_outputs`."""
    return (2, layers // 2, layers - 3)


def decide(config: Mapping[str, Any], hints: Hints) -> Captured:
    """Decide which layers a head reads, as outputs of 0-based layers.

    Raises:
        CapturedUndecided: the config does not say, or can be read in two ways, and no hint decides.
        ConfigInvalid: a list that is no list of ascending layer ids, or two that contradict.
    """
    nested_config = config.get("eagle_config") or {}
    if not isinstance(nested_config, Mapping):
        raise ConfigInvalid("eagle_config is not an object", where="config.json")
    top = _ids(config.get(TOP), TOP)
    nested = _ids(nested_config.get("eagle_aux_hidden_state_layer_ids"), NESTED)
    if hints.captured is not None:
        return _told(hints.captured, hints.captured_are or "outputs")
    if hints.captured_are is not None and (nested or top):
        return _told(nested or top, hints.captured_are)
    if top:
        return _from_top(top, nested)
    if nested:
        return _from_nested(nested, nested_config, hints.target_layers)
    if hints.target_layers is not None:
        ids = default_outputs(hints.target_layers)
        return Captured(_ids(ids, "default") or ids, f"absent; each engine's default for {hints.target_layers} layers")
    raise CapturedUndecided(
        "the config does not say which of the target's layers this head reads",
        where=f"config.json: {TOP}",
        fix="Give --target, whose depth decides the default, or --captured 1,29,57 (outputs of 0-based layers).",
    )


def _told(ids: tuple[int, ...], convention: str) -> Captured:
    outputs = ids if convention == "outputs" else tuple(i - 1 for i in ids)
    if min(outputs) < 0:
        raise CapturedUndecided(
            f"{list(ids)} cannot be layer inputs: the input of layer 0 is the embedding, no layer's output",
            fix="Say --captured-are outputs.",
        )
    return Captured(outputs, f"as told: {list(ids)} are layer {convention}")


def _from_top(top: tuple[int, ...], nested: tuple[int, ...] | None) -> Captured:
    outputs = _told(top, "inputs").ids
    if nested and nested not in (top, outputs):
        raise ConfigInvalid(
            f"captured layers contradict: {TOP} is {list(top)}, in eagle_config {list(nested)}",
            where="config.json",
            fix="Find out which layers the head was trained on and say --captured.",
        )
    return Captured(outputs, f"the top-level list {list(top)} is vLLM's: layer inputs")


def _from_nested(nested: tuple[int, ...], eagle_config: Mapping[str, Any], layers: int | None) -> Captured:
    stated = eagle_config.get(CONVENTION)
    if stated is not None:
        if stated not in (OUTPUTS, INPUTS):
            raise ConfigInvalid(f"eagle_config.{CONVENTION} is {stated!r}", where="config.json")
        ids = _told(nested, "outputs" if stated == OUTPUTS else "inputs").ids
        return Captured(ids, f"eagle_config states that {list(nested)} are {stated.replace('_', ' ')}")
    if nested == default_inputs(layers if layers is not None else nested[-1] + 3):
        raise CapturedUndecided(
            f"eagle_config lists {list(nested)}: vLLM's default as layer inputs, but the list may also mean outputs",
            where=f"config.json: {NESTED}",
            fix="Say --captured-are inputs (published Kimi heads that list [2, 30, 58]) or --captured-are outputs.",
        )
    if nested == default_outputs(layers if layers is not None else nested[-1] + 4):
        return Captured(nested, f"{list(nested)} in eagle_config is the default for layer outputs")
    if 1 in nested:
        return Captured(nested, f"{list(nested)} in eagle_config contains 1: layer outputs")
    if any(mark in eagle_config for mark in PRODUCER_MARKS):
        return Captured(nested, f"{list(nested)} in eagle_config with its producer's marks: layer outputs")
    raise CapturedUndecided(
        f"eagle_config lists {list(nested)} and does not say whether these are layer outputs or inputs",
        where=f"config.json: {NESTED}",
        fix="Say --captured-are outputs (trainers) or --captured-are inputs (vLLM).",
    )


def _ids(value: object, where: str) -> tuple[int, ...] | None:
    if value is None or value == []:
        return None
    ids = tuple(value) if isinstance(value, (list, tuple)) else ()
    whole = all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 10_000 for i in ids)
    if not ids or not whole or list(ids) != sorted(set(ids)):
        raise ConfigInvalid(
            f"{value!r} is no list of distinct, ascending layer ids",
            where=f"config.json: {where}",
            fix="Engines capture in ascending order, whatever the list says; put it right.",
        )
    return ids
