"""Marks by which layouts are told apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def eagle_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config's eagle_config, empty where it has none."""
    nested = config.get("eagle_config")
    return nested if isinstance(nested, Mapping) else {}


def has_midlayer(names: Iterable[str]) -> bool:
    """Say whether the decoder layer bears the name that trainers give it, and engines replace."""
    return any(name.startswith("midlayer.") for name in names)


def has_vocabulary(names: Iterable[str]) -> bool:
    """Say whether the head carries both maps of its vocabulary, as trainers with buffers for them save it."""
    return {"d2t", "t2d"} <= set(names)


def is_called(config: Mapping[str, Any], architecture: str) -> bool:
    """Say whether a config names this architecture alone."""
    return config.get("architectures") == [architecture]
