"""Hidden states on disk: `states.json`, and sequences read back one at a time."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as record_dataclass

from ..checkpoint.bytes import file_digest
from ..checkpoint.header import TensorInfo, read_header
from ..checkpoint.manifest import Record
from ..checkpoint.schema import load_json
from ..errors import StatesInvalid
from .config import TargetConfig

# Imported where needed: refusing states of another target takes less time than the import.
if TYPE_CHECKING:
    import torch

RECORD, INDEX = "states.json", "index.safetensors"
Kind = Literal["held-out", "sampled", "greedy", "dialogue"]
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


class TargetRecord(Record):
    """The target that the states come from.

    Attributes:
        source: as the user named it.
        config_sha256: of its config.json, as canonical JSON.
        model_type, layers, hidden, vocab: its dims.
        lm_head_blake3: of its output matrix's bytes, which distinguishes one fine-tune from another.
    """

    source: str
    config_sha256: str
    model_type: str
    layers: int
    hidden: int
    vocab: int
    lm_head_blake3: str


class PromptsRecord(Record):
    """What the sequences were made from.

    Attributes:
        file: the file's name, or a dataset's id.
        sha256: of the file; for a dataset, of the tokens and masks from it.
        chat: whether prompts went through the chat template rather than plain text.
        dialogues: whether it holds dialogues with their answers rather than prompts.
        prompt_tokens: length to which prompts were cut before they were continued; None for whole.
        text_tokens: length to which held-out text was cut; None for whole.
    """

    file: str
    sha256: str
    chat: bool
    dialogues: bool = False
    prompt_tokens: int | None
    text_tokens: int | None


# Not a pydantic model, which takes a kilobyte: a million prompts make millions of these.
@record_dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class SequenceRecord:
    """One sequence of tokens with states.

    Attributes:
        prompt: the prompt's id.
        category: the prompt's, "" if it has none.
        digest: sha256 of the prompt's turns.
        kind: the prompt's own text ("held-out"), the target's continuation of it, or a dialogue with its answers.
        prompt_length: number of prompt tokens; 1 for held-out text; for a dialogue, the tokens before the first answer.
        length: number of tokens.
        answered: for a dialogue, the digests of the prompts answered in it; `digest` covers all its turns.
    """

    prompt: str
    category: str
    digest: str
    kind: Kind
    prompt_length: int
    length: int
    answered: tuple[str, ...] = ()


class IndexRecord(Record):
    """The file that holds the tokens and masks of all sequences, in order.

    Attributes:
        file, size, sha256: the file.
    """

    file: str
    size: int
    sha256: str


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
    """A folder of hidden states; the schema of states.json.

    Attributes:
        kconv: the version that wrote it.
        target: the target that the states come from.
        captured: the layers, ascending, as outputs of 0-based decoder layers.
        dtype: of the states, as safetensors names it.
        prompts: what the sequences were made from.
        tokenizer: the class, and sha256 of each of its files.
        seed: of the sampled continuations; shard n uses `seed + n`.
        new_tokens: how many tokens were added, by kind.
        sequences: in order.
        shards: in order; empty in the plan of a run that can be resumed.
        index: only tokens and masks, which training reads first; None in folders of older versions.
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
    index: IndexRecord | None = None

    @property
    def rows(self) -> int:
        """Tokens in all."""
        return sum(sequence.length for sequence in self.sequences)

    @property
    def digests(self) -> frozenset[str]:
        """The prompts' digests."""
        return frozenset(digest for s in self.sequences for digest in (s.digest, *s.answered))

    def to_json(self) -> str:
        """Return states.json's text."""
        return self.model_dump_json(indent=1, by_alias=True) + "\n"


def read_record(folder: Path) -> StatesRecord:
    """Read a folder's states.json.

    Raises:
        StatesInvalid: it is missing or does not match the schema.
    """
    missing = StatesInvalid(f"{folder} holds no {RECORD}", where=folder, fix="Create it with kconv states.")
    return load_json(
        StatesRecord,
        folder / RECORD,
        StatesInvalid,
        what="record of kconv states",
        fix="Create the states again with this kconv.",
        missing=missing,
    )


def config_sha256(config: dict[str, Any]) -> str:
    """Return the sha256 of a config.json's values, independent of formatting."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def cut_shards(lengths: Sequence[int], token_bytes: int, shard_bytes: int) -> list[range]:
    """Split sequences into runs of at most `shard_bytes`; a longer one gets a run of its own.

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
    """One sequence with the target's states for it.

    Attributes:
        tokens: ids [T].
        captured: [T, A * H], the captured layers concatenated, ascending.
        hidden: [T, H], after the final norm: what `lm_head` reads.
        loss_mask: [T], whether a token belongs to an answer; None if unknown.
    """

    tokens: torch.Tensor
    captured: torch.Tensor
    hidden: torch.Tensor
    loss_mask: torch.Tensor | None


class StatesFolder(Protocol):
    """States on disk, read one sequence at a time."""

    @property
    def folder(self) -> Path:
        """Where they are."""
        ...

    @property
    def sequences(self) -> Sequence[SequenceRecord]:
        """The record of each sequence."""
        ...

    def read_tokens(self, index: int) -> torch.Tensor:
        """Read the token ids of one sequence, [T].

        Raises:
            StatesInvalid: a file is missing or damaged.
        """
        ...

    def read_mask(self, index: int) -> torch.Tensor | None:
        """Read which tokens of a sequence belong to an answer, [T] bool; None if unknown.

        Raises:
            StatesInvalid: a file is missing or damaged.
        """
        ...

    def read_span(self, index: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read only the captured and final states of a sequence's tokens from `begin` up to `end`.

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
        folder: its path.
        record: its states.json.
        columns: which of the stored captured layers to read; positions in the record's order.
    """

    folder: Path
    record: StatesRecord
    columns: tuple[int, ...]
    _headers: dict[str, dict[str, TensorInfo]] = field(default_factory=dict, repr=False, compare=False)
    _index: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)
    _starts: list[int] = field(default_factory=list, repr=False, compare=False)

    @property
    def sequences(self) -> Sequence[SequenceRecord]:
        """See `StatesFolder.sequences`."""
        return self.record.sequences

    def read_tokens(self, index: int) -> torch.Tensor:
        """See `StatesFolder.read_tokens`."""
        return self._indexed(index, "input_ids").long()

    def read_mask(self, index: int) -> torch.Tensor | None:
        """See `StatesFolder.read_mask`."""
        return self._indexed(index, "loss_mask") if self.record.sequences[index].kind != "held-out" else None

    def read_span(self, index: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StatesFolder.read_span`."""
        from ..checkpoint.tensors import read_tensor

        width, layers = self.record.target.hidden, len(self.record.captured)
        captured, hidden = (
            read_tensor(_rows_of(self._info(index, name, columns), begin, end))
            for name, columns in (("aux_hidden_states", layers * width), ("hidden_states", width))
        )
        if self.columns != tuple(range(layers)):
            captured = captured.unflatten(1, (layers, -1))[:, list(self.columns)].flatten(1)
        return captured, hidden

    def read(self, index: int) -> StoredSequence:
        """See `StatesFolder.read`."""
        captured, hidden = self.read_span(index, 0, self.record.sequences[index].length)
        return StoredSequence(self.read_tokens(index), captured, hidden, self.read_mask(index))

    def _indexed(self, index: int, name: str) -> torch.Tensor:
        """Return the tokens or the mask of a sequence, from the index if there is one."""
        from ..checkpoint.tensors import read_tensor

        if self.record.index is None:
            return read_tensor(self._info(index, name))
        if not self._index:
            self._open_index(self.record.index)
        return self._index[name][self._starts[index] : self._starts[index + 1]]

    def _open_index(self, index: IndexRecord) -> None:
        """Map the index, and refuse one whose length differs from the record."""
        from ..checkpoint.tensors import read_tensor

        header = read_header(_sized(self.folder, index))
        rows = self.record.rows
        if any(name not in header or header[name].shape != (rows,) for name in ("input_ids", "loss_mask")):
            raise StatesInvalid(
                f"{index.file} does not hold the {rows:,} tokens that {RECORD} records",
                where=self.folder,
                fix="Fetch it again, or create the states again.",
            )
        self._starts.extend(accumulate((s.length for s in self.record.sequences), initial=0))
        self._index.update({name: read_tensor(header[name]) for name in ("input_ids", "loss_mask")})

    def _info(self, index: int, name: str, *width: int) -> TensorInfo:
        """Find one tensor of a sequence, [T, *width]."""
        place = bisect_right(self.record.shards, index, key=lambda shard: shard.first) - 1
        shard = self.record.shards[place]
        info = self._header(shard).get(f"{index:06d}.{name}")
        if info is None or info.shape != (self.record.sequences[index].length, *width):
            raise StatesInvalid(
                f"{shard.file} does not hold sequence {index} as {RECORD} describes it",
                where=self.folder,
                fix="Create the states again.",
            )
        return info

    def files_of(self, sequences: Iterable[int]) -> list[str]:
        """Return the names of the files with these sequences, in order."""
        places = {bisect_right(self.record.shards, index, key=lambda shard: shard.first) - 1 for index in sequences}
        return [self.record.shards[place].file for place in sorted(places)]

    def check_files(self, sequences: Iterable[int]) -> None:
        """Refuse a folder that lacks a file with these sequences.

        Raises:
            StatesInvalid: one is missing, or has another size.
        """
        names = self.files_of(sequences)
        absent = [name for name in names if not (self.folder / name).exists()]
        if absent:
            raise StatesInvalid(
                f"{len(absent)} of the {len(names)} files that this process reads are missing, first {absent[0]}",
                where=self.folder,
                fix="Fetch them. With several nodes, kconv train --dry-run --json lists the files of each.",
            )
        for shard in self.record.shards:
            if shard.file in names:
                _sized(self.folder, shard)

    def verify(self) -> None:
        """Check every shard against its sha256.

        Raises:
            StatesInvalid: one is missing, or its bytes differ from those written.
        """
        for shard in (*self.record.shards, *([self.record.index] if self.record.index else [])):
            try:
                whole = file_digest(self.folder / shard.file) == shard.sha256
            except OSError as fault:
                raise _missing(self.folder, shard, fault) from fault
            if not whole:
                raise StatesInvalid(
                    f"{shard.file} differs from what kconv states wrote",
                    where=self.folder,
                    fix="Fetch it again, or create the states again.",
                )

    def _header(self, shard: ShardRecord) -> dict[str, TensorInfo]:
        if shard.file not in self._headers:
            self._headers[shard.file] = read_header(_sized(self.folder, shard))
        return self._headers[shard.file]


def open_states(
    folder: Path, *, config: TargetConfig | None = None, captured: Sequence[int] | None = None
) -> StoredStates:
    """Open a folder of states, and refuse states of another target.

    Args:
        folder: what `kconv states` wrote.
        config: of the target that the states must come from; not checked if None.
        captured: the layers to read, as outputs; all stored ones if None.

    Raises:
        StatesInvalid: there is no such folder, it comes from another target, or lacks one of the layers.
    """
    record = read_record(folder)
    _check_shards(folder, record)
    if config is not None:
        _check_target(folder, record, config)
    wanted = record.captured if captured is None else tuple(captured)
    absent = sorted(set(wanted) - set(record.captured))
    if absent:
        raise StatesInvalid(
            f"the states hold layers {list(record.captured)}, but layers {absent} are needed (as outputs)",
            where=folder,
            fix=f"Run kconv states with --captured {','.join(map(str, wanted))}.",
        )
    return StoredStates(folder, record, tuple(record.captured.index(layer) for layer in wanted))


def _check_shards(folder: Path, record: StatesRecord) -> None:
    """Refuse a record whose shards do not cover all of its sequences in order, or leave the folder."""
    ends = [0, *(shard.first + shard.count for shard in record.shards)]
    follows = [shard.first for shard in record.shards] == ends[:-1] and ends[-1] == len(record.sequences)
    named = [shard.file for shard in record.shards] + ([record.index.file] if record.index else [])
    if not follows or any(Path(file).name != file for file in named):
        raise StatesInvalid(
            f"{RECORD} lists shards that do not match its {len(record.sequences)} sequences",
            where=folder,
            fix="Create the states again.",
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
                f"the states come from another target, {record.target.source}: {what} is {theirs} there and {own} here",
                where=folder,
                fix="Pass the target that the states come from, or create states for this one.",
            )


def _sized(folder: Path, shard: ShardRecord | IndexRecord) -> Path:
    """Return a file's path, and refuse one that is missing or has another size."""
    file = folder / shard.file
    try:
        size = file.stat().st_size
    except OSError as fault:
        raise _missing(folder, shard, fault) from fault
    if size != shard.size:
        raise StatesInvalid(
            f"{shard.file} has {size:,} bytes, but {shard.size:,} were written",
            where=folder,
            fix="Fetch it again, or create the states again.",
        )
    return file


def _rows_of(info: TensorInfo, begin: int, end: int) -> TensorInfo:
    """Return a matrix's rows from `begin` up to `end` as a separate tensor."""
    row = info.size // info.shape[0]
    return info._replace(shape=(end - begin, *info.shape[1:]), begin=info.begin + begin * row, size=(end - begin) * row)


def _missing(folder: Path, shard: ShardRecord | IndexRecord, fault: OSError) -> StatesInvalid:
    return StatesInvalid(
        f"{shard.file} cannot be read: {fault.strerror}",
        where=folder,
        fix="Fetch it again, or create the states again.",
    )
