"""A facts file to fill in: every key of `Facts`, with its question as a comment."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ..checkpoint.manifest import MANIFEST, read_manifest
from ..checkpoint.staging import refuse_existing
from ..engines.registry import engines
from ..errors import OutputFailed
from .facts import NOTED, SUBCARDS, Facts
from .licenses import NAMES
from .sections import known

HEADING = """\
# Facts that no file of the head states. Fill in what you know and leave the rest: the card omits empty keys.
# {known}kconv card HEAD --facts {file} --missing lists what a style of card still needs.
"""
# Keys whose entries have names of their own, with an example.
EXAMPLES = {
    "references": ['- {title: "EAGLE-3", url: "https://arxiv.org/abs/2503.01840"}'],
    "training.datasets": ["- {name: , id: , url: , size: , modality: , collection: , labeling: , properties: }"],
    "evaluation": ["- {name: , url: , size: , collection: , labeling: , properties: }"],
    "serve": ["{engine}: {{requires: , target: , arguments: [], config: , note: , unsupported: }}"],
    "expected": ["MT-Bench: [writing, roleplay, reasoning, math, coding, extraction, stem, humanities]"],
    "sources": ["- {title: , url: }"],
}


def write_facts(file: Path, facts: Facts, head: Path, *, force: bool = False) -> Path:
    """Write a facts file to fill in.

    Args:
        facts: what is already known, e.g. from options; it is filled in.
        head: a head's folder, whose manifest may know some facts; these go into comments.

    Raises:
        OutputExists: the file exists.
        OutputFailed: it cannot be written.
        ManifestMismatch: the head's kconv.json does not match the schema.
    """
    if not force:
        refuse_existing(file, fix="Choose another name for --init, or pass --force to overwrite it.")
    found = known(read_manifest(head)) if (head / MANIFEST).is_file() else {}
    try:
        file.write_text(facts_text(facts, found, file.name), encoding="utf-8")
    except OSError as fault:
        raise OutputFailed(
            f"the facts file cannot be written: {fault.strerror}", where=file, fix="Choose another name for --init."
        ) from fault
    return file


def facts_text(facts: Facts, found: dict[str, str], name: str) -> str:
    """Return the text of a facts file.

    Args:
        found: the manifest's statements, by dotted name.
    """
    heading = HEADING.format(
        file=name, known=f"Comments after the keys show what {MANIFEST} says.\n# " if found else ""
    )
    return heading + "\n" + "\n".join(_lines(facts, found, "")) + "\n"


def _lines(model: BaseModel, found: dict[str, str], prefix: str) -> Iterator[str]:
    depth = "  " * prefix.count(".")
    for key, info in type(model).model_fields.items():
        path, value = f"{prefix}{key}", getattr(model, key)
        if isinstance(value, BaseModel):
            yield f"{depth}{key}:"
            yield from _lines(value, found, f"{path}.")
            continue
        said = "; ".join(filter(None, (info.description, _choices(path), found.get(path) and f"known: {found[path]}")))
        comment = f"  # {' '.join(said.split())}" if said else ""
        if _is_plain(info):
            yield f"{depth}{key}:{_scalar(value)}{comment}"
        elif value:
            plain = model.model_dump(mode="json", include={key}, exclude_none=True)
            yield from (depth + line for line in yaml.safe_dump(plain, sort_keys=False).splitlines())
        else:
            # An empty list or mapping is not a value of its key.
            yield f"{depth}# {key}:{comment}"
            yield from (f"{depth}#   {line}" for line in _example(path))


def _example(path: str) -> list[str]:
    if path == "subcards":
        return [line for card, rows in SUBCARDS.items()
                for line in (f"{card}:", *(f"  {row}:  # {label}" for row, label in rows.items()))]  # fmt: skip
    if path == "notes":
        return [f"{section}: []" for section in NOTED]
    if path == "serve":
        return [EXAMPLES["serve"][0].format(engine=engine.name) for engine in engines() if engine.launch]
    return EXAMPLES.get(path, ["- "])


def _choices(path: str) -> str:
    return NAMES if path in ("license.id", "license.target") else ""


def _is_plain(info: FieldInfo) -> bool:
    """Return whether a field holds a single text or truth value."""
    kinds = get_args(info.annotation) if get_origin(info.annotation) in (Union, types.UnionType) else (info.annotation,)
    return not any(get_origin(kind) in (tuple, dict) for kind in kinds)


def _scalar(value: Any) -> str:
    if value is None:
        return ""
    return " " + yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")
