"""A folder as it is to be published: put together, opened with its evidence, and listed for upload.

The Hub knows a weight file by its sha256, and a small one by git's id of its content.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from ...bench.acceptance import ACCEPTANCE, AcceptanceFile, read_acceptance
from ...checkpoint.folder import open_checkpoint
from ...checkpoint.manifest import MANIFEST, Manifest, verify
from ...checkpoint.schema import MAX_JSON, read_bounded
from ...checkpoint.source import Source
from ...checkpoint.staging import staged
from ...errors import KconvError, NotACheckpoint, PublishRefused
from ...validate.claims import check_claims
from ...validate.report import REPORT, Report, read_report, report_file
from ..card import gather_files, make_card, write
from ..evidence import HeadIdentity, identify
from ..facts import Facts
from ..front_matter import CARD, read_card
from .floor import RECIPE, Floor

# What may lie beside a head's own files: the card and its pictures, licenses, and the evidence.
FURTHER = "acceptance-*.json"
# In any case, and with what tells several apart: LICENSE-TARGET, THIRD_PARTY_NOTICES.md.
TERMS = r"(?i:LICEN[SC]E|COPYING|NOTICE|THIRD_PARTY)(?:[-_][\w-]+)?(?i:\.md|\.txt)?"
EVIDENCE = r"README\.md|kconv\.json|release\.yaml|report\.json|report\.md|report\.html|acceptance(?:-\d+)?\.json"
PICTURES = r"[A-Za-z0-9][\w-]*\.png"
BESIDE = re.compile(f"{EVIDENCE}|{TERMS}|{PICTURES}", re.ASCII)
# What a manifest may record of a head or a target: weights, configs, a tokenizer that is no code, and launch files.
RECORDED = re.compile(
    r"[A-Za-z0-9][\w.-]*\.safetensors|model\.safetensors\.index\.json|config\.json|hf_quant_config\.json"
    r"|(?:generation|preprocessor|tokenizer|video_preprocessor)_config\.json|tokenizer\.json|tokenizer\.model"
    r"|tiktoken\.model|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt|chat_template\.jinja"
    r"|serve-[a-z0-9-]+\.(?:sh|yaml)",
    re.ASCII,
)
IMAGES = re.compile(r"!\[[^\]]*\]\(([^)\s]+)")


# A weight file up to this is held in memory as every other file is: the Hub may take it for a small one, whose bytes go
# into the commit as they are read then. A larger one is stored under the sha256 that was checked.
HELD = 16 << 20
PNG = b"\x89PNG\r\n\x1a\n"


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
        digest = hashlib.sha1(b"blob %d\0" % self.size)
        if isinstance(self.content, bytes):
            digest.update(self.content)
            return digest.hexdigest()
        with self.content.open("rb") as file:
            while part := file.read(1 << 24):
                digest.update(part)
        return digest.hexdigest()


@dataclass(frozen=True)
class Candidate:
    """A folder that is to be published, as it was when it was opened, with what the gate judges it by.

    What the checks read is what is uploaded: `folder` is a copy that nobody else writes to, and only large weight files
    are led to where they lie; those are uploaded under the sha256 that was checked.

    Attributes:
        folder: the copy.
        origin: the folder that the user named.
        files: what would be published: where it is in the copy, by name.
        odd: names of what is no plain file; its content is not the folder's own.
        report: a validation report.
        acceptance: each acceptance.json that goes along, by its name.
        floor: what its acceptance must reach.
        facts: what no file says.
    """

    folder: Path
    origin: Path
    files: Mapping[str, Path]
    odd: tuple[str, ...]
    report: Report | None
    acceptance: Mapping[str, AcceptanceFile]
    floor: Floor | None
    facts: Facts = field(default_factory=Facts)

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest, after every byte was compared with it, and what it says of the head with the head.

        See `verify` and `check_claims` for what it raises.
        """
        manifest = verify(self.folder)
        check_claims(open_checkpoint(self.folder), manifest)
        return manifest

    @property
    def identity(self) -> HeadIdentity:
        """What evidence must be about, as the manifest has it."""
        return identify(self.folder, self.manifest)

    @cached_property
    def unaccounted(self) -> list[str]:
        """The files that neither the manifest records nor a release may hold."""
        recorded = {file.name for file in self.manifest.files}
        return [name for name in self.files if name not in recorded and not BESIDE.fullmatch(name)]

    @cached_property
    def unfit(self) -> list[str]:
        """The files that are of no kind that a release holds, whoever records them: pickles, code, hidden files."""
        return [
            name
            for name, file in self.files.items()
            if not (BESIDE.fullmatch(name) or RECORDED.fullmatch(name))
            or (name.endswith(".png") and file.is_file() and _held(file)[: len(PNG)] != PNG)
        ]

    def held(self, name: str) -> bytes | None:
        """Return the bytes of a file; None of one whose weights are too large to be held, or that is none."""
        file = self.files[name]
        return None if file.is_symlink() or not file.is_file() else _held(file)

    @cached_property
    def card(self) -> str:
        """README.md's text, empty where there is none."""
        return read_card(self.folder)


def acceptance_name(number: int) -> str:
    """Return what the first (0), second, ... acceptance.json is called in a release."""
    return FURTHER.replace("*", str(number)) if number else ACCEPTANCE


def refuse_absent(folder: Path) -> None:
    """Raise NotACheckpoint where there is no such folder."""
    if not folder.is_dir():
        raise NotACheckpoint(f"there is no folder {folder}", fix="Give the folder that kconv card wrote.")


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
        along = {acceptance_name(number): file for number, file in enumerate(acceptance)}
        for name, file in {**along, **({REPORT: report_file(report)} if report else {})}.items():
            missing = NotACheckpoint(f"there is no {file.name}", where=file, fix="Check the path.")
            fix = "Give a file that kconv validate or kconv bench wrote."
            (folder / name).write_bytes(read_bounded(file, KconvError, limit=MAX_JSON, fix=fix, missing=missing))
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
        PublishRefused: a file cannot be read, or is larger than any of a release.
    """
    refuse_absent(folder)
    figures = {acceptance_name(number): file for number, file in enumerate(acceptance)}
    elsewhere = figures | ({REPORT: report_file(report)} if report else {})
    own = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_symlink() or not file.is_dir()}
    originals = dict(sorted({**own, **elsewhere}.items()))
    room = Path(tempfile.mkdtemp(prefix="kconv-publish-"))
    try:
        # Named as the folder is, after which a card is headed where no facts name the head.
        copy = room / folder.resolve().name
        copy.mkdir()
        for name, file in originals.items():
            _hold(file, copy / name)
        with _named_as(dict.fromkeys(originals, folder) | elsewhere, copy, folder):
            made = _open_copy(copy, folder, originals, floor, facts or Facts())
    except BaseException:
        shutil.rmtree(room, ignore_errors=True)
        raise
    weakref.finalize(made, shutil.rmtree, room, ignore_errors=True)
    return made


def _open_copy(copy: Path, folder: Path, originals: Mapping[str, Path], floor: Floor | None, facts: Facts) -> Candidate:
    figures = [name for name in originals if name == ACCEPTANCE or fnmatchcase(name, FURTHER)]
    return Candidate(
        folder=copy,
        origin=folder,
        files={name: copy / name for name in originals},
        odd=tuple(name for name, file in originals.items() if file.is_symlink() or not file.is_file()),
        report=read_report(copy / REPORT) if REPORT in originals else None,
        # In the order of their numbers, which is that of the card's columns.
        acceptance={name: read_acceptance(copy / name) for name in sorted(figures, key=lambda name: (len(name), name))},
        floor=floor,
        facts=facts,
    )


def _hold(file: Path, to: Path) -> None:
    """Copy a file, or lead to it where it is one of large weights; of a pipe or a device nothing is read."""
    to.parent.mkdir(parents=True, exist_ok=True)
    found = file.stat() if file.exists() else None
    if found is None and not file.is_symlink():
        raise NotACheckpoint(f"there is no {file.name}", where=file.parent, fix="Check the path.")
    if found is None or not stat.S_ISREG(found.st_mode):
        return
    if found.st_size > HELD and file.name.endswith(".safetensors"):
        to.symlink_to(file.absolute())
        return
    fix = "Check the folder's permissions, and that the file belongs into a release."
    to.write_bytes(read_bounded(file, PublishRefused, limit=MAX_JSON, fix=fix))


@contextmanager
def _named_as(originals: Mapping[str, Path], copy: Path, folder: Path) -> Iterator[None]:
    """Have errors about the copy speak of the files that the user named."""
    try:
        yield
    except KconvError as fault:
        name = fault.where.removeprefix(f"{copy}/")
        own = originals.get(name, folder)
        fault.where = str(own if own != folder else folder / name) if name != fault.where else fault.where
        raise


def _held(file: Path) -> bytes:
    return read_bounded(file, PublishRefused, limit=MAX_JSON, fix="Run the command again.")


def uploads(candidate: Candidate, card: str) -> tuple[Upload, ...]:
    """Return what is published of a candidate that has passed the gate.

    Args:
        candidate: the folder.
        card: README.md as it is published, which may say more than the folder's.

    Raises:
        PublishRefused: a file cannot be read.
    """
    recorded = {file.name: file for file in candidate.manifest.files}
    made = []
    for name, file in candidate.files.items():
        data = card.encode() if name == CARD else candidate.held(name)
        if data is not None:
            made.append(Upload(name, data, len(data), hashlib.sha256(data).hexdigest()))
        else:
            made.append(Upload(name, file.readlink(), recorded[name].size, recorded[name].sha256))
    return tuple(made)


def digest_release(files: tuple[Upload, ...]) -> str:
    """Return 16 hex digits that name these very files."""
    return hashlib.sha256("".join(f"{f.sha256}  {f.name}\n" for f in files).encode()).hexdigest()[:16]
