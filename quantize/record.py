"""What is known of a finished file of the output."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ..checkpoint.manifest import FileRecord, StepRecord
from ..checkpoint.staging import files_of


class UnitRecord(BaseModel):
    """A file that is whole: itself, and how each of its tensors came to be."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: FileRecord
    tensors: tuple[StepRecord, ...]


@dataclass(frozen=True)
class Workplace:
    """The folder beside the output in which it comes to be.

    Attributes:
        root: as `checkpoint.staging.keep_staging` gives it.
    """

    root: Path

    @property
    def files(self) -> Path:
        """What becomes the output."""
        return files_of(self.root)

    def record(self, file: str) -> Path:
        """Return where the record of a file is."""
        return self.root / f"{file}.json"

    def write(self, record: UnitRecord) -> None:
        """Write a record, whole, after what it records is on the disk."""
        temporary = self.root / f"{record.file.name}.{os.getpid()}.tmp"
        with temporary.open("w") as out:
            out.write(record.model_dump_json(by_alias=True))
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(self.record(record.file.name))

    def read(self, file: str) -> UnitRecord | None:
        """Return the record of a file that is whole; None if there is none, or the file is not of its size.

        A record is written after its file was flushed, so a file of the recorded size holds the recorded bytes;
        `kconv verify` hashes them again.
        """
        try:
            record = UnitRecord.model_validate_json(self.record(file).read_bytes())
            whole = (self.files / file).stat().st_size == record.file.size
        except (OSError, ValidationError):
            return None
        return record if whole else None

    def is_done(self, file: str) -> bool:
        """Say whether a file is there and recorded, without reading the whole record."""
        return self.record(file).exists() and (self.files / file).exists()

    def clear(self, file: str) -> None:
        """Remove what a killed process left of a file that is to be made."""
        for folder in (self.root, self.files):
            for left in folder.glob(f"{file}.*.tmp"):
                left.unlink(missing_ok=True)

    def failure(self, rank: int) -> Path:
        """Return where a rank says that it failed."""
        return self.root / f"rank-{rank}.failed"
