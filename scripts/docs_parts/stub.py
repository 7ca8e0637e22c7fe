"""Write `__init__.pyi`, the signatures of kconv's functions, from the operations.

scripts/docs stub            write it
scripts/docs stub --check    exit 1 if it is not current
"""

from __future__ import annotations

import argparse
import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from textwrap import indent

from kconv.operations import OPERATIONS, load
from kconv.operations.base import Operation, describe, in_python, parameter_type
from kconv.options import marks

STUB = Path(__file__).resolve().parents[2] / "__init__.pyi"
HEADER = '''"""Eagle3 draft heads, from the trainer to the engines, with proof at every step."""

# Made by scripts/docs stub, from the operations.
'''


def stub() -> str:
    """Return the stub's text."""
    functions = [signature(name, load(name)) for name in OPERATIONS]
    results = {result for name in OPERATIONS for result in results_of(load(name))}
    imports = [
        "from collections.abc import Mapping, Sequence",
        "from os import PathLike",
        "from typing import Any, Literal",
        *(f"from .{module} import {name}" for module, name in results),
        "from .errors import KconvError as KconvError, Problem as Problem",
        "_Path = str | PathLike[str]",
    ]
    text = "\n".join([HEADER, *imports, *functions])
    for command in (["check", "--quiet", "--fix", "--select=I"], ["format", "--quiet"]):
        text = subprocess.run(
            [Path(sys.executable).parent / "ruff", *command, f"--stdin-filename={STUB}", "-"],
            input=text, stdout=subprocess.PIPE, text=True, check=True,
        ).stdout  # fmt: skip
    return text


def signature(name: str, cls: type[Operation]) -> str:
    """Return one function's stub, with its options in its docstring."""
    places, options = [], []
    for field, info in in_python(cls):
        default = "" if info.is_required() else f" = {info.get_default(call_default_factory=True)!r}"
        (places if marks(info).argument else options).append(f"    {field}: {parameter_type(info)}{default},")
    star = ["    *,"] if options else []
    returns = inspect.signature(cls.run).return_annotation
    body = f'"""{indent(describe(cls), "    ").strip()}\n    """'
    return "\n".join([f"def {name}(", *places, *star, *options, f") -> {returns}:", f"    {body}", ""])


def results_of(cls: type[Operation]) -> Iterator[tuple[str, str]]:
    """Yield the module, within kconv, and the name of each class that an operation may return."""
    module = import_module(cls.__module__)
    source = ast.parse(inspect.getsource(module))
    imported = {
        alias.name: ("operations." if node.level == 1 else "") + (node.module or "")
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    for name in inspect.signature(cls.run).return_annotation.split(" | "):
        yield imported.get(name, module.__name__.removeprefix("kconv.")), name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it is not current")
    text = stub()
    if not parser.parse_args().check:
        STUB.write_text(text)
    elif not STUB.exists() or STUB.read_text() != text:
        print(f"{STUB.name} is not current")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
