"""What kconv does: one typed request per operation. Nothing is imported before it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Operation

# Every operation: its name in recipes and in Python, and the class that defines it. On the command line `convert` is a
# command for each layout that can be written (`to-vllm`), and words are joined by dashes.
WHERE = {
    "tiny": "tiny:Tiny",
    "inspect": "inspect:Inspect",
    "vocab": "vocab:Vocab",
    "convert": "convert:Convert",
    "verify": "verify:Verify",
    "validate": "validate:Validate",
    "bench": "bench:Bench",
    "compare": "bench:Compare",
    "states": "states:States",
    "generate": "generate:Generate",
    "train": "train:Train",
    "calibrate": "quantize:Calibrate",
    "quantize": "quantize:Quantize",
    "quantize_head": "quantize:QuantizeHead",
    "card": "card:Card",
    "publish": "publish:Publish",
}


def load(name: str) -> type[Operation]:
    """Return an operation by its name.

    Raises:
        KeyError: there is none.
    """
    module, _, cls = WHERE[name].partition(":")
    return getattr(import_module(f".{module}", __name__), cls)
