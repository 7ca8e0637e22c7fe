"""RoPE in a config, in the spellings of transformers 4 and 5."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from ..checkpoint.schema import Json
from ..errors import ConfigInvalid, ConfigUnsupported, in_config
from .contract import Problems
from .spec import Linear, Llama3, Rope, Yarn

PLACES = ("rope_scaling", "rope_parameters")
# The rule for every problem except contradictions.
INVALID = "K161"

# Where rope_scaling and rope_parameters hold each scaling's parameters.
YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_positions",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "attention_factor": "attention_factor",
}
LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_positions",
}
LINEAR = {"factor": "factor"}
SCALINGS = {"yarn": (Yarn, YARN), "llama3": (Llama3, LLAMA3), "linear": (Linear, LINEAR)}

# transformers 4's default, which engines use if neither spelling states a theta:
# https://github.com/huggingface/transformers/blob/v4.57.1/src/transformers/models/llama/configuration_llama.py#L170
DEFAULT_THETA = 10000.0
# Engines compute theta and its powers in fp32, which ends at 3.4e38.
LARGEST_THETA = 1e30
# No head or target exceeds these limits. Trained thetas are 10,000 to about 100 million; attention conversion computes
# others from them (`attention.rotary.lengthen`: the fourth root, the fourth power and more). Factors are up to 64.
BOUNDS: Mapping[str, tuple[float, float]] = {"rope_theta": (8.0, LARGEST_THETA)}
MOST = 1e6


def read_rope(config: Mapping[str, Any]) -> Rope:
    """Read a head's RoPE; see `find_rope` for the argument.

    Raises:
        ConfigInvalid: the spellings contradict each other, or a parameter is missing or not a number.
        ConfigUnsupported: kconv does not know the kind of scaling.
    """
    problems = Problems()
    rope = find_rope(config, problems)
    problems.refuse()
    if rope is None:
        raise RuntimeError("RoPE was neither read nor refused")
    return rope


def find_rope(config: Mapping[str, Any], problems: Problems) -> Rope | None:
    """Read a head's RoPE; None if a problem leaves it open.

    Args:
        config: config.json, with `rope_theta` and `rope_scaling` (transformers 4) or
            `rope_parameters` (transformers 5), or both.
        problems: the list to which problems are added.
    """
    before = len(problems)
    merged = _merge(config, problems)
    if len(problems) > before:
        return None
    with problems.catching():
        return _parse(merged)
    return None


def _parse(stated: dict[str, Any]) -> Rope:
    theta = _number("rope_theta", stated.pop("rope_theta", DEFAULT_THETA))
    partial = _number("partial_rotary_factor", stated.pop("partial_rotary_factor", 1.0))
    if partial > 1:
        raise ConfigInvalid(
            f"partial_rotary_factor is {partial}, more than 1",
            where=in_config("partial_rotary_factor"),
            fix="Correct the key.",
            code=INVALID,
        )
    kind = stated.pop("rope_type", "default")
    if kind == "default":
        if stated:
            raise ConfigInvalid(
                f"the config has RoPE's {', '.join(sorted(stated))}, but no rope_type that uses them",
                where=in_config("rope_scaling"),
                fix='State the rope_type that the head was trained with, e.g. "yarn".',
                code=INVALID,
            )
        return Rope(theta, None, partial)
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise ConfigUnsupported(
            f"RoPE scaling {kind!r} is not supported ({', '.join(SCALINGS)})",
            where=in_config("rope_scaling"),
            fix="Serve this head with the engine that it was made for.",
            code=INVALID,
        )
    scaling, names = SCALINGS[kind]
    unknown = sorted(stated.keys() - names.keys() - {"truncate"})
    if unknown or stated.get("truncate") is False:
        raise ConfigUnsupported(
            f"RoPE scaling {kind} with {', '.join(unknown or ['truncate: false'])}",
            where=in_config("rope_scaling"),
            fix="Remove the key if it has no effect on the trained head.",
            code=INVALID,
        )
    needed = {field.name for field in fields(scaling) if field.default is MISSING}
    missing = [name for name, field in names.items() if field in needed and name not in stated]
    if missing:
        raise ConfigInvalid(
            f"RoPE scaling {kind} lacks {', '.join(missing)}",
            where=in_config("rope_scaling"),
            fix="Add it with the value that the head was trained with. Engines use different defaults.",
            code=INVALID,
        )
    values: dict[str, Any] = {field: _number(name, stated[name]) for name, field in names.items() if name in stated}
    if values.get("beta_slow", 0.0) > values.get("beta_fast", math.inf):
        raise ConfigInvalid(
            f"RoPE's beta_slow {values['beta_slow']} is above its beta_fast {values['beta_fast']}",
            where=in_config("rope_scaling"),
            fix="Correct the keys; beta_fast must be the larger one.",
            code=INVALID,
        )
    return Rope(theta, scaling(**values), partial)


def states_theta(config: Mapping[str, Any]) -> bool:
    """Return whether a config states RoPE's theta, anywhere that `read_rope` looks."""
    return "rope_theta" in stated_places(config)


def stated_places(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the values of each RoPE parameter in a config, by the key of each place."""
    places: dict[str, dict[str, Any]] = {}
    for place in PLACES:
        value: Json = config.get(place)
        for name, stated in value.items() if isinstance(value, Mapping) else ():
            if stated is not None:
                # DeepSeek's code reads `type`, transformers `rope_type`.
                key = "rope_type" if name == "type" else name
                one = "yarn" if (key, stated) == ("rope_type", "deepseek_yarn") else stated
                places.setdefault(key, {})[f"{place}.{name}"] = one
    for name in ("rope_theta", "partial_rotary_factor"):
        if config.get(name) is not None:
            places.setdefault(name, {})[name] = config[name]
    return places


def _merge(config: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """Return each parameter's single value."""
    for place in PLACES:
        value: Json = config.get(place)
        if value is not None and not isinstance(value, Mapping):
            error = ConfigInvalid(
                f"the RoPE parameters are {value!r}, not an object",
                where=in_config(place),
                fix="Export it again.",
            )
            problems.append(error.problem(INVALID))
    merged: dict[str, Any] = {}
    for key, places in stated_places(config).items():
        merged[key], *others = places.values()
        if any(value != merged[key] for value in others):
            said = ", ".join(f"{place} is {value!r}" for place, value in places.items())
            error = ConfigInvalid(
                f"the config states RoPE's {key} twice, with different values: {said}",
                where=in_config("rope_theta, rope_scaling, rope_parameters"),
                fix="Keep the value that the head was trained with. Engines differ in which they read.",
            )
            problems.append(error.problem("K160"))
    return merged


def _number(name: str, value: object) -> float:
    """Return a parameter as the required number: a whole count of tokens, mscale from 0, any other above 0."""
    is_count = name == "original_max_position_embeddings"
    least, most = BOUNDS.get(name, (0.0, MOST))
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= sys.float_info.max:
        if is_count:
            # Like every count in a config: one of 300 digits could be written but not read again.
            if 0 < value < 2**31 and value == int(value):
                return int(value)
        elif least <= value <= most and (value > 0 or name in ("mscale", "mscale_all_dim")):
            return float(value)
    bounded = f"number from {least:g} to {most:g}" if name in BOUNDS else f"positive number up to {MOST:g}"
    kind = "whole number of tokens below 2**31" if is_count else bounded
    raise ConfigInvalid(
        f"RoPE's {name} is {value!r}, not a {kind}", where=in_config(), fix="Correct the key.", code=INVALID
    )
