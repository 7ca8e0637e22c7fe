"""Hidden states in the format of ModelOpt's dumps for offline training: one .pt per sequence.

The schema is the one of ModelOpt 0.47's OfflineSupervisedDataset (modelopt/torch/speculative/eagle/utils.py): input_ids
[T], hidden_states [T, H] after the final norm unless hidden_states_prenorm says otherwise, aux_hidden_states
[T, A * H], and loss_mask [T] if only answers count. A file names neither its target nor its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.pickles import read_pickle
from ..errors import KconvError, StatesInvalid
from .config import TargetConfig
from .states import MODELOPT, SequenceRecord, StoredSequence, refuse_zeros

KEYS = ("input_ids", "hidden_states", "aux_hidden_states")


@dataclass(frozen=True)
class ModelOptStates:
    """A folder of ModelOpt's .pt files.

    Attributes:
        config: of the target that the user named.
        layers: how many captured layers they must hold.
        sequences: one per file; the file's name stands for the prompt, whose text is not stored.
    """

    folder: Path
    files: tuple[Path, ...]
    config: TargetConfig
    layers: int
    sequences: Sequence[SequenceRecord]

    def read_tokens(self, index: int) -> torch.Tensor:
        return self._mapped(index).tokens

    def read_mask(self, index: int) -> torch.Tensor | None:
        return self._mapped(index).loss_mask

    def read_span(self, index: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The files are memory-mapped, so only that span is read."""
        stored = self._mapped(index)
        captured, hidden = (refuse_zeros(one[begin:end], self.files[index]) for one in (stored.captured, stored.hidden))
        return captured, hidden

    def read(self, index: int) -> StoredSequence:
        stored = self._mapped(index)
        for states in (stored.captured, stored.hidden):
            refuse_zeros(states, self.files[index])
        return stored

    def _mapped(self, index: int) -> StoredSequence:
        return _read(self.files[index], self.config, self.layers)


def open_modelopt_states(
    folder: Path, *, config: TargetConfig, captured: Sequence[int], allow_pickle: bool
) -> ModelOptStates:
    """Open a folder of ModelOpt's .pt files, at any depth.

    Args:
        config: of their target; widths and ids are checked against it, since the files have nothing else to check.
        captured: their layers, as the user states them.
        allow_pickle: whether pickles may be read at all; they are read with torch's `weights_only=True`.

    Raises:
        StatesInvalid: pickles may not be read, there are none, or one does not match the schema or the target.
    """
    files = tuple(sorted(folder.rglob(MODELOPT)))
    if not files:
        raise StatesInvalid(f"{folder} holds no {MODELOPT} files", fix="Pass the folder of ModelOpt's dump.")
    if not allow_pickle:
        raise StatesInvalid(
            f"{files[0].name} is a pickle, which kconv reads only with --allow-pickle",
            where=folder,
            fix="Add --allow-pickle if you trust its source. kconv then reads only tensors and plain values.",
        )
    sequences = tuple(
        SequenceRecord(
            prompt=str(file.relative_to(folder)),
            category="",
            digest="",
            kind="held-out",
            prompt_length=1,
            length=len(_read(file, config, len(captured)).tokens),
        )
        for file in files
    )
    return ModelOptStates(folder, files, config, len(captured), sequences)


def _read(file: Path, config: TargetConfig, layers: int) -> StoredSequence:
    try:
        # torch's own reader also calls bytearray and the like, and allocates as much as the file says.
        read_pickle(file)
    except KconvError as fault:
        raise StatesInvalid(fault.what, where=file, fix="Dump it again.") from fault
    try:
        # Memory-mapped, so that asking for a file's length does not read its states.
        values: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as fault:  # torch raises what unpickling raises: UnpicklingError, RuntimeError, EOFError, ...
        raise StatesInvalid(
            f"{file.name} cannot be read: {str(fault).strip().splitlines()[0]}", where=file, fix="Dump it again."
        ) from fault
    if not isinstance(values, dict) or not all(isinstance(values.get(key), torch.Tensor) for key in KEYS):
        raise _invalid(file, f"holds no {', '.join(KEYS)}")
    tokens, hidden, captured = (values[key] for key in KEYS)
    if values.get("hidden_states_prenorm"):
        raise _invalid(file, "holds states from before the final norm, but lm_head needs those after it")
    expected = ((len(tokens),), (len(tokens), config.hidden), (len(tokens), layers * config.hidden))
    shapes = tuple(tuple(tensor.shape) for tensor in (tokens, hidden, captured))
    if shapes != expected:
        raise _invalid(
            file, f"has shapes {shapes}, but {layers} layers of a target of width {config.hidden} need {expected}"
        )
    if len(tokens) < 2 or int(tokens.min()) < 0 or int(tokens.max()) >= config.vocab:
        raise _invalid(file, f"holds token ids outside the target's {config.vocab}, or fewer than two")
    mask = values.get("loss_mask")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.shape != tokens.shape):
        raise _invalid(file, "has a loss_mask with a different length")
    return StoredSequence(tokens.long(), captured, hidden, None if mask is None else mask.bool())


def _invalid(file: Path, what: str) -> StatesInvalid:
    return StatesInvalid(
        f"{file.name} {what}", where=file, fix="Dump the states again for this target and these layers."
    )
