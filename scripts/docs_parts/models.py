"""The page of files, and the tables of a model's keys: from pydantic's fields and the docstrings' attributes."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from kconv.bench.acceptance import AcceptanceFile
from kconv.checkpoint.manifest import Manifest
from kconv.targets.states import StatesRecord
from kconv.validate.report import Report


def schemas() -> Iterator[str]:
    yield "The JSON files that kconv writes, each with its JSON schema, which has every key with its type and meaning."
    yield from ("Each file states its `schema`; a reader refuses any other.", "")
    yield from (f"- [{name}](../{schema_name(name)}): {_about(model)}" for name, model in FILES.items())


def _about(model: type[BaseModel]) -> str:
    return (inspect.getdoc(model) or "").partition("\n")[0].partition(";")[0].rstrip(".") + "."


FILES: Mapping[str, type[BaseModel]] = {
    "kconv.json": Manifest, "report.json": Report, "acceptance.json": AcceptanceFile, "states.json": StatesRecord,
}  # fmt: skip


def default_of(value: Any) -> str:
    plain = value is None or isinstance(value, str | int | float | tuple | dict)
    return f"`{json.dumps(value)}`" if plain else "required"


def attributes(described: type) -> dict[str, str]:
    """Return what the `Attributes:` of a docstring says of each name."""
    _, _, part = (inspect.getdoc(described) or "").partition("Attributes:\n")
    found: dict[str, str] = {}
    names: list[str] = []
    for line in part.splitlines():
        start = re.match(r"    (\w[\w, ]*): (.*)", line)
        if start:
            names = start[1].split(", ")
            found |= dict.fromkeys(names, start[2])
        elif line.startswith("     "):
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        elif line.strip():
            break
    return found


def schema_name(name: str) -> str:
    return name.replace(".json", ".schema.json")
