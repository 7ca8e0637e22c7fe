"""The licenses of this field as data, their texts, and the LICENSE and NOTICE files of a head.

An engineering reading, not legal advice. Texts are copied from where the weights come from; of kconv's
own license, which reads the same for every work, kconv has a copy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

from ..checkpoint.folder import LICENSE_TEXTS, in_any_case
from ..checkpoint.schema import read_text
from ..errors import LicenseUnknown
from ..escape import terminal

UNNAMED = "other"
NOTICE = "NOTICE"
OWN_LICENSE = "LICENSE"
# The source's license, if it is not the one stated for the head.
SOURCE_LICENSE = "LICENSE-SOURCE"
# The target's, beside the head's own.
TARGET_LICENSE = "LICENSE-TARGET"
LARGEST = 200_000  # bytes; a larger file is not a license
# The texts that kconv brings: those that name no holder.
KEPT = {"apache-2.0": Path(__file__).parents[1] / "LICENSE"}


@dataclass(frozen=True)
class License:
    """A license, and what it requires of anyone who redistributes a head, changed or not.

    Attributes:
        id: kconv's name for it; the Hub's identifier if there is one.
        identifier: the Hub's value of `license`; "other" requires a name and a link
            (https://huggingface.co/docs/hub/repositories-licenses).
        url: where its text is; "" if it comes with each model.
        marks: regular expressions that all match its text, once white space is normalized.
        digests: sha256 of texts known to be this license, see `digest_text`.
        text: whether a copy of its text must be included.
        notice: a line that it prescribes for a notice file.
        attribution: whether it requires large products to show a name, which its text states.
    """

    id: str
    title: str
    identifier: str
    url: str
    marks: tuple[str, ...]
    digests: tuple[str, ...] = ()
    text: bool = True
    notice: str = ""
    attribution: bool = False


# Publishers whose models are all under one license, and whose models' names tell the license's version.
MOONSHOT = re.compile(r"moonshotai/.+", re.IGNORECASE)
META = re.compile(r"meta-llama/(?:meta-)?llama-(?P<number>\d(?:\.\d)?)-.+", re.IGNORECASE)
PERMISSION = r"permission is hereby granted, free of charge"
# The clause of Modified MIT names a product, a different one for each of Moonshot's models.
DISPLAY = re.compile(r"prominently display \"(?P<name>[^\"]+)\" on the user interface")
# What Llama's and Qwen's licenses want said of a model that their materials improved, and how it must be named; each of
# several phrases will do. https://www.llama.com/llama3_1/license/, section 1.b.i
SHOWN = re.compile(r"prominently display (?P<words>\"[^\"]+\"(?: or \"[^\"]+\")*) (?:on a related|in the related)")
BEGINS = re.compile(r"include \"(?P<name>[^\"]+)\" at the beginning of any such ai model name", re.IGNORECASE)
HOLDER = re.compile(
    r"copyright (?:\((?:c|©)\) |© ?)?(?P<year>\d{4})(?: ?[-–,] ?(?:\d{4}|present))*,? (?P<holder>[^\n]+)", re.IGNORECASE
)
QUOTES = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'"})

HUB_LIST = "https://huggingface.co/docs/hub/repositories-licenses"
# The rest of the Hub's list: kconv states them, and knows neither their texts nor what they require.
ON_THE_HUB = """
    openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m openrail++ afl-3.0
    artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5 cc-by-3.0
    cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0
    lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl
    openmdw-1.0 osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license
    fair-noncommercial-research-license grok2-community
"""
# What SPDX adds to the names of GNU's licenses, and the Hub does not.
EDITIONS = ("-only", "-or-later")

_ALL = (
    License(
        id="nvidia-open-model-license",
        title="NVIDIA Open Model License",
        identifier="other",
        url="https://www.nvidia.com/en-us/agreements/enterprise-software/nvidia-open-model-license/",
        marks=(r"nvidia open model license agreement", r"derivative model"),
        # "Last Modified: April 28, 2025", as scancode-toolkit 32.5.0 holds it (nvidia-open-model-2025-04-28.LICENSE).
        digests=("b6701af858cb6d3035d0ad4c33c0624211081fb63ed65f26ecaeed44327fd258",),
        # Prescribed by section 3.1 of the agreement.
        notice="Licensed by NVIDIA Corporation under the NVIDIA Open Model License",
    ),
    License(
        id="modified-mit",
        title="Modified MIT License",
        identifier="other",
        url="",
        marks=(PERMISSION, r"prominently display"),
        # Kimi K2's, as scancode-toolkit 32.5.0 holds it; later models name themselves in it.
        digests=("858e04f686ee2833546c947472f6d35559ca3eb521248731201254dcf56b34af",),
        attribution=True,
    ),
    License(
        id="mit",
        title="MIT License",
        identifier="mit",
        url="https://spdx.org/licenses/MIT.html",
        marks=(PERMISSION, r"substantial portions of the software"),
    ),
    License(
        id="apache-2.0",
        title="Apache License 2.0",
        identifier="apache-2.0",
        url="https://www.apache.org/licenses/LICENSE-2.0",
        marks=(r"apache license", r"version 2\.0, january 2004"),
    ),
    *(
        License(
            id=f"llama{number}",
            title=f"Llama {number} Community License",
            identifier=f"llama{number}",
            url=f"https://www.llama.com/llama{number.replace('.', '_')}/license/",
            marks=(rf"llama {re.escape(number)} community license agreement", r"meta platforms"),
            # Section 1.b.iii (2: 1.b.ii) of each agreement.
            notice=f"{'Meta ' * (number == '3')}Llama {number} is licensed under the {said} {number} Community "
            f"License, Copyright {mark} Meta Platforms, Inc. All Rights Reserved.",
        )
        for number, said, mark in (
            ("2", "LLAMA", "(c)"),
            ("3", "Meta Llama", "©"),
            ("3.1", "Llama", "©"),
            ("3.2", "Llama", "©"),
            ("3.3", "Llama", "©"),
            ("4", "Llama", "©"),
        )
    ),
    License(
        id="gemma",
        title="Gemma Terms of Use",
        identifier="gemma",
        url="https://ai.google.dev/gemma/terms",
        marks=(r"gemma terms of use", r"model derivatives"),
        # Section 3.1 of the terms.
        notice="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
    ),
    # No licenses on the Hub's list: it names them by license_name.
    License(
        id="qwen",
        title="Qwen License",
        identifier="other",
        url="",
        marks=(r"(?:tongyi qianwen|qwen)(?: research)? license agreement",),
    ),
    License(
        id="deepseek",
        title="DeepSeek License",
        identifier="other",
        url="",
        marks=(r"deepseek (?:model )?license agreement",),
    ),
    *(
        License(id=name, title=f"{name} license", identifier=name, url=HUB_LIST, marks=(), text=False)
        for name in ON_THE_HUB.split()
    ),
    License(
        id=UNNAMED,
        title="a license that its publisher does not name",
        identifier="other",
        url="",
        marks=(),
    ),
)
# How a user may name a license.
NAMES = (
    f"an SPDX id, a name on the Hub's list ({HUB_LIST}), or one of nvidia-open-model-license, modified-mit, qwen, "
    f"deepseek; {UNNAMED} stands for a license without a name"
)
LICENSES: Mapping[str, License] = MappingProxyType({license.id: license for license in _ALL})


def by_id(name: str) -> License:
    """Return a license by kconv's or the Hub's name for it, or its SPDX id, in any case.

    Raises:
        LicenseUnknown: there is none of this name.
    """
    if (found := find(name)) is None:
        near = get_close_matches(name.lower(), LICENSES, n=3)
        raise LicenseUnknown(
            f"there is no license {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else ""),
            fix=f"Use {NAMES}.",
        )
    return found


def find(name: str) -> License | None:
    """Return a license by its name, as `by_id` does; None if there is none."""
    plain = re.sub(r"^(meta-)?llama[- ](?=\d)", "llama", name.strip().lower())
    for edition in EDITIONS:
        plain = plain.removesuffix(edition)
    return LICENSES.get(plain)


def of_target(stated: str | None, target: str | None) -> License | None:
    """Return a target's license: by its stated id, else that of Moonshot AI's or Meta's models; None if unknown."""
    if stated:
        return LICENSES[stated]
    if MOONSHOT.fullmatch(target or ""):
        return LICENSES["modified-mit"]
    return LICENSES.get(f"llama{found['number']}") if (found := META.fullmatch(target or "")) else None


def recognise(text: str) -> License | None:
    """Return the license that a text is, None if kconv does not know it."""
    plain = normalise(text)
    found = [x for x in _ALL if x.marks and all(re.search(mark, plain) for mark in x.marks)]
    # Modified MIT also has all of MIT's marks, so it comes first.
    return found[0] if found else None


def normalise(text: str) -> str:
    """Return a text in lower case, with straight quotes and single spaces."""
    return _straight(text).lower()


def digest_text(text: str) -> str:
    """Return the sha256 of a normalized text, so that line breaks and quote styles do not matter."""
    return sha256(normalise(text).encode()).hexdigest()


def attribution_in(text: str) -> str | None:
    """Return the name that a Modified MIT text requires large products to show, e.g. "Kimi K2.6"."""
    found = DISPLAY.search(_straight(text))
    return found["name"] if found else None


def shown_in(text: str) -> tuple[str, ...]:
    """Return the phrases of which a text requires a card to show one, e.g. "Built with Llama"."""
    found = SHOWN.search(_straight(text))
    return tuple(found["words"].strip('"').split('" or "')) if found else ()


def name_begins(text: str) -> str:
    """Return what a text requires the names of trained models to begin with, e.g. "Llama"; "" if nothing."""
    found = BEGINS.search(_straight(text))
    return found["name"] if found else ""


def _straight(text: str) -> str:
    return " ".join(text.translate(QUOTES).split())


def copyright_in(text: str) -> str | None:
    """Return the copyright line of a text, e.g. "Copyright (c) 2025 Moonshot AI"."""
    found = HOLDER.search(text)
    return found[0].strip() if found else None


@dataclass(frozen=True)
class LicenseText:
    """A license's text: which license, its content, and the file it was copied from."""

    license: License
    text: str
    origin: Path


def given_texts(
    files: Sequence[Path], own: str | None, target: License | None
) -> tuple[tuple[LicenseText, ...], License | None]:
    """Read the texts that the user names: each is the head's license or the target's, in any order.

    Args:
        own: id of the head's license; None if it is not stated.
        target: the target's license; None if it is unknown, and then a file named LICENSE-TARGET states it.

    Raises:
        LicenseUnknown: a file cannot be read, or kconv does not know its license; it is neither the head's nor the
            target's; or two are different texts of one license.
    """
    texts = [_read_named(file, find(own or "")) for file in files]
    target = target or next((text.license for text in texts if text.origin.name == TARGET_LICENSE), None)
    first: dict[str, LicenseText] = {}
    for text in texts:
        license, name = text.license, text.origin.name
        if license.id not in (own, target.id if target else None):
            raise LicenseUnknown(
                f"{name} is the text of the {license.title}, which is not stated for the head or for its target",
                where=text.origin,
                fix=f"If it is the head's license, pass --license {license.id}. If it is the target's, name the file "
                f"{TARGET_LICENSE}, or state license.target: {license.id} in the facts.",
            )
        other = first.setdefault(license.id, text)
        if digest_text(other.text) != digest_text(text.text):
            raise LicenseUnknown(
                f"{other.origin.name} and {name} are different texts of the {license.title}, which has one file",
                where=text.origin,
                fix="Put both texts into one file and pass that with --license-file, or pass one of them.",
            )
    return tuple(first.values()), target


def find_texts(
    folders: Iterable[Path], given: Iterable[LicenseText] = (), stated: Iterable[str | None] = ()
) -> tuple[LicenseText, ...]:
    """Read the license texts in folders.

    Args:
        folders: the source's and the target's; a missing one holds none.
        given: by the user; the first text of a license wins, and these come first.
        stated: ids of licenses; where no folder has the text of one, it is the text that kconv keeps, if any.

    Raises:
        LicenseUnknown: a link leads out of its folder.
    """
    texts = [*given]
    for folder in folders:
        for text, file in _texts(folder):
            license = recognise(text)
            if license:
                texts.append(LicenseText(license, text, file))
    texts += [LicenseText(LICENSES[name], _read(KEPT[name]), KEPT[name]) for name in stated if name in KEPT]
    first: dict[str, LicenseText] = {}
    for found in texts:
        first.setdefault(found.license.id, found)
    return tuple(first.values())


def unstated_text(source: Path, stated: Collection[str | None]) -> str:
    """Return the first license text in a source's folder that is not a stated license, "" if there is none.

    If a source includes its own source's text, only that counts: it states the license of the weights.

    Args:
        source: the folder; a missing one holds none.
    """
    texts = {file.name: text for text, file in _texts(source)}
    judged = [texts[SOURCE_LICENSE]] if SOURCE_LICENSE in texts else texts.values()
    for text in judged:
        license = recognise(text)
        if license is None or license.id not in stated:
            return text
    return ""


def license_files(
    own: License | None,
    licenses: Sequence[License],
    texts: Sequence[LicenseText],
    *,
    about: str,
    attribution: str | None,
    changed: str,
) -> Mapping[str, str]:
    """Return the files, by name, that must accompany a head.

    Args:
        own: the head's license; None if it is not stated.
        licenses: that and the target's, each once.
        texts: the available texts; a license without its text has no file, and `checks` reports it.
        attribution: the name that the target's license requires, if no text states it.
        changed: a sentence that says what was changed; "" if nothing was.
    """
    at_hand = {text.license.id: text for text in texts}
    files: dict[str, str] = {}
    notice = [about, ""]
    for license in licenses:
        found = at_hand.get(license.id)
        if found:
            files[OWN_LICENSE if license == own else TARGET_LICENSE] = found.text
        if license.notice:
            notice += [license.notice, ""]
        if license.attribution:
            notice += _attribution(license, found, attribution)
        elif found and not license.notice and copyright_in(found.text):
            notice += [f"{copyright_in(found.text)}, {license.title}", ""]
    if changed:
        notice += [changed, ""]
    if len(notice) > 2:
        # What a manifest or a text says may be a stranger's words: each is one line.
        files[NOTICE] = "\n".join(terminal(" ".join(line.split())) for line in notice)
    return files


def _attribution(license: License, found: LicenseText | None, said: str | None) -> list[str]:
    holder = copyright_in(found.text) if found else None
    name = (attribution_in(found.text) if found else None) or said
    lines = [f"{holder or 'The target model'}, {license.title}"]
    if name:
        lines.append(f'Its license requires large products to show "{name}" on their user interface.')
    return [*lines, ""]


def _texts(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield files in a folder that may be licenses."""
    held = {f for pattern in in_any_case(LICENSE_TEXTS) for f in folder.glob(pattern)} if folder.is_dir() else ()
    root = folder.resolve()
    # The Hub's local cache links a repository's files to its storage next to the snapshots.
    root = root.parents[1] if root.parent.name == "snapshots" else root
    for file in sorted(held):
        # Not Path.resolve, which raises for circular links.
        if not Path(os.path.realpath(file)).is_relative_to(root):
            raise LicenseUnknown(
                f"{file.name} is a link that leads out of its folder",
                where=file,
                fix="Replace it with the text itself, or pass the text with --license-file.",
            )
        if text := _read(file):
            yield text, file


def _read_named(file: Path, own: License | None) -> LicenseText:
    text = _read(file)
    license = recognise(text) if text else None
    if text and license is None and own and not own.marks and own.id != UNNAMED:
        license = own  # kconv knows no wording of it, so the user's word counts
    if license is None:
        unread = f"{file.name} cannot be read as text" if file.exists() else f"there is no file {file}"
        raise LicenseUnknown(
            f"{file.name} is not the text of a license that kconv knows" if text else unread,
            where=file,
            fix="Pass the whole text, and name its license with --license if kconv cannot know its wording."
            if file.exists()
            else "Check the path. Apache-2.0 needs no file.",
        )
    return LicenseText(license, text, file)


def _read(file: Path) -> str:
    with suppress(LicenseUnknown):
        return read_text(file, LicenseUnknown, limit=LARGEST, fix="Give a text.")
    return ""
