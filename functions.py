"""kconv's functions, made of the operations on first use; a package that shares its name with one can be called."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


def operations(module: str = "") -> Any:
    """Import the operations by name: every package of kconv imports this file."""
    return import_module(f"kconv.operations{module}")


def function(name: str) -> Any:
    """Return an operation as a function."""
    return operations(".base").function(operations().load(name), name)


class OperationPackage(ModuleType):
    """A package that shares its name with an operation: both `kconv.convert(...)` and `kconv.convert.plan` work."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return function(self.__name__.rpartition(".")[2])(*args, **options)

    @property
    def __signature__(self) -> Any:
        return function(self.__name__.rpartition(".")[2]).__signature__

    @property
    def __doc__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The function's own help, which `help(kconv.convert)` shows first."""
        name = self.__name__.rpartition(".")[2]
        call = function(name)
        return f"{operations().OPERATIONS[name].summary}\n\nkconv.{name}{call.__signature__}\n\n{call.__doc__}"


def make_callable(name: str) -> None:
    """Let a package be called as the operation of the same name."""
    sys.modules[name].__class__ = OperationPackage
