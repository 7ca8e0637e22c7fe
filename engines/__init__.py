"""Engines and trainers: their layouts of a draft head, and everything kconv knows about each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import registry
from .registry import by_name, detect, writable

if TYPE_CHECKING:
    from .layout import Layout

    BY_NAME: dict[str, Layout]
    LAYOUTS: tuple[Layout, ...]
    MODELOPT: Layout
    TRTLLM: Layout

__all__ = ["BY_NAME", "LAYOUTS", "MODELOPT", "TRTLLM", "by_name", "detect", "writable"]


def __getattr__(name: str) -> Any:
    """Load kconv's own layouts on first use. Product code asks the registry, which knows other packages' too."""
    if name == "LAYOUTS":
        return registry.LAYOUTS
    if name == "BY_NAME":
        return {layout.name: layout for layout in registry.LAYOUTS}
    if name in ("MODELOPT", "TRTLLM"):
        return by_name(name.lower())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
