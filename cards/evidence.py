"""The evidence from which a card is made, and the head that it describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..bench.acceptance import AcceptanceFile
from ..bench.tables import NOT_STATED
from ..checkpoint.bytes import file_digest
from ..checkpoint.manifest import AGAIN, MANIFEST, Manifest, mismatch
from ..checkpoint.schema import find_wrong
from ..drafters.base import Drafter, Spec
from ..drafters.eagle3 import EAGLE3
from ..engines.layout import Layout
from ..engines.registry import layouts
from ..escape import markdown
from ..strict import adapter
from ..validate.report import Report
from .facts import SUBCARDS, Facts, question
from .licenses import LICENSES, UNNAMED, License, LicenseText

CONFIG = "config.json"
# Facts that a converted head's files know better than its publisher, who described the head before.
MEASURED = {"architecture.attention", "architecture.parameters", "architecture.tensor_type", "runtime.engines"}


@dataclass(frozen=True)
class Evidence:
    """Everything known about a head.

    Attributes:
        folder: its path; None if there are only facts.
        manifest: kconv's record; None for a head that kconv did not write.
        acceptance: measured and quoted figures.
        own_code: whether the target has code of its own, which an engine runs only if told to.
        source_license: the text of the source's license, if it is not one of those stated; "" otherwise.
    """

    folder: Path | None = None
    facts: Facts = field(default_factory=Facts)
    manifest: Manifest | None = None
    report: Report | None = None
    acceptance: tuple[AcceptanceFile, ...] = ()
    own_code: bool = False
    texts: tuple[LicenseText, ...] = ()
    source_license: str = ""

    @property
    def drafter(self) -> Drafter:
        """The family of the drafter; Eagle3 if its layout is unknown."""
        return self._layout.drafter if self._layout else EAGLE3

    @property
    def spec(self) -> Spec | None:
        """What a head that kconv wrote is, by its manifest; None otherwise, and for a target.

        Raises:
            ManifestMismatch: the manifest describes no drafter of its family.
        """
        if self.manifest is None or self._layout is None:
            return None
        try:
            return adapter(self.drafter.spec).validate_python(self.manifest.spec)
        except ValidationError as fault:
            raise mismatch(
                MANIFEST, f"its spec describes no {self.drafter.title}: {find_wrong(fault)}", AGAIN
            ) from fault

    @property
    def _layout(self) -> Layout | None:
        named = self.manifest.layout if self.manifest else ""
        return next((layout for layout in layouts() if layout.name == named), None)

    @property
    def name(self) -> str:
        """The card's heading."""
        return self.facts.name or (self.folder.resolve().name if self.folder else NOT_STATED)

    @property
    def licenses(self) -> tuple[License, ...]:
        """The head's own license and the target's, as far as stated."""
        stated = (self.facts.license.id, self.facts.license.target)
        return tuple(dict.fromkeys(LICENSES[name] for name in stated if name))

    @property
    def license_is_named(self) -> bool:
        """Whether the head's license is stated and has a name."""
        return self.facts.license.id not in (None, UNNAMED)


@dataclass
class Said:
    """Looks up facts for a template, and lists those that are missing.

    Attributes:
        known: further known values, by the same dotted names.
        missing: dotted names that a card needed and did not find, in order.
    """

    facts: Facts
    known: Mapping[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def __call__(self, path: str) -> str:
        """Return a fact as text, or another known value for it; "" if there is none."""
        stated, known = self._find(path), self.known.get(path) or ""
        if stated in (None, "", ()):
            if not known:
                self.missing.setdefault(path, question(Facts, path))
            return cell(known)
        if known and path in MEASURED and known != stated:
            return cell(f"{known} (its publisher states {stated})")
        return cell(stated)

    def listed(self, path: str) -> Sequence[Any]:
        """Return the entries of a list, none if there are none."""
        value = self._find(path)
        if not value:
            self.missing.setdefault(path, question(Facts, path))
            return ()
        return value

    def noted(self, section: str) -> str:
        """Return the publisher's own paragraphs for a section, "" if there are none."""
        return "\n\n".join(self.facts.notes.get(section, ()))

    def subcard(self, card: str, row: str) -> str:
        """Return a subcard's row, "" if nobody filled it in."""
        value = self.facts.subcards.get(card, {}).get(row)
        if value is None:
            self.missing.setdefault(f"subcards.{card}.{row}", SUBCARDS[card][row])
            return ""
        return cell(value)

    def _find(self, path: str) -> Any:
        value: Any = self.facts
        for name in path.split("."):
            value = getattr(value, name)
        return value


def cell(value: object) -> str:
    """Return a text as one line that ends neither a table's cell nor its line; see `escape.markdown`."""
    return markdown(value)


@dataclass(frozen=True)
class HeadIdentity:
    """A head's identity: the sha256 of each weight file by name, and of its config.json ("" without one)."""

    weights: Mapping[str, str]
    config: str


def identify(folder: Path, manifest: Manifest | None) -> HeadIdentity:
    """Return the identity of a folder's head: from the manifest, or from its bytes if kconv did not write it."""
    if manifest is not None:
        return HeadIdentity(manifest.weight_files, {file.name: file.sha256 for file in manifest.files}.get(CONFIG, ""))
    weights = {file.name: file_digest(file) for file in sorted(folder.glob("*.safetensors"))}
    return HeadIdentity(weights, file_digest(folder / CONFIG) if (folder / CONFIG).is_file() else "")


def foreign(evidence: Report | AcceptanceFile, head: HeadIdentity) -> str:
    """Return how evidence differs from a head, e.g. "other weights than this folder's"; "" if it belongs to it."""
    if evidence.weights != head.weights:
        return "other weights than this folder's"
    # The same weights with another config, e.g. other captured layers, draft differently.
    return "" if evidence.config == head.config else "another config.json than this folder's"
