"""`kconv.json`, the record beside every output. What belongs here: its schema, reading, writing and re-checking it."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import ManifestMismatch, NotACheckpoint
from .bytes import digest, file_digest
from .folder import Checkpoint, open_checkpoint

MANIFEST = "kconv.json"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorRecord(_Record):
    """A tensor on one side: its name, dtype, shape, and the sha256 of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


class StepRecord(_Record):
    """How one tensor of the output came to be."""

    action: Literal["carried", "renamed", "re-packed"]
    output: TensorRecord
    sources: tuple[TensorRecord, ...]


class FileRecord(_Record):
    """A file of the output; `sha256` is what the Hub shows for it."""

    name: str
    size: int
    sha256: str


class Manifest(_Record):
    """What was made of what, and by whom; the schema of kconv.json.

    Attributes:
        kconv: the version that wrote it.
        exact: whether every weight's bytes are the source's.
        source: how the user named the source.
        source_layout, layout: from and to.
        spec: the head, as `HeadSpec` names it.
        captured_by: how the captured layers were decided.
        parameters: number of weight elements in the output.
        config_carried, config_dropped: the source config's keys that kconv does not interpret.
        tensors: every tensor of the output.
        dropped: source tensors that are not in the output, with the reason.
        files: every file of the output but this one.
    """

    schema_version: Literal[1] = Field(default=1, alias="schema")
    kconv: str = Field(default_factory=lambda: version("kconv"))
    exact: bool
    source: str
    source_layout: str
    layout: str
    spec: dict[str, Any]
    captured_by: str
    parameters: int
    config_carried: tuple[str, ...] = ()
    config_dropped: tuple[str, ...] = ()
    tensors: tuple[StepRecord, ...]
    dropped: dict[str, str] = {}
    files: tuple[FileRecord, ...]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write kconv.json into a folder."""
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1, by_alias=True) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Read a folder's kconv.json.

    Raises:
        NotACheckpoint: there is none.
        ManifestMismatch: it is not of the schema.
    """
    file = folder / MANIFEST
    if not file.exists():
        raise NotACheckpoint(
            f"{folder.name} has no {MANIFEST}; kconv did not make it", where=folder, fix="Convert it with kconv."
        )
    try:
        return Manifest.model_validate_json(file.read_bytes())
    except ValidationError as fault:
        raise ManifestMismatch(
            f"{MANIFEST} is not of kconv's schema: {fault.errors()[0]['msg']}", where=file, fix="Convert again."
        ) from fault


def verify(folder: Path, source: Checkpoint | None = None) -> Manifest:
    """Re-check every byte of an output against its manifest, and its source's tensors if given.

    Args:
        folder: an output of kconv.
        source: the checkpoint it was made from.

    Raises:
        ManifestMismatch: a file or tensor is missing, unrecorded, or of other bytes.
    """
    manifest = read_manifest(folder)
    for record in manifest.files:
        file = folder / record.name
        if not file.exists() or file.stat().st_size != record.size or file_digest(file) != record.sha256:
            raise _mismatch(folder / record.name, "its bytes are not the ones that were written")
    output = open_checkpoint(folder)
    _same(output, {step.output.name: step.output for step in manifest.tensors})
    if source is not None:
        held = {s.name: s for step in manifest.tensors for s in step.sources}
        for name in source.tensors.keys() - held.keys() - manifest.dropped.keys():
            raise _mismatch(name, "the source holds this tensor and the manifest does not account for it")
        _same(source, held, subset=manifest.dropped)
    return manifest


def _same(checkpoint: Checkpoint, records: dict[str, TensorRecord], subset: dict[str, str] | None = None) -> None:
    for name in checkpoint.tensors.keys() ^ records.keys():
        if name not in (subset or {}):
            raise _mismatch(name, f"it is not both in {checkpoint.folder.name} and in the manifest")
    for name, record in records.items():
        info = checkpoint.tensors[name]
        if (info.dtype, info.shape) != (record.dtype, record.shape) or digest(info) != record.sha256:
            raise _mismatch(name, f"its bytes in {checkpoint.folder.name} are not the recorded ones")


def _mismatch(where: object, what: str) -> ManifestMismatch:
    return ManifestMismatch(f"the manifest does not hold: {what}", where=where, fix="Convert the head again.")
