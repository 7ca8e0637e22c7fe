"""Texts with a target's states: read from a folder of states, or created by running the target over prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from ..checkpoint.source import Source
from ..drafters.spec import HeadSpec
from ..targets.prompts import read_prompts
from ..targets.states import StoredStates
from .batches import Calibration, Part, StatesBatch, check_amount, check_windows, part_of

# Sequences per healing step.
ROWS = 8


@dataclass(frozen=True)
class CalibrationTexts:
    """The calibration text of a head, with its states not yet in memory.

    Attributes:
        prompts: the digest of each prompt.
        gather: returns the batches; runs the target if their states are not stored.
    """

    name: str
    prompts: tuple[str, ...]
    parts: Sequence[Part]
    gather: Callable[[], Sequence[StatesBatch]]

    def calibration(self, lm_head: Tensor) -> Calibration:
        """Gather the states; `lm_head` is fp32 `[vocab, target_hidden]`, on the device for computation."""
        return Calibration(self.gather(), lm_head, self.name, self.prompts, self.parts)


def stored_texts(states: StoredStates, spec: HeadSpec, *, is_fitted: bool = True) -> CalibrationTexts:
    """Take the texts of a folder that `kconv states` wrote.

    Args:
        states: the folder, opened for the head's captured layers.
        is_fitted: whether an attention is fitted on them, which needs more of them than scales do.

    Raises:
        CalibrationInvalid: they are too few for a fit.
    """
    batches = StoredBatches(states)
    if is_fitted:
        check_amount(batches.shapes, batches.parts, spec, states.folder.name)
    digests = tuple(states.digests)
    return CalibrationTexts(states.folder.name, digests, batches.parts, lambda: batches)


def prompted_texts(
    file: Path, context: int, spec: HeadSpec, target: Source, *, trust_remote_code: bool = False
) -> CalibrationTexts:
    """Join the prompts of each part and cut them into texts of one length, for a target to run over.

    Args:
        context: tokens of a text.
        target: provides the tokenizer, and runs later.

    Raises:
        PromptsInvalid: they cannot be read.
        CalibrationInvalid: they are too few.
    """
    from ..targets.tokenizer import load_tokenizer

    prompts = read_prompts(file)
    tokenizer = load_tokenizer(target.fetch_tokenizer(), trust_remote_code=trust_remote_code)
    # By prompt, not by text: windows of one prompt repeat each other's words, so none may fall into another part.
    ids: dict[Part, list[int]] = defaultdict(list)
    for place, prompt in enumerate(prompts):
        ids[part_of(place)] += [i for turn in prompt.turns for i in tokenizer.encode(turn)]
    check_windows({part: len(own) for part, own in ids.items()}, len(prompts), context, file.name)
    windows: dict[Part, Tensor] = {
        part: torch.tensor(own[: len(own) // context * context]).view(-1, context) for part, own in ids.items()
    }
    split: list[tuple[Part, Tensor]] = [
        (part, group) for part, own in windows.items() if len(own) for group in own.split(ROWS)
    ]
    parts: list[Part] = [part for part, _ in split]
    groups = [group for _, group in split]
    # Checked before running the target for hours.
    check_amount([(len(tokens), context) for tokens in groups], parts, spec, file.name)
    digests = tuple(prompt.digest for prompt in prompts)
    return CalibrationTexts(file.name, digests, parts, lambda: _run_target(target.open_weights().folder, groups, spec))


def _run_target(folder: Path, groups: Sequence[Tensor], spec: HeadSpec) -> list[StatesBatch]:
    from ..targets.forward import capture
    from ..targets.model import load_target

    model = load_target(folder, torch.float32)
    return [StatesBatch(tokens, *capture(model, tokens, spec.captured)) for tokens in groups]


class StoredBatches(Sequence[StatesBatch]):
    """Stored states as batches of one length, read on request.

    Attributes:
        parts: for each batch, its part. All sequences of a prompt are in one part: its text and its answers begin
            alike.
        shapes: for each batch, the number of sequences and of tokens.
    """

    def __init__(self, states: StoredStates) -> None:
        self._states = states
        prompts = sorted({sequence.digest for sequence in states.sequences})
        parts: dict[str, Part] = {digest: part_of(place) for place, digest in enumerate(prompts)}
        alike: dict[tuple[Part, int], list[int]] = defaultdict(list)
        for index, sequence in enumerate(states.sequences):
            alike[parts[sequence.digest], sequence.length].append(index)
        groups = [same[begin : begin + ROWS] for same in alike.values() for begin in range(0, len(same), ROWS)]
        self._groups = sorted(groups)
        self.parts: list[Part] = [parts[states.sequences[group[0]].digest] for group in self._groups]
        self.shapes = [(len(group), states.sequences[group[0]].length) for group in self._groups]

    def __len__(self) -> int:
        return len(self._groups)

    @overload
    def __getitem__(self, index: int) -> StatesBatch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[StatesBatch]: ...
    def __getitem__(self, index: int | slice) -> StatesBatch | Sequence[StatesBatch]:

        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        stored = [self._states.read(i) for i in self._groups[index]]
        return StatesBatch(
            torch.stack([one.tokens.long() for one in stored]),
            torch.stack([one.captured.float() for one in stored]),
            torch.stack([one.hidden.float() for one in stored]),
        )
