"""A folder to be published: assembled, opened with its evidence, and listed for upload.

The Hub identifies a weight file by its sha256, and a small file by git's id of its content.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from ...bench.acceptance import ACCEPTANCE, AcceptanceFile, read_acceptance
from ...checkpoint.folder import open_checkpoint
from ...checkpoint.manifest import MANIFEST, Manifest, dump_manifest, verify
from ...checkpoint.schema import MAX_JSON, read_bounded
from ...checkpoint.source import Source
from ...checkpoint.staging import make_private, staged
from ...errors import KconvError, NotACheckpoint, PublishRefused, Where
from ...validate.claims import check_claims
from ...validate.report import REPORT, Report, called, read_report, report_file
from ..card import gather_files, make_card, write
from ..evidence import HeadIdentity, identify
from ..facts import Facts
from ..front_matter import CARD, read_card
from .floor import RECIPE, Floor

# Files allowed next to a head's own: the card and its pictures, licenses, and the evidence.
FURTHER = "acceptance-*.json"
# In any letter case, and with suffixes that distinguish several: LICENSE-TARGET, THIRD_PARTY_NOTICES.md.
TERMS = r"(?i:LICEN[SC]E|COPYING|NOTICE|THIRD_PARTY)(?:[-_][\w-]+)?(?i:\.md|\.txt)?"
EVIDENCE = r"README\.md|kconv\.json|release\.yaml|report\.json|report\.md|report\.html|acceptance(?:-\d+)?\.json"
PICTURES = r"[A-Za-z0-9][\w-]*\.png"
BESIDE = re.compile(f"{EVIDENCE}|{TERMS}|{PICTURES}", re.ASCII)
# Files that a manifest may record for a head or a target: weights, configs, a tokenizer without code, launch files.
RECORDED = re.compile(
    r"[A-Za-z0-9][\w.-]*\.safetensors|model\.safetensors\.index\.json|config\.json|hf_quant_config\.json"
    r"|(?:generation|preprocessor|tokenizer|video_preprocessor)_config\.json|tokenizer\.json|tokenizer\.model"
    r"|tiktoken\.model|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt|chat_template\.jinja"
    r"|serve-[a-z0-9-]+\.(?:sh|yaml)",
    re.ASCII,
)
IMAGES = re.compile(r"!\[(?:[^\]!]|!(?!\[))*+\]\(([^)\s]+)")


# Weight files up to this size are held in memory like every other file: the Hub may treat them as small ones, whose
# bytes are read again at the commit. Larger ones are stored under the sha256 that was checked.
HELD = 16 << 20
PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Upload:
    """A file of a release.

    Attributes:
        name: its path in the repository.
        size: bytes.
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
    """A folder to be published, as it was when opened, with everything that the checks need.

    Exactly what the checks read is uploaded: `folder` is a copy that nobody else writes to, and only large weight files
    are linked to their originals; those are uploaded under the sha256 that was checked.

    Attributes:
        origin: the folder that the user named.
        files: what would be published: the path in the copy, by name.
        odd: names that are not plain files; their content is not the folder's own.
        acceptance: each acceptance.json to include, by its name.
        repo: where it is to be published; "" if that is not known.
    """

    folder: Path
    origin: Path
    files: Mapping[str, Path]
    odd: tuple[str, ...]
    report: Report | None
    acceptance: Mapping[str, AcceptanceFile]
    floor: Floor | None
    facts: Facts = field(default_factory=Facts)
    repo: str = ""

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest, after comparing every byte with it, and its statements about the head with the head.

        See `verify` and `check_claims` for the errors.
        """
        manifest = verify(self.folder)
        check_claims(open_checkpoint(self.folder), manifest)
        return manifest

    @property
    def identity(self) -> HeadIdentity:
        """The identity that evidence must match, from the manifest."""
        return identify(self.folder, self.manifest)

    @cached_property
    def unaccounted(self) -> list[str]:
        """The files that are neither in the manifest nor allowed in a release."""
        recorded = {file.name for file in self.manifest.files}
        return [name for name in self.files if name not in recorded and not BESIDE.fullmatch(name)]

    @cached_property
    def unfit(self) -> list[str]:
        """The files of a kind that no release may contain, whatever the manifest says: pickles, code, hidden files."""
        return [
            name
            for name, file in self.files.items()
            if not (BESIDE.fullmatch(name) or RECORDED.fullmatch(name))
            or (name.endswith(".png") and file.is_file() and _held(file)[: len(PNG)] != PNG)
        ]

    def held(self, name: str) -> bytes | None:
        """Return the bytes of a file; None for a weight file too large to hold, or for a missing file."""
        file = self.files[name]
        return None if file.is_symlink() or not file.is_file() else _held(file)

    @cached_property
    def card(self) -> str:
        """README.md's text, empty where there is none."""
        return read_card(self.folder)


def acceptance_name(number: int) -> str:
    """Return the name of the first (0), second, ... acceptance.json in a release."""
    return FURTHER.replace("*", str(number)) if number else ACCEPTANCE


def refuse_absent(folder: Path) -> None:
    """Raise NotACheckpoint if the folder does not exist."""
    if not folder.is_dir():
        raise NotACheckpoint(f"there is no folder {folder}", fix="Pass the folder that kconv card wrote.")


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
    """Assemble a head, its evidence, its licenses and its card in one folder that can be published.

    Args:
        head: an output of kconv. Its weights are hard-linked into `out`, or copied if the disk cannot link.
        out: the folder to create, whole or not at all.
        recipe: text of the recipe that made it, which is included; empty without one.
        title: the head's name if the facts do not state it; the name of `out` if empty.
        style, model_index, chart: see `make_card`.
        report, acceptance, facts, license_files, target, source: see `gather_files`; report and figures are included.
    Raises:
        OutputExists: `out` already exists.
        ManifestMismatch: the head's bytes differ from its manifest.
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
            fix = "Pass a file that kconv validate or kconv bench wrote."
            (folder / name).write_bytes(read_bounded(file, KconvError, limit=MAX_JSON, fix=fix, missing=missing))
        if recipe:
            (folder / RECIPE).write_text(recipe, encoding="utf-8")
        with naming_originals(folder, head, {}):
            evidence = gather_files(
                folder,
                report=report,
                acceptance=acceptance,
                # Otherwise a card is named after its folder, which has a random name while it is being made.
                facts=facts if facts.name else facts.model_copy(update={"name": title or out.name}),
                license_files=license_files,
                target=target,
                source=source,
            )
            write(folder, make_card(evidence, style, model_index=model_index, chart=chart))


def _link(file: Path, to: Path) -> None:
    """Hard-link weights, if the disk can; copy other files, which an editor may change in place."""
    if file.suffix == ".safetensors":
        with suppress(OSError):  # a disk without hard links
            os.link(file, to)
            return
    with file.open("rb") as source, to.open("xb") as copy:
        shutil.copyfileobj(source, copy)


def open_candidate(
    folder: Path,
    report: Path | None,
    acceptance: Sequence[Path],
    floor: Floor | None,
    facts: Facts | None = None,
    repo: str = "",
) -> Candidate:
    """Collect what a folder is judged by: by default its own report.json and acceptance*.json.

    Args:
        report, acceptance: evidence elsewhere; for a report, its folder may be named too.
        repo: where it is to be published; "" if that is not known.
    """
    refuse_absent(folder)
    figures = {acceptance_name(number): file for number, file in enumerate(acceptance)}
    elsewhere = figures | ({REPORT: report_file(report)} if report else {})
    own = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_symlink() or not file.is_dir()}
    originals = dict(sorted({**own, **elsewhere}.items()))
    room, remove = make_private("kconv-publish-")
    try:
        # Named like the folder, which heads the card if no facts name the head.
        copy = room / folder.resolve().name
        copy.mkdir()
        for name, file in originals.items():
            _hold(file, copy / name)
        with naming_originals(copy, folder, elsewhere):
            made = replace(_open_copy(copy, folder, originals, floor, facts or Facts()), repo=repo)
    except BaseException:
        remove()
        raise
    weakref.finalize(made, remove)
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
    """Copy a file, or link to it if it is a large weight file; pipes and devices are not read."""
    to.parent.mkdir(parents=True, exist_ok=True)
    found = file.stat() if file.exists() else None
    if found is None and not file.is_symlink():
        raise NotACheckpoint(f"there is no {file.name}", where=file.parent, fix="Check the path.")
    if found is None or not stat.S_ISREG(found.st_mode):
        return
    if found.st_size > HELD and file.name.endswith(".safetensors"):
        to.symlink_to(file.absolute())
        return
    fix = "Check the folder's permissions, and whether the file belongs in a release."
    to.write_bytes(read_bounded(file, PublishRefused, limit=MAX_JSON, fix=fix))


@contextmanager
def naming_originals(copy: Path, folder: Path, elsewhere: Mapping[str, Path]) -> Iterator[None]:
    """Make errors about the checked copy name the user's files: those of a folder, and evidence from elsewhere."""
    try:
        yield
    except KconvError as fault:
        where = fault.where
        if isinstance(where, Where) and where.file.is_relative_to(copy):
            name = where.file.relative_to(copy)
            fault.where = Where(elsewhere.get(str(name), folder / name), where.key)
        raise


def _held(file: Path) -> bytes:
    return read_bounded(file, PublishRefused, limit=MAX_JSON, fix="Run the command again.")


def uploads(candidate: Candidate, card: str) -> tuple[Upload, ...]:
    """Return what to publish of a candidate that passed the checks.

    Args:
        card: README.md to publish, which may contain more than the folder's.
    """
    recorded = {file.name: file for file in candidate.manifest.files}
    made = []
    for name, file in candidate.files.items():
        data = card.encode() if name == CARD else candidate.held(name)
        if name == MANIFEST and (source := called(candidate.manifest.source)) != candidate.manifest.source:
            # The path of the source on this machine is nobody's business.
            data = dump_manifest(candidate.manifest.model_copy(update={"source": source}))
        if data is not None:
            made.append(Upload(name, data, len(data), hashlib.sha256(data).hexdigest()))
        else:
            made.append(Upload(name, file.readlink(), recorded[name].size, recorded[name].sha256))
    return tuple(made)


def digest_release(files: tuple[Upload, ...]) -> str:
    """Return 16 hex digits that identify exactly these files."""
    return hashlib.sha256("".join(f"{f.sha256}  {f.name}\n" for f in files).encode()).hexdigest()[:16]
