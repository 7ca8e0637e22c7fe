"""Hidden states on disk: `states.json`, and sequences read back one at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import Field

from ..checkpoint.bytes import file_digest
from ..checkpoint.header import TensorInfo, read_header
from ..checkpoint.manifest import Record
from ..checkpoint.schema import load_json
from ..checkpoint.tensors import read_tensor
from ..errors import StatesInvalid
from .config import TargetConfig

RECORD = "states.json"
Kind = Literal["held-out", "sampled", "greedy"]
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


class TargetRecord(Record):
    """Which target the states are of.

    Attributes:
        source: how the user named it.
        config_sha256: of its config.json, as canonical JSON.
        model_type, layers, hidden, vocab: its dims.
        lm_head_blake3: of its output matrix's bytes, which tells one fine-tune from another.
    """

    source: str
    config_sha256: str
    model_type: str
    layers: int
    hidden: int
    vocab: int
    lm_head_blake3: str


class PromptsRecord(Record):
    """What the sequences were made of.

    Attributes:
        file: the file's name.
        sha256: of the file.
        chat: prompts went through the chat template; else they are plain text.
        prompt_tokens: prompts were cut to this before they were continued; None for whole.
        text_tokens: held-out text was cut to this; None for whole.
    """

    file: str
    sha256: str
    chat: bool
    prompt_tokens: int | None
    text_tokens: int | None


class SequenceRecord(Record):
    """One sequence of tokens with states.

    Attributes:
        prompt: the prompt's id.
        category: the prompt's, "" where it has none.
        digest: sha256 of the prompt's turns.
        kind: the prompt's own text ("held-out"), or the target's continuation of it.
        prompt_length: tokens of it that are the prompt; 1 for held-out text.
        length: all of its tokens.
    """

    prompt: str
    category: str
    digest: str
    kind: Kind
    prompt_length: int
    length: int


class ShardRecord(Record):
    """A file of states.

    Attributes:
        file, size, sha256: the file.
        first, count: the sequences in it, `sequences[first : first + count]`.
    """

    file: str
    size: int
    sha256: str
    first: int
    count: int


class StatesRecord(Record):
    """Everything about a folder of states; the schema of states.json.

    Attributes:
        kconv: the version that wrote it.
        target: whose states these are.
        captured: the layers, ascending, as outputs of 0-based decoder layers.
        dtype: of the states, as safetensors names it.
        prompts: what the sequences were made of.
        tokenizer: the class, and sha256 of each of its files.
        seed: of the sampled continuations; shard n is drawn with `seed + n`.
        new_tokens: how many tokens were added, by kind.
        sequences: in order.
        shards: in order; empty in the plan of a run that goes on.
    """

    schema_version: Literal[1] = Field(default=1, alias="schema")
    kconv: str = Field(default_factory=lambda: version("kconv"))
    target: TargetRecord
    captured: tuple[int, ...]
    dtype: Literal["F32", "BF16", "F16"]
    prompts: PromptsRecord
    tokenizer: dict[str, str]
    seed: int
    new_tokens: dict[Kind, int]
    sequences: tuple[SequenceRecord, ...]
    shards: tuple[ShardRecord, ...] = ()

    @property
    def rows(self) -> int:
        """Tokens in all."""
        return sum(sequence.length for sequence in self.sequences)

    @property
    def digests(self) -> frozenset[str]:
        """The prompts' digests."""
        return frozenset(sequence.digest for sequence in self.sequences)

    def to_json(self) -> str:
        """Return states.json's text."""
        return self.model_dump_json(indent=1, by_alias=True) + "\n"


def read_record(folder: Path) -> StatesRecord:
    """Read a folder's states.json.

    Raises:
        StatesInvalid: it is missing or not of the schema.
    """
    missing = StatesInvalid(f"{folder} holds no {RECORD}", where=folder, fix="Make it with kconv states.")
    return load_json(
        StatesRecord,
        folder / RECORD,
        StatesInvalid,
        what="record of kconv's schema",
        fix="Make the states again with this kconv.",
        missing=missing,
    )


def config_sha256(config: dict[str, Any]) -> str:
    """Return the sha256 of a config.json's values, however they were laid out."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def cut_shards(lengths: Sequence[int], token_bytes: int, shard_bytes: int) -> list[range]:
    """Cut sequences into runs of at most `shard_bytes`; one that is longer stands alone.

    Args:
        lengths: tokens of each sequence.
        token_bytes: bytes of one token's states.
        shard_bytes: the bound.
    """
    cuts, held = [0], 0
    for index, length in enumerate(lengths):
        if held and held + length * token_bytes > shard_bytes:
            cuts.append(index)
            held = 0
        held += length * token_bytes
    return [range(*pair) for pair in zip(cuts, [*cuts[1:], len(lengths)], strict=True)]


def shard_name(number: int, count: int) -> str:
    """Return the name of one of `count` shards, counted from 0."""
    return f"states-{number + 1:05d}-of-{count:05d}.safetensors"


MODELOPT = "*.pt"


@dataclass(frozen=True)
class StoredSequence:
    """One sequence with the target's states over it.

    Attributes:
        tokens: ids [T].
        captured: [T, A * H], the captured layers side by side, ascending.
        hidden: [T, H], after the final norm: what `lm_head` reads.
        loss_mask: [T], whether a token is an answer's; None where that is not said.
    """

    tokens: torch.Tensor
    captured: torch.Tensor
    hidden: torch.Tensor
    loss_mask: torch.Tensor | None


class StatesFolder(Protocol):
    """States on disk, of which one sequence at a time is read."""

    @property
    def folder(self) -> Path:
        """Where they are."""
        ...

    @property
    def sequences(self) -> Sequence[SequenceRecord]:
        """What each sequence is."""
        ...

    def read_tokens(self, index: int) -> torch.Tensor:
        """Read the token ids of one sequence, [T].

        Raises:
            StatesInvalid: a file is missing or damaged.
        """
        ...

    def read(self, index: int) -> StoredSequence:
        """Read one sequence.

        Raises:
            StatesInvalid: a file is missing or damaged.
        """
        ...


@dataclass(frozen=True)
class StoredStates:
    """A folder that `kconv states` wrote.

    Attributes:
        folder: where.
        record: its states.json.
        columns: the captured layers that are read, of those that are stored; places in the record's order.
    """

    folder: Path
    record: StatesRecord
    columns: tuple[int, ...]
    _headers: dict[str, dict[str, TensorInfo]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def sequences(self) -> Sequence[SequenceRecord]:
        """See `StatesFolder.sequences`."""
        return self.record.sequences

    def read_tokens(self, index: int) -> torch.Tensor:
        """See `StatesFolder.read_tokens`."""
        return self._part(index, "input_ids")

    def read(self, index: int) -> StoredSequence:
        """See `StatesFolder.read`."""
        tokens, hidden = self._part(index, "input_ids"), self._part(index, "hidden_states", self.record.target.hidden)
        layers = len(self.record.captured)
        captured = self._part(index, "aux_hidden_states", layers * self.record.target.hidden)
        if self.columns != tuple(range(layers)):
            captured = captured.unflatten(1, (layers, -1))[:, list(self.columns)].flatten(1)
        masked = self.record.sequences[index].kind != "held-out"
        return StoredSequence(tokens, captured, hidden, self._part(index, "loss_mask") if masked else None)

    def _part(self, index: int, name: str, *width: int) -> torch.Tensor:
        """Read one tensor of a sequence, [T, *width]."""
        shard = next(s for s in self.record.shards if s.first <= index < s.first + s.count)
        info = self._header(shard).get(f"{index:06d}.{name}")
        if info is None or info.shape != (self.record.sequences[index].length, *width):
            raise StatesInvalid(
                f"{shard.file} does not hold sequence {index} as {RECORD} describes it",
                where=self.folder,
                fix="Make the states again.",
            )
        return read_tensor(info)

    def verify(self) -> None:
        """Hold every shard against its sha256.

        Raises:
            StatesInvalid: one is missing, or its bytes are not the ones that were written.
        """
        for shard in self.record.shards:
            try:
                whole = file_digest(self.folder / shard.file) == shard.sha256
            except OSError as fault:
                raise _missing(self.folder, shard, fault) from fault
            if not whole:
                raise StatesInvalid(
                    f"{shard.file} is not what kconv states wrote",
                    where=self.folder,
                    fix="Fetch it again, or make the states again.",
                )

    def _header(self, shard: ShardRecord) -> dict[str, TensorInfo]:
        if shard.file not in self._headers:
            file = self.folder / shard.file
            try:
                size = file.stat().st_size
            except OSError as fault:
                raise _missing(self.folder, shard, fault) from fault
            if size != shard.size:
                raise StatesInvalid(
                    f"{shard.file} is {size:,} bytes, and {shard.size:,} were written",
                    where=self.folder,
                    fix="Fetch it again, or make the states again.",
                )
            self._headers[shard.file] = read_header(file)
        return self._headers[shard.file]


def open_states(
    folder: Path, *, config: TargetConfig | None = None, captured: Sequence[int] | None = None
) -> StoredStates:
    """Open a folder of states, and refuse those of another target.

    Args:
        folder: what `kconv states` wrote.
        config: of the target that the states must be of; not checked if None.
        captured: the layers that are wanted, as outputs; all that are stored if None.

    Raises:
        StatesInvalid: there is no such folder, it is of another target, or lacks one of the layers.
    """
    record = read_record(folder)
    _check_shards(folder, record)
    if config is not None:
        _check_target(folder, record, config)
    wanted = record.captured if captured is None else tuple(captured)
    absent = sorted(set(wanted) - set(record.captured))
    if absent:
        raise StatesInvalid(
            f"the states are of layers {list(record.captured)}, and layers {absent} are wanted (as outputs)",
            where=folder,
            fix=f"Run kconv states with --captured {','.join(map(str, wanted))}.",
        )
    return StoredStates(folder, record, tuple(record.captured.index(layer) for layer in wanted))


def _check_shards(folder: Path, record: StatesRecord) -> None:
    """Refuse a record whose shards do not follow one another over all of its sequences, or leave the folder."""
    ends = [0, *(shard.first + shard.count for shard in record.shards)]
    follows = [shard.first for shard in record.shards] == ends[:-1] and ends[-1] == len(record.sequences)
    if not follows or any(Path(shard.file).name != shard.file for shard in record.shards):
        raise StatesInvalid(
            f"{RECORD} lists shards that do not make up its {len(record.sequences)} sequences",
            where=folder,
            fix="Make the states again.",
        )


def _check_target(folder: Path, record: StatesRecord, config: TargetConfig) -> None:
    ours = {
        "hidden_size": (record.target.hidden, config.hidden),
        "num_hidden_layers": (record.target.layers, config.layers),
        "vocab_size": (record.target.vocab, config.vocab),
        "config.json's sha256": (record.target.config_sha256[:16], config_sha256(config.raw)[:16]),
    }
    for what, (theirs, own) in ours.items():
        if theirs != own:
            raise StatesInvalid(
                f"the states are of {record.target.source}, another target: {what} is {theirs} there and {own} here",
                where=folder,
                fix="Give the target that the states were made with, or make states of this one.",
            )


def _missing(folder: Path, shard: ShardRecord, fault: OSError) -> StatesInvalid:
    return StatesInvalid(
        f"{shard.file} cannot be read: {fault.strerror}", where=folder, fix="Fetch it again, or make the states again."
    )
