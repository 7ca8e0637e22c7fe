"""Engines and trainers: their layouts of a draft head, and all that kconv knows of each. See `registry`."""

from __future__ import annotations

from .registry import LAYOUTS, MODELOPT, by_name, detect, writable
from .trtllm import TRTLLM

# kconv's own layouts. Product code asks the registry, which knows other packages' too.
BY_NAME = {layout.name: layout for layout in LAYOUTS}

__all__ = ["BY_NAME", "LAYOUTS", "MODELOPT", "TRTLLM", "by_name", "detect", "writable"]
