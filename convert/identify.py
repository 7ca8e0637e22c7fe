"""What a checkpoint is if not an Eagle3 head, and which target a head's files name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.schema import parse_yaml, read_text
from ..checkpoint.source import Source
from ..errors import KconvError, NotACheckpoint, Problem, UnknownLayout
from .captured import TARGET
from .facts import Config, Names, stored_layers

# A head's README takes some kilobytes, its front matter some lines.
README_BYTES = 1_000_000
FRONT_MATTER = re.compile(r"\A---[ \t\r]*\n(.*?)\n---[ \t\r]*$", re.DOTALL | re.MULTILINE)
# A name that the Hub would accept for a repository: nothing else from an untrusted file becomes part of a command.
REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True)
class Kind:
    """A kind of draft model or checkpoint other than an Eagle3 head.

    Attributes:
        name: its name in `kconv inspect`.
        what: a phrase that says what it is, after "this is".
        fix: what to do with it.
        marks: whether a config and tensor names identify it.
        is_head: whether its files are still read as far as possible as those of an Eagle3 head.
    """

    name: str
    what: str
    fix: str
    marks: Callable[[Config, Names], bool]
    is_head: bool = False


def _architectures(config: Config) -> str:
    names = config.get("architectures")
    return " ".join(map(str, names)) if isinstance(names, list) else str(names)


def _has(names: Names, *ends: str) -> bool:
    return any(name.endswith(ends) for name in names)


def _has_fc(names: Names) -> bool:
    return _has(names, "fc.weight")


# Names that an Eagle3 head has but the drafts of EAGLE-1 and EAGLE-2 do not: the norm of the fed-back state.
# https://github.com/SafeAILab/EAGLE/blob/cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b/eagle/model/cnets1.py#L487
# https://github.com/SafeAILab/EAGLE/blob/cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b/eagle/model/cnets.py#L438
_IN_LAYER = re.compile(r"(?:^|\.)(?:midlayer|layers)\.(?:\d+\.)?hidden_norm\.weight$")


def _is_eagle1(config: Config, names: Names) -> bool:
    fc = names.get("fc.weight")
    two_wide = fc is not None and len(fc.shape) == 2 and fc.shape[1] == 2 * fc.shape[0]
    return two_wide and not any(map(_IN_LAYER.search, names)) and bool(stored_layers(names))


def _drafts_blocks(config: Config, word: str) -> bool:
    said = f"{_architectures(config)} {config.get('speculators_model_type')}".lower()
    projector = config.get("dflash_config")
    kind = projector.get("projector_type") if isinstance(projector, Mapping) else ""
    return word in said or kind == word


OTHER_METHOD = "Serve it with its own method (`method` in vLLM's --speculative-config); it does not need kconv."
# In order: the first kind whose marks fit a checkpoint wins.
KINDS = (
    Kind(
        "LoRA",
        "a LoRA adapter, not a draft head",
        "Merge it into its base model; that may then be a --target.",
        lambda _, names: any(".lora_A." in name or ".lora_B." in name for name in names),
    ),
    Kind(
        "Medusa",
        "a Medusa draft (heads on the last hidden state), not an Eagle3 head",
        OTHER_METHOD,
        lambda config, _: "medusa_num_heads" in config or "medusa" in _architectures(config).lower(),
    ),
    Kind(
        "DSpark",
        "a DSpark draft (a block drafter), not an Eagle3 head",
        OTHER_METHOD,
        lambda config, _: _drafts_blocks(config, "dspark"),
    ),
    Kind(
        "DFlash",
        "a DFlash draft (a block drafter), not an Eagle3 head",
        OTHER_METHOD,
        lambda config, _: _drafts_blocks(config, "dflash"),
    ),
    Kind(
        "MTP",
        "a multi-token-prediction (MTP) layer of a target, not an Eagle3 head",
        "Serve it with the engine's own mtp method; kconv has nothing to convert.",
        lambda _, names: _has(names, "eh_proj.weight", ".enorm.weight", "mtp.fc.weight") and stored_layers(names) < 3,
    ),
    Kind(
        "P-EAGLE",
        "a P-EAGLE head (it drafts all tokens in parallel, from mask_hidden), not a plain Eagle3 head",
        "Serve it with an engine that has parallel drafting; kconv does not convert these.",
        lambda config, names: _has(names, "mask_hidden") or config.get("parallel_drafting") is True,
        is_head=True,
    ),
    Kind(
        "Kimi-K3 head",
        "an Eagle3 head for Kimi-K3, whose attention has no RoPE",
        "Serve it with the engine that it was made for; kconv does not support Kimi-K3 heads yet.",
        lambda config, _: config.get("mla_use_nope") is True,
        is_head=True,
    ),
    Kind(
        "EAGLE-1/2",
        "a draft of EAGLE-1 or EAGLE-2 (its fc takes two hidden sizes, and no layer has a hidden_norm)",
        "Serve it with the engine's eagle method; kconv converts Eagle3 heads.",
        _is_eagle1,
    ),
    Kind(
        "target",
        "a whole model, not a draft head",
        "Pass it to kconv validate, or as --target.",
        lambda config, names: (
            not _has_fc(names)
            and "eagle_config" not in config
            and any(name.startswith(("model.layers.", "language_model.model.layers.")) for name in names)
        ),
    ),
)


def identify(config: Config, names: Names) -> Kind | None:
    """Return what a checkpoint is if its marks show something other than an Eagle3 head; None if nothing shows it."""
    return next((kind for kind in KINDS if kind.marks(config, names)), None)


def looks_like_eagle3(names: Names) -> bool:
    """Return whether tensor names are an Eagle3 head's, under any prefix: fc, and a norm in its layer."""
    return _has_fc(names) and any(map(_IN_LAYER.search, names))


def not_a_head(kind: Kind, config: Config) -> Problem:
    """Return the problem of a checkpoint that is not a head."""
    stated = [f"{key} {config[key]!r}" for key in ("architectures", "model_type") if config.get(key)]
    what = f"this is {kind.what}{': ' if stated else ''}{', '.join(stated)}"
    error = UnknownLayout(what, where="config.json", fix=kind.fix)
    return error.problem("K004")


def named_targets(source: Source, config: Config) -> tuple[str, ...]:
    """Return the targets that a head's files name, as hub ids: its config's verifier, and its README's base models.

    DeepSpec's configs name their target too. Without a connection a README on the Hub names none.

    Args:
        source: the head.
        config: its config.json.
    """
    models = []
    with suppress(KconvError):
        models = _base_models(source.fetch_readme())
    speculators = config.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, Mapping) else None
    names = [verifier.get("name_or_path")] if isinstance(verifier, Mapping) else []
    found = (*names, config.get("target_model_name_or_path"), *models)
    return tuple(dict.fromkeys(name for name in found if isinstance(name, str) and REPO.fullmatch(name)))


def name_target(needs: str, fix: str, source: Source, config: Config) -> tuple[str, str]:
    """Return what decides a fact left open, and its fix, with the target that the head's own files name.

    Args:
        needs: the option that decides it.
        fix: what to do, as an imperative sentence.
        source: the head.
        config: its config.json.
    """
    if needs != TARGET or not (named := named_targets(source, config)):
        return needs, fix
    return f"{TARGET} {named[0]}", f"{fix} The head's own files name its target: {TARGET} {named[0]}."


def _base_models(folder: Path) -> list[Any]:
    """Return base_model from the front matter of a folder's README; nothing if it cannot be read."""
    readme = folder / "README.md"
    try:
        text = read_text(readme, NotACheckpoint, limit=README_BYTES, fix="")
        found = FRONT_MATTER.search(text)
        matter = parse_yaml(found[1], NotACheckpoint, where=readme, what="front matter", fix="") if found else None
    except NotACheckpoint:
        return []
    named = matter.get("base_model") if isinstance(matter, Mapping) else None
    return named if isinstance(named, list) else [named]
