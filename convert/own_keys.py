"""Keys by which one layout's config differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..engines.keys import BALLAST, ConfigTable
from ..errors import ConfigInvalid, ConfigUnsupported
from .captured import Hints
from .rope_keys import states_theta

# Of a nested config and its root, the inner ones are the head's.
INNER = BALLAST | {"architectures", "model_type", "torch_dtype", "dtype"}


def unify(config: Mapping[str, Any], table: ConfigTable, hints: Hints) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Bring a layout's config to the common keys.

    Args:
        config: config.json.
        table: how the layout's differs.
        hints: what the user says where the config is silent.

    Returns:
        The config in the common keys, and the keys that were left behind.

    Raises:
        ConfigInvalid: the config contradicts itself or the user, or is silent where readers disagree.
        ConfigUnsupported: a key that means another thing in this layout asks for what kconv cannot carry.
    """
    flat = _flatten(config, table.nested) if table.nested else dict(config)
    for key, allowed in table.otherwise.items():
        if key in flat and flat[key] not in allowed:
            raise ConfigUnsupported(
                f"{key} is {flat[key]!r}; kconv carries such heads with {allowed[0]!r} only",
                where=f"config.json: {key}",
                fix="Name another layout with --from if the key means there what the head does.",
            )
    left = tuple(key for key in flat if key in table.ballast or key in table.otherwise)
    flat = {key: value for key, value in flat.items() if key not in left}
    if table.trained_theta is not None and not states_theta(flat):
        flat["rope_theta"] = table.trained_theta
    return _tell(flat, table, hints), left


def _flatten(config: Mapping[str, Any], nested: str) -> dict[str, Any]:
    inner = config.get(nested)
    if not isinstance(inner, Mapping):
        raise ConfigInvalid(
            f"{nested} is {inner!r}, not an object", where=f"config.json: {nested}", fix="Export the head again."
        )
    outer = {key: value for key, value in config.items() if key != nested}
    for key in outer.keys() & inner.keys() - INNER:
        if outer[key] != inner[key]:
            raise ConfigInvalid(
                f"the config contradicts itself: {key} is {outer[key]!r}, and in {nested} {inner[key]!r}",
                where="config.json",
                fix="Leave the one that the head was trained with.",
            )
    return outer | dict(inner)


def _tell(config: dict[str, Any], table: ConfigTable, hints: Hints) -> dict[str, Any]:
    key, told = "norm_before_residual", hints.norm_before_residual
    if told is not None:
        stated = config.get(key)
        if stated is None and key not in table.must_state and told:
            raise ConfigInvalid(
                f"{key} is not stated in the config, which readers of this layout take for false, and was told to be"
                " true",
                where=f"config.json: {key}",
                fix="Leave the option out; if the config lost the key, state it there, as the head was trained.",
            )
        if stated not in (None, told):
            raise ConfigInvalid(
                f"{key} is {stated!r} in the config, and was told to be {told!r}",
                where=f"config.json: {key}",
                fix="Leave the option out, or correct the config.",
            )
        config = config | {key: told}
    for name, why in table.must_state.items():
        if config.get(name) is None:
            raise ConfigInvalid(
                f"the config does not state {name}: {why}",
                where=f"config.json: {name}",
                fix="Say --norm-before-residual yes or no, as the head was trained.",
            )
    return config
