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
    yield "The JSON files that kconv writes, with the keys of the outermost object. The linked JSON schemas have"
    yield "every key, with its type and meaning. Each file states its `schema`; a reader refuses any other."
    for name, model in FILES.items():
        yield from ("", f"## {name}", "")
        yield from (f"{_about(model)} [JSON schema](../{schema_name(name)}).", "", *_keys(model))


def _about(model: type[BaseModel]) -> str:
    return (inspect.getdoc(model) or "").partition("\n")[0].partition(";")[0].rstrip(".") + "."


def _keys(model: type[BaseModel]) -> Iterator[str]:
    """Yield a model's keys, those of one meaning together."""
    meanings, together = attributes(model), dict[str, list[str]]()
    for name, field in model.__pydantic_fields__.items():
        if name in meanings:
            together.setdefault(meanings[name], []).append(f"`{field.alias or name}`")
    yield from (f"- {', '.join(names)}: {meaning}" for meaning, names in together.items())


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
