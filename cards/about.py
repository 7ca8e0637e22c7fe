"""Which head evidence is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..bench.acceptance import Acceptance
from ..checkpoint.bytes import file_digest
from ..checkpoint.manifest import Manifest
from ..validate.report import Report

CONFIG = "config.json"


@dataclass(frozen=True)
class Identity:
    """What names a head: the sha256 of each weight file by name, and of its config.json ("" where it has none)."""

    weights: Mapping[str, str]
    config: str


def identify(folder: Path, manifest: Manifest | None) -> Identity:
    """Return what names a folder's head: as the manifest has it, or, where kconv did not make it, by its bytes."""
    if manifest is not None:
        return Identity(manifest.weight_files, {file.name: file.sha256 for file in manifest.files}.get(CONFIG, ""))
    weights = {file.name: file_digest(file) for file in sorted(folder.glob("*.safetensors"))}
    return Identity(weights, file_digest(folder / CONFIG) if (folder / CONFIG).is_file() else "")


def foreign(evidence: Report | Acceptance, head: Identity) -> str:
    """Say what evidence is of that a head is not, e.g. "other weights than this folder's"; "" where it is of it."""
    if evidence.weights != head.weights:
        return "other weights than this folder's"
    # The same weights under another config, e.g. of other captured layers, draft otherwise.
    return "" if evidence.config == head.config else "another config.json than this folder's"
