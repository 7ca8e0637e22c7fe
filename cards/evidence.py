"""What a card is made from, and which head that evidence is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..bench.acceptance import AcceptanceFile
from ..bench.tables import NOT_STATED
from ..checkpoint.bytes import file_digest
from ..checkpoint.manifest import Manifest
from ..escape import markdown
from ..validate.report import Report
from .facts import SUBCARDS, Facts, question
from .licenses import LICENSES, UNNAMED, License, LicenseText

CONFIG = "config.json"
# What the files of a converted head tell better than its publisher, who spoke of the head before.
MEASURED = {"architecture.attention", "architecture.parameters", "architecture.tensor_type", "runtime.engines"}


@dataclass(frozen=True)
class Evidence:
    """Everything that is known about a head.

    Attributes:
        folder: where it lies; None where there are facts alone.
        facts: what the user adds.
        manifest: how kconv made it; None of a head that kconv did not make.
        report: its validation report.
        acceptance: measured and quoted figures.
        texts: license texts at hand.
        source_license: the text of the source's license, where it is not one that is stated; "" otherwise.
    """

    folder: Path | None = None
    facts: Facts = field(default_factory=Facts)
    manifest: Manifest | None = None
    report: Report | None = None
    acceptance: tuple[AcceptanceFile, ...] = ()
    texts: tuple[LicenseText, ...] = ()
    source_license: str = ""

    @property
    def name(self) -> str:
        """What the card is headed with."""
        return self.facts.name or (self.folder.resolve().name if self.folder else NOT_STATED)

    @property
    def licenses(self) -> tuple[License, ...]:
        """The head's own license and the target's, as far as they are stated."""
        stated = (self.facts.license.id, self.facts.license.target)
        return tuple(dict.fromkeys(LICENSES[name] for name in stated if name))

    @property
    def license_is_named(self) -> bool:
        """Whether the head's license is stated and has a name."""
        return self.facts.license.id not in (None, UNNAMED)


@dataclass
class Said:
    """Looks facts up for a template, and keeps a list of those that nobody said.

    Attributes:
        facts: where to look.
        known: what is known beside them, by the same dotted names.
        missing: dotted names of what a card asked for and did not find, in the order it asked.
    """

    facts: Facts
    known: Mapping[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def __call__(self, path: str) -> str:
        """Return a fact as text, or what else is known of it; "" where nobody said it."""
        stated, known = self._find(path), self.known.get(path) or ""
        if stated in (None, "", ()):
            if not known:
                self.missing.setdefault(path, question(Facts, path))
            return cell(known)
        if known and path in MEASURED and known != stated:
            return cell(f"{known} (its publisher states {stated})")
        return cell(stated)

    def listed(self, path: str) -> Sequence[Any]:
        """Return the entries of a list, none where nobody gave one."""
        value = self._find(path)
        if not value:
            self.missing.setdefault(path, question(Facts, path))
            return ()
        return value

    def noted(self, section: str) -> str:
        """Return the publisher's own paragraphs of a section, "" where there are none."""
        return "\n\n".join(self.facts.notes.get(section, ()))

    def subcard(self, card: str, row: str) -> str:
        """Return a subcard's row, "" where nobody filled it."""
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
    """Return a text as one line that neither ends a table's cell nor its line; see `escape.markdown`."""
    return markdown(value)


@dataclass(frozen=True)
class HeadIdentity:
    """What names a head: the sha256 of each weight file by name, and of its config.json ("" where it has none)."""

    weights: Mapping[str, str]
    config: str


def identify(folder: Path, manifest: Manifest | None) -> HeadIdentity:
    """Return what names a folder's head: as the manifest has it, or, where kconv did not make it, by its bytes."""
    if manifest is not None:
        return HeadIdentity(manifest.weight_files, {file.name: file.sha256 for file in manifest.files}.get(CONFIG, ""))
    weights = {file.name: file_digest(file) for file in sorted(folder.glob("*.safetensors"))}
    return HeadIdentity(weights, file_digest(folder / CONFIG) if (folder / CONFIG).is_file() else "")


def foreign(evidence: Report | AcceptanceFile, head: HeadIdentity) -> str:
    """Say what evidence is of that a head is not, e.g. "other weights than this folder's"; "" where it is of it."""
    if evidence.weights != head.weights:
        return "other weights than this folder's"
    # The same weights under another config, e.g. of other captured layers, draft otherwise.
    return "" if evidence.config == head.config else "another config.json than this folder's"
