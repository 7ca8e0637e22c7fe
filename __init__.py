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
from types import ModuleType
from typing import Any

from .errors import KconvError, Problem

__all__ = ["KconvError", "Problem"]


class _OperationPackage(ModuleType):
    """A package that shares its name with an operation: both `kconv.convert(...)` and `kconv.convert.plan` work."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return _function(self.__name__.rpartition(".")[2])(*args, **options)

    @property
    def __signature__(self) -> Any:
        return _function(self.__name__.rpartition(".")[2]).__signature__

    @property
    def __doc__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The function's own help, which `help(kconv.convert)` shows first."""
        name = self.__name__.rpartition(".")[2]
        function = _function(name)
        return f"{_operations().OPERATIONS[name].summary}\n\nkconv.{name}{function.__signature__}\n\n{function.__doc__}"


def _callable(name: str) -> None:
    """Let a package be called as the operation of the same name."""
    sys.modules[name].__class__ = _OperationPackage


def _operations(module: str = "") -> Any:
    """Import the operations on first use, by name: every package of kconv imports this one."""
    return import_module(f".operations{module}", __name__)


def _function(name: str) -> Any:
    return _operations(".base").function(_operations().load(name), name)


def __getattr__(name: str) -> Any:
    """Return an operation on first access, so that `import kconv` imports nothing heavy."""
    from importlib.util import find_spec

    if name not in _operations().OPERATIONS:
        raise AttributeError(f"module 'kconv' has no attribute {name!r}")
    return import_module(f".{name}", __name__) if find_spec(f"{__name__}.{name}") else _function(name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_operations().OPERATIONS])
