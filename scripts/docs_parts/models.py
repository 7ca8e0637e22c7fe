"""Schemas, the page of them, and the tables of a model's keys: from types and their docstrings' attributes."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import or_
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from kconv.bench.acceptance import AcceptanceFile
from kconv.checkpoint.manifest import Manifest
from kconv.cli.outputs import OUTPUTS, DemoOutput, Failure
from kconv.targets.states import StatesRecord
from kconv.validate.report import Report


def schemas() -> Iterator[str]:
    yield "Each schema has every key with its type and meaning."
    yield from ("", "## Files", "", "Each file states its `schema`; a reader refuses any other.", "")
    yield from (f"- [{name}](../{schema_name(name)}): {_about(model)}" for name, model in FILES.items())
    yield from (
        "",
        "## What `--json` prints",
        "",
        "One object on stdout, also for an error.",
    )
    yield from ("", "| command | prints |", "|---|---|")
    for name, (first, *others) in PRINTED.items():
        shown = "any command that fails" if name == "error" else f"`kconv {name}`"
        own = next((file for file, model in FILES.items() if (first, *others) == (model,)), "")
        page = schema_name(own) if own else f"schemas/{name}.schema.json"
        either = "".join(f" Or: {_about(one)}" for one in others)
        yield f"| {shown} | [schema](../{page}): {_about(first)}{either} |"


def _about(model: type) -> str:
    return (inspect.getdoc(model) or "").partition("\n")[0].partition(";")[0].rstrip(".:") + "."


FILES: Mapping[str, type[BaseModel]] = {
    "kconv.json": Manifest, "report.json": Report, "acceptance.json": AcceptanceFile, "states.json": StatesRecord,
}  # fmt: skip
# What each command prints, by its name on the command line, and an error.
PRINTED: Mapping[str, tuple[type, ...]] = {
    **{"to-vllm" if name == "convert" else name.replace("_", "-"): types for name, types in OUTPUTS.items()},
    "error": (Failure,),
}


class Described(GenerateJsonSchema):
    """Gives each key the meaning that its class's docstring has for it."""

    def model_schema(self, schema: Any) -> Any:
        return self._describe(super().model_schema(schema), schema["cls"])

    def dataclass_schema(self, schema: Any) -> Any:
        return self._describe(super().dataclass_schema(schema), schema["cls"])

    def _describe(self, made: Any, cls: type) -> Any:
        meanings = attributes(cls)
        for name, key in made.get("properties", {}).items():
            key |= {"description": meanings[name]} if name in meanings else {}
        # A reader of the JSON knows no class.
        return made | {"description": _about(cls)}


def schema_of(*types: type) -> str:
    """Return the JSON schema of an object of one of these types; a report states every key."""
    mode = "serialization" if Report in types or DemoOutput in types else "validation"
    either = reduce(or_, types)
    made = TypeAdapter(either).json_schema(by_alias=True, mode=mode, schema_generator=Described)
    return json.dumps(made, indent=1) + "\n"


def schema_files() -> dict[str, str]:
    """Return the text of each schema, by its path in docs/."""
    found = {schema_name(name): schema_of(model) for name, model in FILES.items()}
    own = {name: types for name, types in PRINTED.items() if types not in {(model,) for model in FILES.values()}}
    return found | {f"schemas/{name}.schema.json": schema_of(*types) for name, types in own.items()}


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
