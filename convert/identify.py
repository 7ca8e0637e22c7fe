"""What a checkpoint is if not a drafter, and which target a head's files name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..checkpoint.schema import Json, parse_yaml, read_text
from ..checkpoint.source import Source
from ..drafters.base import Config, Kind, Names
from ..drafters.captured import TARGET
from ..drafters.registry import drafters, is_claimed
from ..errors import KconvError, NotACheckpoint, Problem, UnknownLayout, in_config

# A head's README takes some kilobytes, its front matter some lines.
README_BYTES = 1_000_000
FRONT_MATTER = re.compile(r"\A---[ \t\r]*\n(.*?)\n---[ \t\r]*$", re.DOTALL | re.MULTILINE)
# A name that the Hub would accept for a repository: nothing else from an untrusted file becomes part of a command.
REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


# Names that only a target has: its own layers, under the prefixes of Kimi-K2 and Kimi-K2.5.
TARGET_LAYERS = ("model.layers.", "language_model.model.layers.")
LORA = Kind(
    "LoRA",
    "a LoRA adapter, not a draft head",
    "Merge it into its base model; that may then be a --target.",
    lambda _, names: any(".lora_A." in name or ".lora_B." in name for name in names),
)
WHOLE_MODEL = Kind(
    "target",
    "a whole model, not a draft head",
    "Pass it to kconv validate, or as --target.",
    lambda config, names: (
        not is_claimed(config, names)
        and (any(name.startswith(TARGET_LAYERS) for name in names) or _of_deepseek_v4(names))
    ),
)


def _of_deepseek_v4(names: Names) -> bool:
    """Return whether tensors have the names of DeepSeek-V4, whose layers stand under no prefix."""
    return "embed.weight" in names and any(name.startswith("layers.") and ".ffn." in name for name in names)


def identify(config: Config, names: Names) -> Kind | None:
    """Return what a checkpoint is if its marks show something other than a known drafter; None if nothing shows it."""
    if LORA.marks(config, names):
        return LORA
    for one in drafters():
        if relative := next((kind for kind in one.relatives if kind.marks(config, names)), None):
            return relative
        if one.marks(config, names):
            return None
    return WHOLE_MODEL if WHOLE_MODEL.marks(config, names) else None


def not_a_head(kind: Kind, config: Config) -> Problem:
    stated = [f"{key} {config[key]!r}" for key in ("architectures", "model_type") if config.get(key)]
    what = f"this is {kind.what}{': ' if stated else ''}{', '.join(stated)}"
    error = UnknownLayout(what, where=in_config(), fix=kind.fix)
    return error.problem("K004")


def named_targets(source: Source, config: Config) -> tuple[str, ...]:
    """Return the targets that a head's files name, as hub ids: its config's verifier, and its README's base models.

    DeepSpec's configs name their target too. Without a connection a README on the Hub names none.
    """
    models: list[Any] = []
    with suppress(KconvError):
        models = _base_models(source.fetch_readme())
    speculators: Json = config.get("speculators_config")
    verifier: Json = speculators.get("verifier") if isinstance(speculators, Mapping) else None
    names = [verifier.get("name_or_path")] if isinstance(verifier, Mapping) else []
    found = (*names, config.get("target_model_name_or_path"), *models)
    return tuple(dict.fromkeys(name for name in found if isinstance(name, str) and REPO.fullmatch(name)))


def name_target(needs: str, fix: str, source: Source, config: Config) -> tuple[str, str]:
    """Return what decides a fact left open, and its fix, with the target that the head's own files name."""
    if needs != TARGET or not (named := named_targets(source, config)):
        return needs, fix
    return f"{TARGET} {named[0]}", f"{fix} The head's own files name its target: {TARGET} {named[0]}."


def _base_models(folder: Path) -> list[Any]:
    """Return base_model from the front matter of a folder's README; nothing if it cannot be read."""
    readme = folder / "README.md"
    try:
        text = read_text(readme, NotACheckpoint, limit=README_BYTES, fix="")
        found = FRONT_MATTER.search(text)
        matter: Json = None
        if found:
            matter = parse_yaml(found[1], NotACheckpoint, where=readme, what="front matter", fix="")
    except NotACheckpoint:
        return []
    named: Json = matter.get("base_model") if isinstance(matter, Mapping) else None
    return named if isinstance(named, list) else [named]
