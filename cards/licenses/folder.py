"""A head's folder as the checks of its licenses see it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...checkpoint.manifest import MANIFEST, Manifest, read_manifest
from ..evidence import Evidence
from ..facts import Facts
from ..front_matter import source_head
from .files import NOTICE, SOURCE_LICENSE, Text, find_texts
from .license import LICENSES, License

CARD = "README.md"
FRONT = re.compile(r"\A---\r?\n(?P<yaml>.*?)\r?\n---\r?\n", re.DOTALL)


@dataclass(frozen=True)
class Folder:
    """A folder as the checks see it.

    Attributes:
        path: where it lies.
        card: README.md's text, "" where there is none.
        front: its front matter, empty where there is none that can be read.
        notice: NOTICE's text.
        texts: license texts in it.
        source_license: the source's, where it went along as one that was not stated.
        manifest: how kconv made it; None where it did not.
        facts: what its owner says.
    """

    path: Path
    card: str
    front: Mapping[str, Any]
    notice: str
    texts: tuple[Text, ...]
    source_license: str
    manifest: Manifest | None
    facts: Facts

    @property
    def source(self) -> str:
        """The hub id of the head it was made from, or is; "" where none is known."""
        evidence = Evidence(self.path, self.facts, self.manifest)
        return source_head(evidence) or ("" if self.manifest else self.facts.name or "")

    @property
    def license(self) -> str:
        """The head's license by kconv's id, as its owner or its card states it; "" where neither does."""
        stated = str(self.facts.license.id or self.front.get("license_name") or self.front.get("license"))
        return stated if stated in LICENSES else ""

    @property
    def bases(self) -> list[str]:
        """What the card lists as base models."""
        bases = self.front.get("base_model") or []
        return [bases] if isinstance(bases, str) else list(bases)

    @property
    def target(self) -> str:
        """The hub id of the target, "" where none is known."""
        return self.facts.base_model or next((base for base in self.bases if base != self.source), "")

    def text_of(self, license: License) -> Text | None:
        """Return the text of a license that lies in the folder."""
        return next((text for text in self.texts if text.license.id == license.id), None)


def read_folder(path: Path, facts: Facts) -> Folder:
    """Read what a folder says.

    Raises:
        ManifestMismatch: kconv.json is there and not of the schema.
    """
    card = _read(path / CARD)
    return Folder(
        path=path,
        card=card,
        front=_front_matter(card),
        notice=_read(path / NOTICE),
        texts=find_texts([path]),
        source_license=_read(path / SOURCE_LICENSE),
        manifest=read_manifest(path) if (path / MANIFEST).exists() else None,
        facts=facts,
    )


def _front_matter(card: str) -> Mapping[str, Any]:
    found = FRONT.match(card)
    try:
        value = yaml.safe_load(found["yaml"]) if found else None
    except yaml.YAMLError:
        value = None
    return value if isinstance(value, dict) else {}


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
