"""Figures of docs/attention.md as they are kept.

A run that was cut short goes on where it ended, so a figure is written as soon as it is there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from kconv.tiny.recipe import cache_root

from .machine import memory, processor

# Raise it with each change that alters a figure.
VERSION = "3"
MACHINES = "machine"


def store(name: str) -> Path:
    """Return the file that holds some figures: a bed's, or a part's of the page."""
    return cache_root() / f"bench-attention-{VERSION}-{name}.json"


def load(name: str) -> dict[str, Any]:
    """Return the figures of that name; none where none were measured."""
    return json.loads(store(name).read_text()) if store(name).exists() else {}


def save(name: str, found: dict[str, Any]) -> None:
    """Write figures that were measured on this machine."""
    store(name).write_text(json.dumps(found, indent=1))
    here = f"{os.cpu_count()} cores of {processor()}, {memory():.0f} GiB of memory, torch {torch.__version__}"
    if name != MACHINES:
        save(MACHINES, load(MACHINES) | {name: here})


def measured_on(*names: str) -> str:
    """Say which machines some figures were measured on; nothing of those that were not measured."""
    known = load(MACHINES)
    return "; ".join(dict.fromkeys(known[name] for name in names if name in known))
