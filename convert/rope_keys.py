"""RoPE in a config, in the spellings of transformers 4 and 5."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from ..engines.config import SCALINGS
from ..engines.config import write_rope as write_rope
from ..errors import ConfigInvalid, ConfigUnsupported
from ..head.spec import Rope

# transformers 4's default, which engines take where neither spelling states a theta:
# https://github.com/huggingface/transformers/blob/v4.57.1/src/transformers/models/llama/configuration_llama.py#L170
DEFAULT_THETA = 10000.0


def read_rope(config: Mapping[str, Any]) -> Rope:
    """Read a head's RoPE.

    Args:
        config: config.json, with `rope_theta` and `rope_scaling` (transformers 4) or
            `rope_parameters` (transformers 5), or both.

    Raises:
        ConfigInvalid: the spellings contradict each other, or a parameter is missing or no number.
        ConfigUnsupported: a kind of scaling that kconv does not know.
    """
    stated = _merge(config)
    theta = _number("rope_theta", stated.pop("rope_theta", DEFAULT_THETA))
    partial = _number("partial_rotary_factor", stated.pop("partial_rotary_factor", 1.0))
    if partial > 1:
        raise ConfigInvalid(
            f"partial_rotary_factor is {partial}, more than the whole",
            where="config.json: partial_rotary_factor",
            fix="Put the key right.",
        )
    kind = stated.pop("rope_type", "default")
    if kind == "default":
        if stated:
            raise ConfigInvalid(
                f"the config states RoPE's {', '.join(sorted(stated))}, but no rope_type that has them",
                where="config.json: rope_scaling",
                fix='State the rope_type that the head was trained with, e.g. "yarn".',
            )
        return Rope(theta, None, partial)
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise ConfigUnsupported(
            f"RoPE scaling {kind!r} is not one that kconv knows ({', '.join(SCALINGS)})",
            where="config.json: rope_scaling",
            fix="Serve this head with the engine it was made for.",
        )
    scaling, names = SCALINGS[kind]
    unknown = sorted(stated.keys() - names.keys() - {"truncate"})
    if unknown or stated.get("truncate") is False:
        raise ConfigUnsupported(
            f"RoPE scaling {kind} with {', '.join(unknown or ['truncate: false'])}",
            where="config.json: rope_scaling",
            fix="Remove the key if it has no effect on the trained head.",
        )
    needed = {field.name for field in fields(scaling) if field.default is MISSING}
    missing = [name for name, field in names.items() if field in needed and name not in stated]
    if missing:
        raise ConfigInvalid(
            f"RoPE scaling {kind} lacks {', '.join(missing)}",
            where="config.json: rope_scaling",
            fix="Engines fall back to different defaults; state what the head was trained with.",
        )
    values = {field: _number(name, stated[name]) for name, field in names.items() if name in stated}
    return Rope(theta, scaling(**values), partial)


def states_theta(config: Mapping[str, Any]) -> bool:
    """Say whether a config states RoPE's theta, in any place that `read_rope` reads.

    Raises:
        ConfigInvalid: see `read_rope`.
    """
    return "rope_theta" in _merge(config)


def _merge(config: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    places = [config.get("rope_scaling"), config.get("rope_parameters")]
    places.append({k: config[k] for k in ("rope_theta", "partial_rotary_factor") if k in config})
    for place in places:
        if place is None:
            continue
        if not isinstance(place, Mapping):
            raise ConfigInvalid(
                f"RoPE is stated as {place!r}, which is not an object",
                where="config.json: rope_scaling",
                fix="Export it again.",
            )
        for name, stated in place.items():
            if stated is None:
                continue
            # DeepSeek's code reads `type`, transformers `rope_type`.
            key = "rope_type" if name == "type" else name
            value = "yarn" if (key, stated) == ("rope_type", "deepseek_yarn") else stated
            if key in merged and merged[key] != value:
                _contradict(key, merged[key], value)
            merged[key] = value
    return merged


def _contradict(key: str, one: object, other: object) -> None:
    raise ConfigInvalid(
        f"the config states RoPE's {key} twice, as {one!r} and as {other!r}",
        where="config.json: rope_theta, rope_scaling, rope_parameters",
        fix="Engines would pick one each; leave the one that the head was trained with.",
    )


def _number(name: str, value: object) -> float:
    """Return a parameter as the number it has to be: a count of tokens whole, mscale from 0, any other above 0."""
    is_count = name == "original_max_position_embeddings"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= sys.float_info.max:
        if is_count:
            # As every count of a config: one of 300 digits could be written and not be read again.
            if 0 < value < 2**31 and value == int(value):
                return int(value)
        elif value > 0 or (value == 0 and name in ("mscale", "mscale_all_dim")):
            return float(value)
    kind = "whole number of tokens below 2**31" if is_count else "positive number"
    raise ConfigInvalid(f"RoPE's {name} is {value!r}, not a {kind}", where="config.json", fix="Put the key right.")
