"""Eagle3 draft heads, from the trainer to the engines, with proof at every step.

Each operation is a function, and takes what its command and its recipe step take:

    import kconv

    kconv.inspect("org/head")
    kconv.convert("org/head", "out", to="vllm")
    kconv.validate("out", source="org/head", for_="vllm")

`help(kconv.convert)` shows an operation's options. An error is a `KconvError` with a `code`, `what` is wrong,
`where`, and how to `fix` it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from . import functions
from .errors import KconvError, Problem

__all__ = ["KconvError", "Problem"]


def __getattr__(name: str) -> Any:
    """Return an operation on first access, so that `import kconv` imports nothing heavy."""
    from importlib.util import find_spec

    if name not in functions.operations().OPERATIONS:
        layout = name.removeprefix("to_")
        instead = f"; write kconv.convert(HEAD, OUT, to={layout!r})" if layout != name else ""
        raise AttributeError(f"module 'kconv' has no attribute {name!r}{instead}", name=name, obj=sys.modules[__name__])
    return import_module(f".{name}", __name__) if find_spec(f"{__name__}.{name}") else functions.function(name)


def __dir__() -> list[str]:
    return sorted([*__all__, *functions.operations().OPERATIONS])
