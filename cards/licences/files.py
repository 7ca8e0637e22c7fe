"""LICENSE and NOTICE files of a head. What belongs here: texts found where weights come from, and what follows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...checkpoint.licences import LICENCE_TEXTS, in_any_case
from ...errors import LicenceUnknown
from .licence import Licence, attribution_in, copyright_in, recognise

NOTICE = "NOTICE"
# What the source stands under, where that is not what is stated of the head.
SOURCE_LICENCE = "LICENSE-SOURCE"
LARGEST = 200_000  # bytes; what is larger is no licence


@dataclass(frozen=True)
class Text:
    """A licence's text: which it is, what it says, and the file it was copied from."""

    licence: Licence
    text: str
    origin: Path


def find_texts(folders: Iterable[Path], files: Iterable[Path] = ()) -> tuple[Text, ...]:
    """Read the licence texts that lie in folders, and those that the user names.

    Args:
        folders: the source's and the target's; those that are not there hold none.
        files: named by the user; the first text of a licence wins, and these come first.

    Raises:
        LicenceUnknown: a named file cannot be read, or is no licence that kconv knows.
    """
    texts = [_read_named(file) for file in files]
    for folder in folders:
        for text, file in _texts(folder):
            licence = recognise(text)
            if licence:
                texts.append(Text(licence, text, file))
    first: dict[str, Text] = {}
    for found in texts:
        first.setdefault(found.licence.id, found)
    return tuple(first.values())


def unstated_text(source: Path, stated: Collection[str | None]) -> str:
    """Return the first licence text in a source's folder that is of none that is stated, "" where each is.

    A source that carries its own source's text is judged by that alone: it says what the weights came under.

    Args:
        source: the folder; one that is not there holds none.
        stated: ids of licences, of the head and of its target.
    """
    texts = {file.name: text for text, file in _texts(source)}
    judged = [texts[SOURCE_LICENCE]] if SOURCE_LICENCE in texts else texts.values()
    for text in judged:
        licence = recognise(text)
        if licence is None or licence.id not in stated:
            return text
    return ""


def licence_files(
    licences: Sequence[Licence], texts: Sequence[Text], *, about: str, attribution: str | None, changed: str
) -> Mapping[str, str]:
    """Return the files, by name, that go along with a head.

    Args:
        licences: the head's own first, then the target's.
        texts: those at hand; a licence without its text has no file, and `checks` says so.
        about: what the notice is about: the head's name.
        attribution: the name that the target's licence asks for, where no text says it.
        changed: a sentence that says what was changed; "" where nothing was.
    """
    at_hand = {text.licence.id: text for text in texts}
    files: dict[str, str] = {}
    notice = [about, ""]
    for licence in licences:
        found = at_hand.get(licence.id)
        if found:
            # A second licence of the same file name keeps its own.
            name = licence.file if licence.file not in files else f"{licence.file}-{licence.id}"
            files[name] = found.text
        if licence.notice:
            notice += [licence.notice, ""]
        if licence.attribution:
            notice += _attribution(licence, found, attribution)
        elif found and not licence.notice and copyright_in(found.text):
            notice += [f"{copyright_in(found.text)}, {licence.title}", ""]
    if changed:
        notice += [changed, ""]
    if len(notice) > 2:
        files[NOTICE] = "\n".join(notice)
    return files


def _attribution(licence: Licence, found: Text | None, said: str | None) -> list[str]:
    holder = copyright_in(found.text) if found else None
    name = (attribution_in(found.text) if found else None) or said
    lines = [f"{holder or 'The target model'}, {licence.title}"]
    if name:
        lines.append(f'Its licence asks large products to show "{name}" on their user interface.')
    return [*lines, ""]


def _texts(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield what may be licences in a folder."""
    held = {f for pattern in in_any_case(LICENCE_TEXTS) for f in folder.glob(pattern)} if folder.is_dir() else ()
    for file in sorted(held):
        if text := _read(file):
            yield text, file


def _read_named(file: Path) -> Text:
    text = _read(file)
    licence = recognise(text) if text else None
    if licence is None:
        raise LicenceUnknown(
            f"{file.name} is no text of a licence that kconv knows" if text else f"{file.name} cannot be read as text",
            where=file,
            fix="Give the text of the NVIDIA Open Model License, Modified MIT, MIT or Apache-2.0.",
        )
    return Text(licence, text, file)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8") if file.is_file() and file.stat().st_size <= LARGEST else ""
    except (OSError, UnicodeDecodeError):
        return ""
