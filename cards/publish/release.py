"""A folder as it is to be published: put together, opened with its evidence, and listed for upload.

The Hub knows a weight file by its sha256, and a small one by git's id of its content.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from ...bench.acceptance import ACCEPTANCE, AcceptanceFile, read_acceptance
from ...checkpoint.bytes import file_digest
from ...checkpoint.folder import LICENSE_FILES, in_any_case
from ...checkpoint.manifest import MANIFEST, Manifest, verify
from ...checkpoint.source import Source
from ...checkpoint.staging import staged
from ...errors import KconvError, NotACheckpoint
from ...validate.report import REPORT, Report, read_report, report_file
from ..card import gather_files, make_card, write
from ..evidence import HeadIdentity, identify
from ..facts import Facts
from ..front_matter import CARD
from .floor import RECIPE, Floor

# What may lie beside a head's own files: the card and its pictures, licenses, and the evidence.
FURTHER = "acceptance-*.json"
BESIDE = (
    CARD, MANIFEST, RECIPE, REPORT, "report.md", "report.html", ACCEPTANCE, FURTHER, "*.png",
    *in_any_case(LICENSE_FILES),
)  # fmt: skip
IMAGES = re.compile(r"!\[[^\]]*\]\(([^)\s]+)")


@dataclass(frozen=True)
class Upload:
    """A file of a release.

    Attributes:
        name: its path in the repository.
        content: where it is, or what is in it.
        size: bytes.
        sha256: of its bytes.
    """

    name: str
    content: Path | bytes
    size: int
    sha256: str

    @cached_property
    def blob_id(self) -> str:
        """Git's id of the file."""
        data = self.content.read_bytes() if isinstance(self.content, Path) else self.content
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass(frozen=True)
class Candidate:
    """A folder that is to be published, with what the gate judges it by.

    Attributes:
        folder: an output of kconv, with its card.
        report: a validation report.
        acceptance: each acceptance.json that goes along, by its name.
        floor: what its acceptance must reach.
        beside: further files by the name that they are published under.
        facts: what no file says.
    """

    folder: Path
    report: Report | None
    acceptance: Mapping[str, AcceptanceFile]
    floor: Floor | None
    beside: Mapping[str, Path] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest, after every byte was compared with it; see `verify` for what it raises."""
        return verify(self.folder)

    @property
    def identity(self) -> HeadIdentity:
        """What evidence must be about, as the manifest has it."""
        return identify(self.folder, self.manifest)

    @cached_property
    def files(self) -> dict[str, Path]:
        """What would be published, by name."""
        found = {str(p.relative_to(self.folder)): p for p in self.folder.rglob("*") if not p.is_dir()}
        return dict(sorted({**found, **self.beside}.items()))

    @cached_property
    def unaccounted(self) -> list[str]:
        """The files that neither the manifest records nor a release may hold."""
        recorded = {file.name for file in self.manifest.files}
        return [name for name in self.files if name not in recorded and not _may_lie_beside(name)]

    @cached_property
    def card(self) -> str:
        """README.md's text, empty where there is none."""
        file = self.folder / CARD
        return file.read_text(errors="replace") if file.is_file() else ""


def acceptance_name(number: int) -> str:
    """Return what the first (0), second, ... acceptance.json is called in a release."""
    return FURTHER.replace("*", str(number)) if number else ACCEPTANCE


def refuse_absent(folder: Path) -> None:
    """Raise NotACheckpoint where there is no such folder."""
    if not folder.is_dir():
        raise NotACheckpoint(f"there is no folder {folder}", fix="Give the folder that kconv card has written to.")


def write_release(
    head: Path,
    out: Path,
    *,
    recipe: str = "",
    title: str = "",
    style: str = "short",
    model_index: bool = False,
    chart: bool = True,
    report: Path | None = None,
    acceptance: Sequence[Path] = (),
    facts: Facts | None = None,
    license_files: Sequence[Path] = (),
    target: Source | None = None,
    source: Source | None = None,
) -> None:
    """Put a head, its evidence, its licenses and its card into one folder, which can be published.

    Args:
        head: an output of kconv. Its files get a second name in `out`, or are copied where the disk cannot.
        out: the folder to make, whole or not at all.
        recipe: text of the recipe that made it, which goes along; empty where none did.
        title: names the head where the facts do not; the name of `out` if empty.
        style, model_index, chart: see `make_card`.
        report, acceptance, facts, license_files, target, source: see `gather_files`; report and figures go along.

    Raises:
        OutputExists: `out` is already there.
        ManifestMismatch: the head's bytes are not those that its manifest records.
        KconvError: see `gather_files` and `write`.
    """
    facts = facts or Facts()
    manifest = verify(head)
    with staged(out) as folder:
        for record in manifest.files:
            _link(head / record.name, folder / record.name)
        _link(head / MANIFEST, folder / MANIFEST)
        if report:
            shutil.copyfile(report_file(report), folder / REPORT)
        for number, file in enumerate(acceptance):
            shutil.copyfile(file, folder / acceptance_name(number))
        if recipe:
            (folder / RECIPE).write_text(recipe, encoding="utf-8")
        evidence = gather_files(
            folder,
            report=report,
            acceptance=acceptance,
            # A card is named after its folder otherwise, which has a name of chance while it is made.
            facts=facts if facts.name else facts.model_copy(update={"name": title or out.name}),
            license_files=license_files,
            target=target,
            source=source,
        )
        write(folder, make_card(evidence, style, model_index=model_index, chart=chart))


def _link(file: Path, to: Path) -> None:
    """Give a file a second name, or a copy where the disk cannot; nothing changes an output in place."""
    try:
        os.link(file, to)
    except FileExistsError:
        raise
    except OSError:
        with file.open("rb") as source, to.open("xb") as copy:
            shutil.copyfileobj(source, copy)


def open_candidate(
    folder: Path, report: Path | None, acceptance: Sequence[Path], floor: Floor | None, facts: Facts | None = None
) -> Candidate:
    """Gather what a folder is judged by: its own report.json and acceptance*.json where no others are named.

    Args:
        folder: what is to be published.
        report, acceptance: evidence that lies elsewhere; of a report, its folder may be named too.
        floor: what the acceptance must reach.
        facts: what no file says; the license checks heed it.

    Raises:
        NotACheckpoint: a file that was named is not there.
        ReportInvalid, AcceptanceInvalid: one of them is not of its schema.
    """
    refuse_absent(folder)
    figures = {acceptance_name(number): file for number, file in enumerate(acceptance)}
    held = {file.name: file for pattern in (REPORT, ACCEPTANCE, FURTHER) for file in folder.glob(pattern)}
    beside = figures | ({REPORT: report_file(report)} if report else {})
    found = held | beside
    reports = found.pop(REPORT, None)
    return Candidate(
        folder,
        read_report(reports) if reports else None,
        # In the order of their numbers, which is that of the card's columns.
        {name: read_acceptance(found[name]) for name in sorted(found, key=lambda name: (len(name), name))},
        floor,
        beside,
        facts or Facts(),
    )


def _may_lie_beside(name: str) -> bool:
    # A pattern's * would take a folder's name in too.
    return "/" not in name and any(fnmatchcase(name, pattern) for pattern in BESIDE)


def uploads(candidate: Candidate, card: str) -> tuple[Upload, ...]:
    """Return what is published of a candidate that has passed the gate.

    Args:
        candidate: the folder.
        card: README.md as it is published, which may say more than the folder's.

    Raises:
        KconvError: a file cannot be read.
    """
    recorded = {file.name: file for file in candidate.manifest.files}
    made = []
    try:
        for name, file in candidate.files.items():
            if name == CARD:
                data = card.encode()
                made.append(Upload(name, data, len(data), hashlib.sha256(data).hexdigest()))
            elif name in recorded and name not in candidate.beside:
                made.append(Upload(name, file, recorded[name].size, recorded[name].sha256))
            else:
                made.append(Upload(name, file, file.stat().st_size, file_digest(file)))
    except OSError as fault:
        raise KconvError(
            f"a file cannot be read: {fault.strerror}", where=fault.filename, fix="Check the folder's permissions."
        ) from fault
    return tuple(made)


def digest_release(files: tuple[Upload, ...]) -> str:
    """Return 16 hex digits that name these very files."""
    return hashlib.sha256("".join(f"{f.sha256}  {f.name}\n" for f in files).encode()).hexdigest()[:16]
