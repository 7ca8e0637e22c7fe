"""What a head's folder owes to the owners of the work in it.

An engineering reading of the licenses, not legal advice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.manifest import MANIFEST, Manifest, read_manifest
from ..checkpoint.schema import read_text
from ..errors import KconvError
from ..escape import code
from ..rule import Found, Rule
from ..validate.report import SEVERITIES, Finding, called
from .evidence import Evidence, cell
from .facts import Facts
from .front_matter import CARD, FrontMatter, read_card, read_front_matter, source_head
from .licenses import (
    LICENSES,
    NOTICE,
    OWN_LICENSE,
    SOURCE_LICENSE,
    TARGET_LICENSE,
    UNNAMED,
    License,
    LicenseText,
    attribution_in,
    copyright_in,
    digest_text,
    find,
    find_texts,
    name_begins,
    of_target,
    recognise,
    shown_in,
)

NVIDIA_HEAD = re.compile(r"nvidia/.+-eagle3(-v\d+)?", re.IGNORECASE)
# A card that is written again without them loses its name, its base model and its figures.
SAME = "with the same other options as before"
# How a finding is resolved whose file kconv card writes.
AGAIN = f"Write the card again: kconv card DIR --force, {SAME}."
WITH_TEXT = "kconv card DIR --force --license-file {}"
NAMED = f"{WITH_TEXT.format('FILE')} --license ID, {SAME}"
COMPLETE = f"Copy the complete file: {WITH_TEXT.format('FILE')}, {SAME}."
OF_NVIDIA = LICENSES["nvidia-open-model-license"]
# Licenses whose text begins with their holder's copyright line; Apache's own text names none.
HELD_BY = ("mit", "modified-mit")
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


@dataclass(frozen=True)
class LicensedFolder:
    """A folder as the checks see it.

    Attributes:
        card: README.md's text, "" if there is none.
        source_license: the source's text, included if that license was not stated.
        manifest: kconv's record; None if kconv did not write the folder.
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
        stated = find(self.facts.license.id or self.front.license_name or self.front.license)
        return stated.id if stated else ""

    @property
    def name(self) -> str:
        """The model's name, as its owner or its card's title states it; "" if neither does."""
        title = re.search(r"^# (.+)$", self.card, re.MULTILINE)
        return self.facts.name or (title[1].strip() if title else "")

    @property
    def target(self) -> str:
        """The hub id of the target, "" if unknown."""
        return self.facts.base_model or next((base for base in self.front.base_models if base != self.source), "")

    @property
    def target_license(self) -> License | None:
        """The target's license as its owner or the card states it, or by the target's name; None if neither tells."""
        # The sentence of license.jinja.
        lines = [line for line in self.card.splitlines() if line.startswith("The target")]
        stated = [x.id for x in LICENSES.values() if any(f" is licensed under the {x.title}" in line for line in lines)]
        return of_target(self.facts.license.target or next(iter(stated), None), self.target)

    def text_of(self, license: License) -> LicenseText | None:
        return next((text for text in self.texts if text.license.id == license.id), None)


def read_folder(path: Path, facts: Facts) -> LicensedFolder:
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


def _nvidia(folder: LicensedFolder) -> Iterator[Found]:
    license = OF_NVIDIA
    if not (NVIDIA_HEAD.fullmatch(folder.source) or folder.license == license.id):
        return
    text = folder.text_of(license)
    if text is None:
        yield Found(OWN_LICENSE, f"a head under the {license.title} must include a copy of the agreement")
    elif digest_text(text.text) not in license.digests:
        message = "the agreement is an edition that kconv does not know, or was changed"
        yield Found(text.origin.name, message, f"Compare it with {license.url}.", severity="warning")
    if license.notice not in folder.notice.splitlines():
        yield Found(NOTICE, f'it lacks the line "{license.notice}"', AGAIN)


def _front(folder: LicensedFolder) -> Iterator[Found]:
    front = folder.front
    if front.problem:
        yield Found(CARD, f"no license is stated: {front.problem}", AGAIN)
    elif front.license in ("", "unknown"):
        yield Found(CARD, "its front matter states no license")
    elif front.license == "other":
        for key in ("license_name", "license_link"):
            if not getattr(front, key):
                yield Found(CARD, f"license: other without {key}", f"Name it and add its text: {NAMED}.")
    link = front.license_link
    if link and "://" not in link and not (folder.path / link).is_file():
        message = f"license_link points to {link}, which does not exist"
        yield Found(CARD, message, f"Put the license's text there, or write the card again with it: {NAMED}.")


def _target(folder: LicensedFolder) -> Iterator[Found]:
    license = folder.target_license
    if license is None and folder.target:
        message = f"the license of {folder.target} is not stated, so nothing that it requires was looked for"
        yield Found(
            NOTICE,
            message,
            f"Name it in the facts (license.target), or write the card with its text as --license-file "
            f"{TARGET_LICENSE}; --target TARGET does if that has a license.",
            severity="note",
        )
    if license is None or not license.text or license.id == UNNAMED:
        return
    copied = folder.manifest.parameters_by_origin.copied_from_target if folder.manifest else 0
    severity = None if copied else "warning"
    own = f"the folder holds {copied:,} of the target's parameters"
    why = own if copied else "the head was trained on its target's answers"
    text = folder.text_of(license)
    if text is None:
        message = f"{why}, but the target's license is not in the folder"
        yield Found(TARGET_LICENSE, message, severity=severity)
    elif license.id in HELD_BY and copyright_in(text.text) is None:
        message = "the target's license lacks its copyright line"
        yield Found(text.origin.name, message, COMPLETE, severity=severity)
    if license.notice and license.notice not in folder.notice.splitlines():
        message = f'it lacks the line "{license.notice}", which the target\'s license requires'
        yield Found(NOTICE, message, AGAIN, severity=severity)
    name = attribution_in(text.text) if text else folder.facts.license.attribution
    if license.attribution and (not name or f'"{name}"' not in folder.notice):
        said = f'"{name}"' if name else "the name that the target's license requires"
        with_text = WITH_TEXT.format(TARGET_LICENSE)
        unknown = f"Write the card again with the license's text, which has the name: {with_text}, {SAME}."
        message = f"it does not say that large products show {said}"
        yield Found(NOTICE, message, AGAIN if name else unknown, severity=severity)


def _unnamed(folder: LicensedFolder) -> Iterator[Found]:
    if folder.license == UNNAMED and not (folder.texts or folder.facts.license.acknowledged):
        yield Found(CARD, "the head's publisher names no license, so its terms of use are unknown")


def _notice_kept(folder: LicensedFolder) -> Iterator[Found]:
    license = LICENSES.get(folder.license)
    if license is None or not license.text or license.id in (UNNAMED, OF_NVIDIA.id, "modified-mit"):
        return
    if license.notice and license.notice not in folder.notice.splitlines():
        yield Found(NOTICE, f'it lacks the line "{license.notice}"', AGAIN)
    text = folder.text_of(license)
    if text is None:
        fix = f"Write the card again with it: {WITH_TEXT.format('FILE')} --license {license.id}, {SAME}."
        yield Found(OWN_LICENSE, f"the {license.title} requires a copy of its text", fix)
    elif license.id == "mit" and copyright_in(text.text) is None:
        yield Found(text.origin.name, "the license lacks its copyright line")


def _changes(folder: LicensedFolder) -> Iterator[Found]:
    manifest = folder.manifest
    if manifest is None:
        return
    source = called(manifest.source)
    for what, forms in {
        f"kconv {manifest.kconv}": ("{}",),
        # A short name may be a part of any word.
        source: ("from {} (", "from {} ", "{} ("),
        MANIFEST: ("{}",),
    }.items():
        spelled = {form.format(one) for form in forms for one in (what, code(what), cell(what))}
        if not any(one in folder.card for one in spelled):
            yield Found(CARD, f"it does not say that the files were changed: {what} is not named")


def _shown(folder: LicensedFolder) -> Iterator[Found]:
    for text in folder.texts:
        phrases = shown_in(text.text)
        if phrases and not any(phrase in folder.card for phrase in phrases):
            words = " or ".join(f'"{phrase}"' for phrase in phrases)
            yield Found(CARD, f"{text.origin.name} requires it to show {words}", AGAIN)


def _named(folder: LicensedFolder) -> Iterator[Found]:
    for text in folder.texts:
        begins, name = name_begins(text.text), folder.name.rpartition("/")[2]
        if begins and name and not name.lower().startswith(begins.lower()):
            wanted = f'requires the name of a trained model to begin with "{begins}"'
            yield Found(CARD, f"{text.origin.name} {wanted}, and it is {name}")


def _prompts(folder: LicensedFolder) -> Iterator[Found]:
    if KEPT_PROMPTS not in folder.card:
        return
    for file in sorted(folder.path.rglob("*")):
        if file.suffix in PROMPT_FILES:
            yield Found(str(file.relative_to(folder.path)), f"{KEPT_PROMPTS}'s license keeps prompts in")


def _bases(folder: LicensedFolder) -> Iterator[Found]:
    # A head that kconv did not write has no source but itself.
    for what, name in (("target", folder.facts.base_model), ("source", folder.source if folder.manifest else None)):
        if name and name not in folder.front.base_models:
            yield Found(CARD, f"base_model does not list the {what}, {name}")
    if not folder.front.base_models:
        yield Found(
            CARD, "base_model lists no target", f"Write the card again: kconv card DIR --force --base-model ID, {SAME}."
        )


def _endorsement(folder: LicensedFolder) -> Iterator[Found]:
    for pattern in ENDORSED:
        found = re.search(pattern, folder.card, re.IGNORECASE)
        if found:
            yield Found(CARD, f"it may be read as an endorsement: {found[0]!r}")


def _source_license(folder: LicensedFolder) -> Iterator[Found]:
    if not folder.source_license:
        return
    license = recognise(folder.source_license)
    if folder.license == (license.id if license else UNNAMED):
        return
    title = f"the {license.title}" if license else "a license that kconv does not know"
    stated = f"the head is stated to be under {folder.license or 'none'}"
    yield Found(SOURCE_LICENSE, f"what the head was made from is under {title}, but {stated}")


CHECKS: Mapping[str, Rule[LicensedFolder]] = {
    one.id: one
    for one in (
        Rule(
            "L1",
            "nvidia-agreement",
            "error",
            "A head of NVIDIA's, or under its license, lacks the agreement or its notice.",
            f"Save {OF_NVIDIA.url}, and write the card again with it: kconv card DIR --force --license {OF_NVIDIA.id} "
            "--license-file FILE.",
            _nvidia,
            also=("warning",),
        ),
        Rule(
            "L2",
            "license-not-stated",
            "error",
            "The card's front matter states no license, or names one without its text.",
            f"Write the card again, with the license's text unless it is apache-2.0: {NAMED}.",
            _front,
        ),
        Rule(
            "L3",
            "targets-license-missing",
            "error",
            "The folder lacks the license of the target, or its attribution.",
            "Write the card again with it: kconv card DIR --force --target TARGET, or, with the text in a file of that "
            f"name, --license-file {TARGET_LICENSE}.",
            _target,
            also=("warning", "note"),
        ),
        Rule(
            "L4",
            "terms-unknown",
            "error",
            "The head's publisher names no license.",
            "Ask the publisher, and write the card again with the answer: kconv card DIR --force --license ID "
            "--license-file FILE. Or accept it in the facts: license.acknowledged.",
            _unnamed,
        ),
        Rule(
            "L5",
            "license-text-missing",
            "error",
            "The head's license requires a copy of its text, or a notice, which the folder lacks.",
            COMPLETE,
            _notice_kept,
        ),
        Rule(
            "L6", "changes-not-stated", "error", "The card does not say that the files were changed.", AGAIN, _changes
        ),
        Rule(
            "L7",
            "prompts-included",
            "error",
            "The folder contains prompts whose license keeps them in.",
            "Remove the file from the folder.",
            _prompts,
        ),
        Rule(
            "L8", "base-model-missing", "error", "The card's base_model lacks the target or the source.", AGAIN, _bases
        ),
        Rule(
            "L9",
            "endorsement",
            "warning",
            "The card may be read as an endorsement by another party.",
            "Describe what you did yourself.",
            _endorsement,
        ),
        Rule(
            "L10",
            "sources-license-differs",
            "error",
            "The head is stated to be under another license than its source.",
            "State it: kconv card DIR --license ID --force, or as the target's in the facts. If another license is "
            "right, keep the file and allow the check: kconv publish DIR REPO --allow L10=REASON.",
            _source_license,
        ),
        Rule("L11", "words-not-shown", "error", "The card lacks words that a license wants shown.", AGAIN, _shown),
        Rule(
            "L12",
            "name-not-as-licensed",
            "warning",
            "A license wants the name of a model that it helped to train to begin with a word.",
            "Name it so, with --name and as REPO. A warning does not stop kconv publish.",
            _named,
        ),
    )
}


def check_folder(path: Path, facts: Facts | None = None) -> tuple[Finding, ...]:
    """Check what a folder states about licenses and origins; the worst findings come first.

    Raises:
        ManifestMismatch: kconv.json exists and does not match the schema.
    """
    folder = read_folder(path, facts or Facts())
    found = [finding for rule in CHECKS.values() for finding in rule.findings(folder)]
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))
