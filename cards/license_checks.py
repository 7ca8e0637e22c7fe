"""What a head's folder owes to the owners of the work in it.

An engineering reading of the licenses, not legal advice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.manifest import MANIFEST, Manifest, read_manifest
from ..checkpoint.schema import read_text
from ..errors import KconvError, Severity
from ..escape import code
from ..validate.report import Finding
from .evidence import Evidence, cell
from .facts import Facts
from .front_matter import CARD, FrontMatter, read_card, read_front_matter, source_head
from .licenses import (
    LICENSES,
    NOTICE,
    SOURCE_LICENSE,
    TARGET_LICENSE,
    UNNAMED,
    License,
    LicenseText,
    attribution_in,
    copyright_in,
    digest_text,
    find_texts,
    of_target,
    recognise,
)

NVIDIA_HEAD = re.compile(r"nvidia/.+-eagle3(-v\d+)?", re.IGNORECASE)
# How a finding is resolved whose file kconv card writes.
AGAIN = "Write the card again: kconv card DIR --force."
# Datasets whose prompts belong to others, and the files that contain prompts.
PROMPT_FILES = (".jsonl", ".parquet")
KEPT_PROMPTS = "SPEED-Bench"
ENDORSED = (
    # By the author of the card, or by any publisher but NVIDIA.
    r"verified to have met prescribed nvidia quality standards:?\s*\|\s*(as (?!nvidia states:)[^|]* states:\s*)?yes",
    r"(endorsed|certified|approved|verified|sponsored) by (nvidia|moonshot)",
    r"official (nvidia|moonshot( ai)?) (release|model|head)",
    r"in partnership with (nvidia|moonshot)",
)
LicenseFinding = tuple[Severity, str, str, str]
"""Severity, where, message, fix."""


@dataclass(frozen=True)
class LicensedFolder:
    """A folder as the checks see it.

    Attributes:
        path: its path.
        card: README.md's text, "" if there is none.
        front: its front matter.
        notice: NOTICE's text.
        texts: license texts in it.
        source_license: the source's text, included if that license was not stated.
        manifest: kconv's record; None if kconv did not write the folder.
        facts: the owner's statements.
    """

    path: Path
    card: str
    front: FrontMatter
    notice: str
    texts: tuple[LicenseText, ...]
    source_license: str
    manifest: Manifest | None
    facts: Facts

    @property
    def source(self) -> str:
        """The hub id of the head it was made from, or is; "" if unknown."""
        evidence = Evidence(self.path, self.facts, self.manifest)
        return source_head(evidence) or ("" if self.manifest else self.facts.name or "")

    @property
    def license(self) -> str:
        """The head's license by kconv's id, as its owner or its card states it; "" if neither does."""
        stated = (self.facts.license.id or self.front.license_name or self.front.license).lower()
        return stated if stated in LICENSES else ""

    @property
    def target(self) -> str:
        """The hub id of the target, "" if unknown."""
        return self.facts.base_model or next((base for base in self.front.base_models if base != self.source), "")

    def text_of(self, license: License) -> LicenseText | None:
        """Return the text of a license in the folder."""
        return next((text for text in self.texts if text.license.id == license.id), None)


def read_folder(path: Path, facts: Facts) -> LicensedFolder:
    """Read a folder's statements.

    Raises:
        ManifestMismatch: kconv.json exists and does not match the schema.
    """
    card = read_card(path)
    return LicensedFolder(
        path=path,
        card=card,
        front=read_front_matter(card),
        notice=_read(path / NOTICE),
        texts=find_texts([path]),
        source_license=_read(path / SOURCE_LICENSE),
        manifest=read_manifest(path) if (path / MANIFEST).exists() else None,
        facts=facts,
    )


def _read(file: Path) -> str:
    fix = "Replace it with the text itself, in UTF-8."
    return read_text(file, KconvError, fix=fix) if os.path.lexists(file) else ""


def _nvidia(folder: LicensedFolder) -> Iterator[LicenseFinding]:
    license = LICENSES["nvidia-open-model-license"]
    if not (NVIDIA_HEAD.fullmatch(folder.source) or folder.license == license.id):
        return
    text = folder.text_of(license)
    fix = (
        f"Save {license.url}, and write the card again with it: kconv card DIR --force --license {license.id} "
        "--license-file FILE."
    )
    if text is None:
        yield "error", license.file, f"a head under the {license.title} must include a copy of the agreement", fix
    elif digest_text(text.text) not in license.digests:
        message = "the agreement is an edition that kconv does not know, or was changed"
        yield "warning", text.origin.name, message, f"Compare it with {license.url}."
    if license.notice not in folder.notice.splitlines():
        yield "error", NOTICE, f'it lacks the line "{license.notice}"', AGAIN


def _front(folder: LicensedFolder) -> Iterator[LicenseFinding]:
    front = folder.front
    if front.problem:
        yield "error", CARD, f"no license is stated: {front.problem}", AGAIN
    elif front.license in ("", "unknown"):
        yield "error", CARD, "its front matter states no license", "State it: kconv card DIR --license ID --force."
    elif front.license == "other":
        for key in ("license_name", "license_link"):
            if not getattr(front, key):
                yield "error", CARD, f"license: other without {key}", "Name the license and add its text."
    link = front.license_link
    if link and "://" not in link and not (folder.path / link).is_file():
        yield "error", CARD, f"license_link points to {link}, which does not exist", "Put the license's text there."


def _target(folder: LicensedFolder) -> Iterator[LicenseFinding]:
    license = of_target(folder.facts.license.target, folder.target)
    if license is None or not license.text or license.id == UNNAMED:
        return
    copied = folder.manifest.parameters_by_origin.copied_from_target if folder.manifest else 0
    severity: Severity = "error" if copied else "warning"
    why = f"holds {copied:,} of its target's parameters" if copied else "was trained on its target's answers"
    text = folder.text_of(license)
    if text is None:
        yield (
            severity,
            license.file,
            f"the head {why}, but the target's license is not in the folder",
            "Write the card again with it: kconv card DIR --force --target TARGET, or, with the text in a file of that "
            f"name, --license-file {TARGET_LICENSE}.",
        )
    elif copyright_in(text.text) is None:
        yield severity, text.origin.name, "the target's license lacks its copyright line", "Copy the complete file."
    name = attribution_in(text.text) if text else folder.facts.license.attribution
    if license.attribution and (not name or f'"{name}"' not in folder.notice):
        said = f'"{name}"' if name else "the name that the target's license requires"
        unknown = "Write the card again with the license's text, which has the name, as for the finding above."
        yield severity, NOTICE, f"it does not say that large products show {said}", AGAIN if name else unknown


def _unnamed(folder: LicensedFolder) -> Iterator[LicenseFinding]:
    if folder.license == UNNAMED and not (folder.texts or folder.facts.license.acknowledged):
        yield (
            "error",
            CARD,
            "the head's publisher names no license, so its terms of use are unknown",
            "Ask the publisher, and write the card again with the answer: kconv card DIR --force --license ID "
            "--license-file FILE. Or accept it in the facts: license.acknowledged.",
        )


def _notice_kept(folder: LicensedFolder) -> Iterator[LicenseFinding]:
    license = LICENSES.get(folder.license)
    if license is None or license.id not in ("mit", "apache-2.0"):
        return
    text = folder.text_of(license)
    if text is None:
        yield (
            "error",
            license.file,
            f"the {license.title} requires a copy of its text",
            f"Write the card again with it: kconv card DIR --force --license {license.id} --license-file FILE.",
        )
    elif license.id == "mit" and copyright_in(text.text) is None:
        yield "error", text.origin.name, "the license lacks its copyright line", "Copy the complete file."


def _changes(folder: LicensedFolder) -> Iterator[LicenseFinding]:
    manifest = folder.manifest
    if manifest is None:
        return
    for what in (f"kconv {manifest.kconv}", manifest.source, MANIFEST):
        if not any(form in folder.card for form in (what, code(what), cell(what))):
            yield (
                "error",
                CARD,
                f"it does not say that the files were changed: {what} is not named",
                AGAIN,
            )


def _prompts(folder: LicensedFolder) -> Iterator[LicenseFinding]:
    if KEPT_PROMPTS not in folder.card:
        return
    for file in sorted(folder.path.rglob("*")):
        if file.suffix in PROMPT_FILES:
            yield (
                "error",
                str(file.relative_to(folder.path)),
                f"{KEPT_PROMPTS}'s license keeps prompts in",
                "Remove the file from the folder.",
            )


def _bases(folder: LicensedFolder) -> Iterator[LicenseFinding]:
    # A head that kconv did not write has no source but itself.
    for what, name in (("target", folder.facts.base_model), ("source", folder.source if folder.manifest else None)):
        if name and name not in folder.front.base_models:
            yield "error", CARD, f"base_model does not list the {what}, {name}", AGAIN
    if not folder.front.base_models:
        yield "error", CARD, "base_model lists no target", "State it: kconv card DIR --base-model ID --force."


def _endorsement(folder: LicensedFolder) -> Iterator[LicenseFinding]:
    for pattern in ENDORSED:
        found = re.search(pattern, folder.card, re.IGNORECASE)
        if found:
            yield "warning", CARD, f"it may be read as an endorsement: {found[0]!r}", "Describe what you did yourself."


def _source_license(folder: LicensedFolder) -> Iterator[LicenseFinding]:
    if not folder.source_license:
        return
    license = recognise(folder.source_license)
    if folder.license == (license.id if license else UNNAMED):
        return
    title = f"the {license.title}" if license else "a license that kconv does not know"
    yield (
        "error",
        SOURCE_LICENSE,
        f"what the head was made from is under {title}, but the head is stated to be under {folder.license or 'none'}",
        "State it: kconv card DIR --license ID --force, or as the target's in the facts. If another license is right, "
        "keep the file and allow the check: kconv publish DIR REPO --allow L10=REASON.",
    )


CHECKS: Mapping[str, Callable[[LicensedFolder], Iterator[LicenseFinding]]] = {
    "L1": _nvidia, "L2": _front, "L3": _target, "L4": _unnamed, "L5": _notice_kept, "L6": _changes, "L7": _prompts,
    "L8": _bases, "L9": _endorsement, "L10": _source_license,
}  # fmt: skip


def check_folder(path: Path, facts: Facts | None = None) -> tuple[Finding, ...]:
    """Check what a folder states about licenses and origins.

    Args:
        path: a head's folder with its card.
        facts: further statements of its owner.

    Returns:
        Findings, worst first; none if everything is in order.

    Raises:
        ManifestMismatch: kconv.json exists and does not match the schema.
    """
    folder = read_folder(path, facts or Facts())
    found = [
        Finding(rule=rule, severity=severity, where=where, message=message, fix=fix)
        for rule, check in CHECKS.items()
        for severity, where, message, fix in check(folder)
    ]
    return tuple(sorted(found, key=lambda finding: ("error", "warning", "note").index(finding.severity)))
