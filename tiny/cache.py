"""Where things that were made once are kept, and under which name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

# What a recipe's outcome hangs on besides the recipe: the text is Python's, the numbers are the libraries'.
LIBRARIES = ("torch", "transformers", "tokenizers")


def cache_root() -> Path:
    """Return the folder for what can be made again: $KCONV_CACHE, else ~/.cache/kconv."""
    return Path(os.environ.get("KCONV_CACHE") or Path.home() / ".cache" / "kconv")


def recipe_key(recipe: Any, *, source: str) -> str:
    """Return 16 hex digits that name what a recipe makes on this installation.

    Args:
        recipe: a dataclass of JSON values.
        source: a constant that is raised when the code that follows the recipe changes its outcome.
    """
    parts = {
        "recipe": dataclasses.asdict(recipe),
        "source": source,
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in LIBRARIES},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]
