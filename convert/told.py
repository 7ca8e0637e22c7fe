"""What a manifest tells of a head's past."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.bytes import file_digest
from ..checkpoint.folder import Checkpoint
from ..checkpoint.manifest import MANIFEST, ConversionRecord, Manifest, TensorRecord, read_manifest
from ..checkpoint.source import Source
from ..engines import by_name
from ..engines.layout import Layout
from ..errors import KconvError, ManifestMismatch
from .captured import Hints
from .read import Head


@dataclass(frozen=True)
class Told:
    """How a head was trained, and how its attention came to be what it is, as the kconv.json beside it says.

    Attributes:
        file: the kconv.json, which need not exist.
        manifest: what it holds; None where there is none, or where it tells of neither.
    """

    file: Path
    manifest: Manifest | None

    @property
    def training(self) -> Mapping[str, Any] | None:
        """How the head was trained."""
        return self.manifest.training if self.manifest else None

    def conversion(self, now: ConversionRecord | None) -> ConversionRecord | None:
        """Return the record of the output's attention: an exact conversion keeps the old one, another stands on it."""
        before = self.manifest.conversion if self.manifest else None
        if now is None or before is None:
            return now or before
        prompts = tuple(sorted({*before.prompts, *now.prompts}))
        return now.model_copy(update={"prompts": prompts, "before": before})

    def check(self, sources: Iterable[TensorRecord]) -> None:
        """Raise ManifestMismatch unless the manifest is of these tensors: of others its tale is not true."""
        if self.manifest is None:
            return
        known = {step.output.name: step.output.blake3 for step in self.manifest.tensors}
        for record in sources:
            if known.get(record.name) != record.blake3:
                raise ManifestMismatch(
                    f"{MANIFEST} tells how the head was made, and {record.name} is another tensor now",
                    where=self.file,
                    fix=f"Give the head as kconv wrote it; if it was changed on purpose, remove {MANIFEST}.",
                )


def read_told(folder: Path) -> Told:
    """Read what the manifest beside a head tells of its past.

    Raises:
        ManifestMismatch: it is not of the schema.
    """
    file = folder / MANIFEST
    manifest = read_manifest(folder) if file.is_file() else None
    tells = manifest is not None and (manifest.training or manifest.conversion)
    return Told(file, manifest if tells else None)


@dataclass(frozen=True)
class Origin:
    """A head that another one was made of.

    Attributes:
        told: as the conversion read it, by what its user said.
        alone: as it reads by itself; as `told` where it does not without a word of the user's.
    """

    told: Head
    alone: Head

    @property
    def overruled(self) -> list[str]:
        """The fields of the spec that the user's word made other than the head's own files do."""
        return [name for name, value in vars(self.alone.spec).items() if getattr(self.told.spec, name) != value]


def how_source_was_read(output: Source, source: Checkpoint) -> tuple[Layout | None, Hints]:
    """Return the layout and the hints by which an output's source was read when the output was made of it.

    What was said of one config is not true of another: it is returned for the very config.json that it was said of.
    Where the output, or its kconv.json, cannot be read, nothing was said: that is found when the output is checked.
    """
    try:
        manifest = read_manifest(output.open_weights().folder)
    except KconvError:
        return None, Hints()
    if file_digest(source.folder / "config.json") != manifest.source_config:
        return None, Hints()
    return by_name(manifest.source_layout), Hints(**manifest.hints.model_dump())
