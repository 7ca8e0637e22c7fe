"""Batches for training: token ids, and the target's states over them.

Online, the target is in memory and runs over each batch; offline, its states were stored before (`kconv states`).
Either gives what ModelOpt's offline forward reads, so training does not know which one it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..targets.forward import capture
from ..targets.model import CausalLM
from ..targets.states import StatesFolder
from .recipe import EagleRecipe

Batch = dict[str, Any]
"""`input_ids` [B, T] int64, `loss_mask` [B, T] bool, and `base_model_outputs`: `aux_hidden_states` [B, T, A * H] and
`base_model_hidden_states` [B, T, H], from which ModelOpt computes the target's logits again."""

# Bytes of states that are kept for later passes.
KEEP = 2 << 30


class StatesSource(Protocol):
    """Where a row's states come from."""

    def read(self, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return captured [B, T, A * H] and final [B, T, H] states of rows [B], whose ids are [B, T].

        They may be on any device: the trainer moves what is not on its own.
        """
        ...


class Online:
    """The target itself.

    Args:
        target: a whole target, on the device that trains.
        captured: the layers that the head reads.
        keep: bytes of states that may be kept for later passes over the same rows; beyond them the target runs again.
    """

    def __init__(self, target: CausalLM, captured: Sequence[int], keep: int = KEEP) -> None:
        self._target, self._captured, self._free = target, captured, keep
        self._kept: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def read(self, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See `States.read`."""
        key = tuple(rows.tolist())
        if key not in self._kept:
            states = capture(self._target, ids.to(self._target.device), self._captured)
            size = sum(part.numel() * part.element_size() for part in states)
            if size > self._free:
                return states
            self._free -= size
            self._kept[key] = states
        return self._kept[key]


def online_states(target: CausalLM, recipe: EagleRecipe) -> tuple[StatesSource, StatesSource]:
    """Return a target's states to train on and to look at, kept where they are read again.

    Args:
        target: as of `Online`.
        recipe: the head's.
    """
    again = recipe.steps * recipe.accumulate > recipe.batches
    return Online(target, recipe.captured, KEEP if again else 0), Online(target, recipe.captured)


class Offline:
    """States on disk.

    Args:
        states: what was stored.
        places: of each row, the sequence it was cut from and the token it begins with.
    """

    def __init__(self, states: StatesFolder, places: Sequence[tuple[int, int]]) -> None:
        self._states, self._places = states, places

    def read(self, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See `States.read`; behind a sequence's end the states are zero."""
        parts = [self._row(self._places[row], ids.shape[1]) for row in rows.tolist()]
        return torch.stack([captured for captured, _ in parts]), torch.stack([hidden for _, hidden in parts])

    def _row(self, place: tuple[int, int], length: int) -> tuple[Tensor, Tensor]:
        sequence, start = place
        stored = self._states.read(sequence)
        return _cut(stored.captured, start, length), _cut(stored.hidden, start, length)


def _cut(states: Tensor, start: int, length: int) -> Tensor:
    part = states[start : start + length]
    return torch.nn.functional.pad(part, (0, 0, 0, length - len(part)))


class Feed(Dataset[Batch]):
    """Rows of a text in batches.

    Args:
        ids: [N, T] int64.
        mask: [N, T] bool, which tokens count in the loss.
        batch: rows per batch; rows that fill no whole batch are left out.
        states: the target's, over these rows.
        dtype: what the states are given in, whatever they were stored in.
    """

    def __init__(
        self, ids: Tensor, mask: Tensor, batch: int, states: StatesSource, dtype: torch.dtype = torch.float32
    ) -> None:
        self._ids, self._mask, self._batch, self._states, self._dtype = ids, mask, batch, states, dtype

    def __len__(self) -> int:
        return len(self._ids) // self._batch

    def __getitem__(self, index: int) -> Batch:
        rows = torch.arange(index * self._batch, (index + 1) * self._batch)
        ids = self._ids[rows]
        captured, hidden = self._states.read(rows, ids)
        return {
            "input_ids": ids,
            "loss_mask": self._mask[rows],
            "base_model_outputs": {
                "aux_hidden_states": captured.to(self._dtype),
                "base_model_hidden_states": hidden.to(self._dtype),
            },
        }
