"""Batches for training: token ids, and the target's states for them.

Online, the target is in memory and runs over each batch. Offline, its states were stored before (`kconv states`), or a
server returns them during training. Each gives what ModelOpt's offline forward reads, so training does not depend on
the source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..targets.forward import capture
from ..targets.model import CausalLM
from .data import Span, SpanReader, TextRows
from .drafter_recipe import DrafterRecipe

Batch = dict[str, Any]
"""`input_ids` [B, T] int64, `loss_mask` [B, T] bool, and `base_model_outputs`: `aux_hidden_states` [B, T, A * H] and
`base_model_hidden_states` [B, T, H], from which ModelOpt computes the target's logits again."""

# Bytes of states to keep for later passes.
KEEP = 2 << 30
# Batches of stored states to read ahead.
AHEAD = 2


class StatesSource(Protocol):
    """The source of a row's states."""

    @property
    def ahead(self) -> bool:
        """Whether rows are read ahead."""
        ...

    def read(self, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return captured [B, T, A * H] and final [B, T, H] states of rows [B], whose ids are [B, T].

        They may be on any device: the trainer moves them to its own.
        """
        ...


class Online:
    """The target itself, in memory, on the device that trains; it runs over each of packed `documents` separately."""

    ahead = False

    def __init__(self, target: CausalLM, captured: Sequence[int], documents: Tensor | None = None) -> None:
        self._target, self._captured, self._documents = target, captured, documents

    def read(self, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self._run(ids) if self._documents is None else self._run_packed(ids, self._documents[rows])

    def _run(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return capture(self._target, ids.to(self._target.device), self._captured)

    def _run_packed(self, ids: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        parts = []
        for row, numbers in zip(ids, documents, strict=True):
            own = [self._run(row[None, numbers == number]) for number in range(int(numbers.max()) + 1)]
            captured, hidden = (torch.cat(states, 1)[0] for states in zip(*own, strict=True))
            parts.append((_padded(captured, len(row)), _padded(hidden, len(row))))
        captured, hidden = (torch.stack(states) for states in zip(*parts, strict=True))
        return captured, hidden


class Kept:
    """States that are kept for later passes over the same rows, up to `room` bytes; others are requested again."""

    def __init__(self, states: StatesSource, room: int = KEEP) -> None:
        self.ahead, self._states, self._room = states.ahead, states, room
        self._kept: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def read(self, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        key = tuple(rows.tolist())
        if key not in self._kept:
            states = self._states.read(rows, ids)
            size = sum(part.numel() * part.element_size() for part in states)
            if size > self._room:
                return states
            self._room -= size
            self._kept[key] = states
        return self._kept[key]


class Shared:
    """States that are all in memory, or in a file that several processes map: [N, T, A * H] and [N, T, H]."""

    ahead = False

    def __init__(self, captured: Tensor, hidden: Tensor) -> None:
        self._captured, self._hidden = captured, hidden

    def read(self, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self._captured[rows], self._hidden[rows]


def keep_read_again(
    text: StatesSource, unseen: StatesSource, recipe: DrafterRecipe
) -> tuple[StatesSource, StatesSource]:
    """Return the states for training and for evaluation; those that are read again are kept."""
    again = recipe.steps * recipe.accumulate > recipe.batches
    return Kept(text) if again else text, Kept(unseen)


def online_states(
    target: CausalLM, recipe: DrafterRecipe, documents: Tensor | None = None
) -> tuple[StatesSource, StatesSource]:
    """Return a target's states for training and for evaluation; those that are read again are kept."""
    return keep_read_again(Online(target, recipe.captured, documents), Online(target, recipe.captured), recipe)


class Offline:
    """States on disk, or from a server, whose spans `spread` requests in parallel."""

    ahead = True

    def __init__(
        self, states: SpanReader, places: Sequence[Sequence[Span]], spread: Callable[..., Iterable[Any]] = map
    ) -> None:
        self._states, self._places, self._spread = states, places, spread

    def read(self, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See `StatesSource.read`; after a sequence's end the states are zero."""
        places = [self._places[row] for row in rows.tolist()]
        spans = iter(self._spread(self._span, [span for place in places for span in place]))
        parts = [self._row([next(spans) for _ in place], ids.shape[1]) for place in places]
        return torch.stack([captured for captured, _ in parts]), torch.stack([hidden for _, hidden in parts])

    def _span(self, span: Span) -> tuple[Tensor, Tensor]:
        sequence, start, taken = span
        return self._states.read_span(sequence, start, start + taken)

    def _row(self, parts: Sequence[tuple[Tensor, Tensor]], length: int) -> tuple[Tensor, Tensor]:
        captured, hidden = (torch.cat(states) for states in zip(*parts, strict=True))
        return _padded(captured, length), _padded(hidden, length)


def _padded(states: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(states, (0, 0, 0, length - len(states)))


class Feed(Dataset[Batch]):
    """Rows of a text in batches; rows that do not fill a batch are omitted.

    Args:
        dtype: of the returned states, whatever they were stored in.
        own: numbers of the rows to return, [n] int64; None for all of them.
    """

    def __init__(
        self,
        rows: TextRows,
        batch: int,
        states: StatesSource,
        dtype: torch.dtype = torch.float32,
        own: Tensor | None = None,
    ) -> None:
        self._rows, self._batch, self._states, self._dtype = rows, batch, states, dtype
        self._own = rows.own(0, 1) if own is None else own
        # One thread per batch read ahead, so that a server has the next one's requests before this one's last.
        self._reader = ThreadPoolExecutor(AHEAD, thread_name_prefix="read-ahead")
        self._order: list[int] = []
        self._coming: dict[int, Future[Batch]] = {}

    def __len__(self) -> int:
        return len(self._own) // self._batch

    def follow(self, order: Sequence[int]) -> None:
        """Announce the order of batches; those of stored states are then read ahead."""
        self._coming.clear()
        self._order = list(order) if self._states.ahead else []

    def __getitem__(self, index: int) -> Batch:
        # What was not announced is read now.
        coming = self._coming.pop(index, None)
        if index in self._order:
            after = self._order.index(index) + 1
            for place in self._order[after : after + AHEAD]:
                if place not in self._coming:
                    self._coming[place] = self._reader.submit(self._read, place)
        return self._read(index) if coming is None else coming.result()

    def _read(self, index: int) -> Batch:
        rows = self._own[index * self._batch : (index + 1) * self._batch]
        taken = self._rows.take(rows)
        captured, hidden = self._states.read(rows, taken.ids)
        packed = {} if taken.documents is None else {"documents": taken.documents}
        return packed | {
            "input_ids": taken.ids,
            "loss_mask": taken.mask,
            "base_model_outputs": {
                "aux_hidden_states": captured.to(self._dtype),
                "base_model_hidden_states": hidden.to(self._dtype),
            },
        }
