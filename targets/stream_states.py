"""Hidden states that a running target gives while a head is trained on them.

The sequences are planned as `write_states` plans them, so the rows cut from them are those of stored states. Nothing
is kept: a sequence is asked for each time that a row holds a part of it. What waits at once is bounded by whoever
reads: so many batches ahead, so many requests side by side.
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
    """Planned sequences of dialogues, and the target that gives their states.

    Attributes:
        planned: the sequences, with their whole tokens and their masks of answers.
        runner: the target, running.
    """

    planned: PlannedStates
    runner: Runner

    @property
    def folder(self) -> Path:
        """The data that the sequences come from."""
        return Path(self.planned.record.prompts.file)

    @property
    def sequences(self) -> Sequence[SequenceRecord]:
        """See `StatesFolder.sequences`."""
        return self.planned.record.sequences

    def read_tokens(self, index: int) -> torch.Tensor:
        """See `StatesFolder.read_tokens`."""
        return self.planned.sequences[index].tokens.long()

    def read_mask(self, index: int) -> torch.Tensor | None:
        """See `StatesFolder.read_mask`."""
        return self.planned.sequences[index].mask

    def read_span(self, index: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StatesFolder.read_span`; the target runs over the whole sequence, as it does where states are stored.

        Raises:
            EngineFailed: the server died, or hands out no states.
            StatesInvalid: the states are not those of the sequence.
        """
        captured, hidden = self.runner.capture(self.read_tokens(index)[None], self.planned.record.captured)
        return captured[0, begin:end], hidden[0, begin:end]

    def read(self, index: int) -> StoredSequence:
        """See `StatesFolder.read`."""
        captured, hidden = self.read_span(index, 0, self.sequences[index].length)
        return StoredSequence(self.read_tokens(index), captured, hidden, self.read_mask(index))
