"""Hidden states from a running target while a head is trained on them.

`write_states` plans the sequences, so the rows cut from them equal those of stored states. Nothing is kept: a sequence
is requested each time a row needs a part of it. The reader bounds what waits: a number of batches ahead, and a number
of parallel requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .states import SequenceRecord, StoredSequence
from .write_states import PlannedStates, Runner


@dataclass(frozen=True)
class StreamedStates:
    """Planned sequences of dialogues, with their whole tokens and masks, and the target that computes their states."""

    planned: PlannedStates
    runner: Runner

    @property
    def folder(self) -> Path:
        """The data that the sequences come from."""
        return Path(self.planned.record.prompts.file)

    @property
    def sequences(self) -> Sequence[SequenceRecord]:
        return self.planned.records

    def read_tokens(self, index: int) -> torch.Tensor:
        return self.planned.sequences[index].tokens.long()

    def read_mask(self, index: int) -> torch.Tensor | None:
        return self.planned.sequences[index].mask

    def read_span(self, index: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The target runs over the whole sequence, as for stored states."""
        captured, hidden = self.runner.capture(self.read_tokens(index)[None], self.planned.record.captured)
        return captured[0, begin:end], hidden[0, begin:end]

    def read(self, index: int) -> StoredSequence:
        captured, hidden = self.read_span(index, 0, self.sequences[index].length)
        return StoredSequence(self.read_tokens(index), captured, hidden, self.read_mask(index))
