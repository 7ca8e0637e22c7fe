"""LICENSE and NOTICE files of a head."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...checkpoint.folder import LICENSE_TEXTS, in_any_case
from ...errors import LicenseUnknown
from .license import License, attribution_in, copyright_in, recognise

NOTICE = "NOTICE"
# What the source stands under, where that is not what is stated of the head.
SOURCE_LICENSE = "LICENSE-SOURCE"
LARGEST = 200_000  # bytes; what is larger is no license


@dataclass(frozen=True)
class Text:
    """A license's text: which it is, what it says, and the file it was copied from."""

    license: License
    text: str
    origin: Path


def find_texts(folders: Iterable[Path], files: Iterable[Path] = ()) -> tuple[Text, ...]:
    """Read the license texts that lie in folders, and those that the user names.

    Args:
        folders: the source's and the target's; those that are not there hold none.
        files: named by the user; the first text of a license wins, and these come first.

    Raises:
        LicenseUnknown: a named file cannot be read, or is no license that kconv knows.
    """
    texts = [_read_named(file) for file in files]
    for folder in folders:
        for text, file in _texts(folder):
            license = recognise(text)
            if license:
                texts.append(Text(license, text, file))
    first: dict[str, Text] = {}
    for found in texts:
        first.setdefault(found.license.id, found)
    return tuple(first.values())


def unstated_text(source: Path, stated: Collection[str | None]) -> str:
    """Return the first license text in a source's folder that is of none that is stated, "" where each is.

    A source that carries its own source's text is judged by that alone: it says what the weights came under.

    Args:
        source: the folder; one that is not there holds none.
        stated: ids of licenses, of the head and of its target.
    """
    texts = {file.name: text for text, file in _texts(source)}
    judged = [texts[SOURCE_LICENSE]] if SOURCE_LICENSE in texts else texts.values()
    for text in judged:
        license = recognise(text)
        if license is None or license.id not in stated:
            return text
    return ""


def license_files(
    licenses: Sequence[License], texts: Sequence[Text], *, about: str, attribution: str | None, changed: str
) -> Mapping[str, str]:
    """Return the files, by name, that go along with a head.

    Args:
        licenses: the head's own first, then the target's.
        texts: those at hand; a license without its text has no file, and `checks` says so.
        about: what the notice is about: the head's name.
        attribution: the name that the target's license asks for, where no text says it.
        changed: a sentence that says what was changed; "" where nothing was.
    """
    at_hand = {text.license.id: text for text in texts}
    files: dict[str, str] = {}
    notice = [about, ""]
    for license in licenses:
        found = at_hand.get(license.id)
        if found:
            # A second license of the same file name keeps its own.
            name = license.file if license.file not in files else f"{license.file}-{license.id}"
            files[name] = found.text
        if license.notice:
            notice += [license.notice, ""]
        if license.attribution:
            notice += _attribution(license, found, attribution)
        elif found and not license.notice and copyright_in(found.text):
            notice += [f"{copyright_in(found.text)}, {license.title}", ""]
    if changed:
        notice += [changed, ""]
    if len(notice) > 2:
        files[NOTICE] = "\n".join(notice)
    return files


def _attribution(license: License, found: Text | None, said: str | None) -> list[str]:
    holder = copyright_in(found.text) if found else None
    name = (attribution_in(found.text) if found else None) or said
    lines = [f"{holder or 'The target model'}, {license.title}"]
    if name:
        lines.append(f'Its license asks large products to show "{name}" on their user interface.')
    return [*lines, ""]


def _texts(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield what may be licenses in a folder."""
    held = {f for pattern in in_any_case(LICENSE_TEXTS) for f in folder.glob(pattern)} if folder.is_dir() else ()
    for file in sorted(held):
        if text := _read(file):
            yield text, file


def _read_named(file: Path) -> Text:
    text = _read(file)
    license = recognise(text) if text else None
    if license is None:
        raise LicenseUnknown(
            f"{file.name} is no text of a license that kconv knows" if text else f"{file.name} cannot be read as text",
            where=file,
            fix="Give the text of the NVIDIA Open Model License, Modified MIT, MIT or Apache-2.0.",
        )
    return Text(license, text, file)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8") if file.is_file() and file.stat().st_size <= LARGEST else ""
    except (OSError, UnicodeDecodeError):
        return ""
