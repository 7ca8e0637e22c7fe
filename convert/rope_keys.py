"""RoPE in a config, in the spellings of transformers 4 and 5. What belongs here: reading them as one, writing both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigInvalid, ConfigUnsupported
from ..head.spec import Linear, Llama3, Rope, Yarn

# Where each scaling's parameters stand in rope_scaling and rope_parameters.
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
ALIASES = {"deepseek_yarn": "yarn", "default": None}

# transformers 4's default, which holds where neither spelling states a theta:
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
    kind = stated.pop("rope_type", "default")
    kind = ALIASES.get(kind, kind)
    if kind is None:
        return Rope(theta, None, partial)
    if kind not in SCALINGS:
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
    values = {field: _number(name, stated[name]) for name, field in names.items() if stated.get(name) is not None}
    if "original_max_positions" in values:
        values["original_max_positions"] = int(values["original_max_positions"])
    try:
        return Rope(theta, scaling(**values), partial)
    except TypeError as fault:
        missing = [name for name, field in names.items() if field in str(fault)]
        raise ConfigInvalid(
            f"RoPE scaling {kind} lacks {', '.join(missing)}",
            where="config.json: rope_scaling",
            fix="Engines fall back to different defaults; state what the head was trained with.",
        ) from fault


def write_rope(rope: Rope) -> dict[str, Any]:
    """Return the config keys of a RoPE, in both spellings, with no value left to an engine's default."""
    scaling: dict[str, Any] = {}
    for kind, (cls, names) in SCALINGS.items():
        if isinstance(rope.scaling, cls):
            stated = {name: getattr(rope.scaling, field) for name, field in names.items()}
            # DeepSeek's code reads `type`, transformers `rope_type`.
            scaling = {"type": kind, "rope_type": kind} | {k: v for k, v in stated.items() if v is not None}
    keys: dict[str, Any] = {"rope_theta": rope.theta}
    parameters = {"rope_type": "default"} | scaling | {"rope_theta": rope.theta}
    if scaling:
        keys["rope_scaling"] = scaling | {"rope_theta": rope.theta}
    if rope.partial_rotary_factor != 1.0:
        keys["partial_rotary_factor"] = parameters["partial_rotary_factor"] = rope.partial_rotary_factor
    return keys | {"rope_parameters": parameters}


def _merge(config: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    places = [config.get("rope_scaling"), config.get("rope_parameters")]
    places.append({k: config[k] for k in ("rope_theta", "partial_rotary_factor") if k in config})
    for place in places:
        if place is None:
            continue
        if not isinstance(place, Mapping):
            raise ConfigInvalid("rope_scaling is not an object", where="config.json")
        renamed = {("rope_type" if k == "type" else k): v for k, v in place.items() if v is not None}
        both = {"type", "rope_type"} <= place.keys()
        if both and ALIASES.get(place["type"], place["type"]) != ALIASES.get(place["rope_type"], place["rope_type"]):
            _contradict("type", place["type"], place["rope_type"])
        for key, value in renamed.items():
            if key in merged and merged[key] != value and {merged[key], value} != {"yarn", "deepseek_yarn"}:
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
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    if name in ("mscale", "mscale_all_dim") and value == 0:
        return 0.0
    raise ConfigInvalid(f"RoPE's {name} is {value!r}, not a positive number", where="config.json")
