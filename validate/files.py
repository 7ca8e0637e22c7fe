"""What heads and targets share: how a checkpoint is opened, and whether its files are those that kconv wrote."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path

from ..checkpoint.bytes import Look, Wanted, digest, file_digest
from ..checkpoint.folder import Checkpoint
from ..checkpoint.manifest import MANIFEST, READ_BY_ENGINES, read_manifest
from ..checkpoint.source import Source
from ..convert.identify import WHOLE_MODEL
from ..errors import KconvError, ManifestMismatch, NotACheckpoint
from ..measure.figures import Figures
from ..rule import Found
from .options import ValidateOptions
from .report import UNREAD, Finding, Report, assemble
from .rules.comparisons import RULE
from .rules.subject import ENGINES
from .rules.table import of_error

Say = Callable[[str], None]
# Of a source's tensors, how many are held against the record.
SAMPLED = 8


def is_target(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is a target rather than a head."""
    return WHOLE_MODEL.marks(checkpoint.config, checkpoint.tensors)


def open_subject(named: Source, options: ValidateOptions, say: Say) -> Checkpoint:
    """Open the checkpoint to check with its weights, or for its headers alone.

    Raises:
        KconvError: it cannot be read; `unreadable` is its report.
    """
    say("reading headers" if options.headers_only else "reading every weight")
    with uncollected():
        return named.open_headers() if options.headers_only else named.open_weights()


def unreadable(named: Source, options: ValidateOptions, error: KconvError) -> Report:
    """Return the report of a checkpoint that cannot be read."""
    about = {"for": list(options.runners or ENGINES), UNREAD: "the folder cannot be read"}
    return assemble(named.name, {}, [of_error(error)], Figures(), about)


def weight_files(checkpoint: Checkpoint, options: ValidateOptions) -> list[Wanted]:
    """Return the files to read whole; none if only headers are checked."""
    unread = options.headers_only or checkpoint.headers_only
    return [] if unread else [Wanted(file, whole=True) for file in checkpoint.files]


def digests(checkpoint: Checkpoint, options: ValidateOptions, look: Look) -> dict[str, str]:
    """Return the sha256 of each weight file by its name; none if only headers are checked."""
    return {one.file.name: look.sha256(one.file) for one in weight_files(checkpoint, options)}


def check_manifest(checkpoint: Checkpoint, weights: Mapping[str, str], *, whole: bool) -> Iterator[Finding]:
    """Find files that differ from those that kconv wrote; nothing without a manifest.

    No weights are read again: files with the recorded sha256 hold the recorded tensors.

    Args:
        checkpoint: a head or a target.
        weights: sha256 of each of its weight files, by name.
        whole: whether every recorded file must exist; from a repository only the needed files are downloaded.
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
            yield _broken(file.name, f"engines read it, but {MANIFEST} does not record it")
    for name, record in sorted(records.items()):
        if Path(name).name != name:
            yield _broken(MANIFEST, f"it records {name!r}, which is not in its folder")
        elif not (folder / name).is_file():
            if whole or name in weights:
                yield _broken(name, f"{MANIFEST} records it, but it is missing")
        elif not record.fits(folder / name) or (weights.get(name) or _sha256(folder / name)) != record.sha256:
            yield _broken(name, f"its bytes differ from those that {MANIFEST} records")


def check_config(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find a config.json other than the one that kconv wrote; of a manifest, headers alone show no more."""
    with suppress(ManifestMismatch, NotACheckpoint):
        for record in read_manifest(checkpoint.folder).files:
            if record.name == "config.json" and _sha256(checkpoint.folder / record.name) != record.sha256:
                yield _broken(record.name, f"its bytes differ from those that {MANIFEST} records")


def check_origin(checkpoint: Checkpoint, source: Checkpoint) -> Iterator[Finding]:
    """Find a source that is not what a quantized target's manifest says it was made from, by a few small tensors."""
    try:
        steps = read_manifest(checkpoint.folder).tensors
    except (ManifestMismatch, NotACheckpoint):  # which other findings report
        return
    records = sorted((one for step in steps for one in step.sources), key=lambda one: (prod(one.shape), one.name))
    # Fine-tunes may share the norms.
    for record in (*records[:SAMPLED], *[one for one in records if len(one.shape) > 1][:SAMPLED]):
        held = source.tensors.get(record.name)
        if held is None or digest(held) != record.blake3:
            message = f"{source.source} is not what this was made from: its {record.name} is another"
            yield RULE["K392"].finding(Found("source", message, "Pass the target that kconv quantize read."))
            return


def _sha256(file: Path) -> str:
    try:
        return file_digest(file)
    except OSError:
        return ""  # like no recorded file's


def _broken(where: str, message: str) -> Finding:
    return RULE["K301"].finding(Found(where, message))


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection: a target's headers are millions of objects without cycles, slow to scan."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
