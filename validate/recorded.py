"""A folder against the manifest beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ..checkpoint.bytes import file_digest
from ..checkpoint.folder import Checkpoint
from ..checkpoint.manifest import MANIFEST, READ_BY_ENGINES, read_manifest
from ..errors import ManifestMismatch, NotACheckpoint
from .report import Finding
from .rules.comparisons import MAKE_AGAIN


def check_manifest(checkpoint: Checkpoint, weights: Mapping[str, str], *, whole: bool) -> Iterator[Finding]:
    """Find the files that are not as kconv wrote them; nothing where kconv wrote no manifest.

    No weight is read again: files of the recorded sha256 hold the recorded tensors.

    Args:
        checkpoint: a head or a target.
        weights: sha256 of each of its weight files, by name.
        whole: whether every recorded file must be there; of a repository only what is needed is downloaded.
    """
    folder = checkpoint.folder
    if not (folder / MANIFEST).exists():
        return
    try:
        records = {record.name: record for record in read_manifest(folder).files}
    except (ManifestMismatch, NotACheckpoint) as fault:
        yield _broken(MANIFEST, fault.what)
        return
    for file in sorted(folder.iterdir()):
        if file.name not in records and any(file.match(pattern) for pattern in READ_BY_ENGINES):
            yield _broken(file.name, f"engines read it, and {MANIFEST} does not account for it")
    for name, record in sorted(records.items()):
        if Path(name).name != name:
            yield _broken(MANIFEST, f"it records {name!r}, which is no file of its own folder")
        elif not (folder / name).is_file():
            if whole or name in weights:
                yield _broken(name, f"{MANIFEST} records it, and it is not there")
        elif (weights.get(name) or _sha256(folder / name)) != record.sha256:
            yield _broken(name, f"its bytes are not the ones that {MANIFEST} records")


def _sha256(file: Path) -> str:
    try:
        return file_digest(file)
    except OSError:
        return ""  # as no recorded file's


def _broken(where: str, message: str) -> Finding:
    return Finding(rule="K301", severity="error", where=where, message=message, fix=MAKE_AGAIN)
