"""Hidden states on disk: `states.json`, and sequences read back one at a time.

`states.json` has the same size however many states there are; `sequences.json` describes each sequence and file; the
index has tokens, masks and the table of training rows (`targets.rows`), of which a process reads only its own part.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as record_dataclass

from ..checkpoint.bytes import WeightsSample, file_digest, sample_weights
from ..checkpoint.folder import open_checkpoint
from ..checkpoint.header import TensorInfo, read_header
from ..checkpoint.schema import load_json
from ..checkpoint.source import Source
from ..errors import CorruptHeader, CorruptIndex, NotACheckpoint, StatesInvalid
from ..installed import version
from ..strict import StrictModel
from .config import TargetConfig
from .mtp import is_run

# Imported where needed: refusing states of another target takes less time than the import.
if TYPE_CHECKING:
    import torch

RECORD, CONTENTS, INDEX = "states.json", "sequences.json", "index.safetensors"
AGAIN = "Fetch it again, or create the states again."
Kind = Literal["held-out", "sampled", "greedy", "dialogue"]
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


class TargetRecord(StrictModel):
    """The target that the states come from.

    Attributes:
        source: as the user named it.
        config_sha256: of its config.json, as canonical JSON.
        model_type, layers, hidden, vocab: its dims.
        lm_head_blake3: of its output matrix's bytes, which distinguishes one fine-tune from another.
        form, weights: see `WeightsSample`, of the tensors that a text forward needs; None where not all layers were on
            this machine, as of a target in a server.
    """

    source: str
    config_sha256: str
    model_type: str
    layers: int
    hidden: int
    vocab: int
    lm_head_blake3: str
    form: str | None = None
    weights: str | None = None

    def check_weights(self, target: Source, lm_head: str, where: str | Path) -> None:
        """Refuse another target with the same config: one of another output matrix, or of other layers.

        Layers are compared where the whole of both targets was on this machine, in the same form.

        Args:
            target: the one that the states must come from.
            lm_head: blake3 of its output matrix's bytes.
            where: the states, for the message.

        Raises:
            StatesInvalid: it is another target.
        """
        differs = "lm_head differs"
        if lm_head == self.lm_head_blake3:
            sample = sample_target(target.fetch_config(), self.layers)
            if sample is None or sample.form != self.form or sample.weights == self.weights:
                return
            differs = "layers differ"
        raise StatesInvalid(
            f"the states come from {self.source}, whose {differs} from {target.name}'s",
            where=where,
            fix="Pass the target that the states come from, or create states for this one.",
        )


def sample_target(folder: Path, layers: int) -> WeightsSample | None:
    """Return what tells the weights that states come from; None for a folder whose layers are not all there.

    Whoever needs only the ends may have only these: another shard may be missing, cut short, or a Git LFS pointer.
    """
    try:
        tensors = open_checkpoint(folder).tensors.values()
        return sample_weights(one for one in tensors if is_run(one.name, layers))
    except (NotACheckpoint, CorruptIndex, CorruptHeader):
        return None


class PromptsRecord(StrictModel):
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


class FileRecord(StrictModel):
    """A file of the folder.

    Attributes:
        file, size, sha256: the file.
    """

    file: str
    size: int
    sha256: str


class ShardRecord(FileRecord):
    """A file of states; it has the sequences `sequences[first : first + count]`."""

    first: int
    count: int


class RowsRecord(StrictModel):
    """The tables of training rows in the index; see `targets.rows`.

    Attributes:
        seq: tokens per row.
        packed, single: training rows with several sequences each, or with one.
        held_out: evaluation rows.
        counted: training tokens that count in the loss.
        counts_sha256: of the table of these by token id.
        prompts_sha256: of the training prompts' digests.
    """

    seq: int
    packed: int
    single: int
    held_out: int
    counted: int
    counts_sha256: str
    prompts_sha256: str


class ContentsRecord(StrictModel):
    """What the folder holds, in order; the schema of sequences.json."""

    sequences: tuple[SequenceRecord, ...]
    shards: tuple[ShardRecord, ...] = ()

    @property
    def sha256(self) -> str:
        """A sha256 over the shards' digests: it identifies the states."""
        return hashlib.sha256("".join(shard.sha256 for shard in self.shards).encode()).hexdigest()

    def to_json(self) -> str:
        return self.model_dump_json(indent=1) + "\n"


class StatesRecord(StrictModel):
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
        sequences: how many there are, by kind.
        tokens: how many they have in all.
        shards, size: how many files of states there are, and their bytes; 0 in the plan of a run that can be resumed.
        sha256: over the shards' sha256, in order.
        contents: the file that describes each sequence and shard.
        index: the file with tokens, masks and tables of training rows.
        rows: these tables; None in the plan of a run that can be resumed.
    """

    schema_version: Literal[2] = Field(default=2, alias="schema")
    kconv: str = Field(default_factory=lambda: version("kconv"))
    target: TargetRecord
    captured: tuple[int, ...]
    dtype: Literal["F32", "BF16", "F16"]
    prompts: PromptsRecord
    tokenizer: dict[str, str]
    seed: int
    new_tokens: dict[Kind, int]
    sequences: dict[Kind, int]
    tokens: int
    shards: int = 0
    size: int = 0
    sha256: str = ""
    contents: FileRecord | None = None
    index: FileRecord | None = None
    rows: RowsRecord | None = None

    @property
    def count(self) -> int:
        return sum(self.sequences.values())

    def to_json(self) -> str:
        return self.model_dump_json(indent=1, by_alias=True) + "\n"


def count_kinds(sequences: Iterable[SequenceRecord]) -> dict[Kind, int]:
    return dict(Counter(sequence.kind for sequence in sequences))


def describe_shards(contents: ContentsRecord) -> dict[str, Any]:
    """Return what `StatesRecord` holds of the shards."""
    size = sum(shard.size for shard in contents.shards)
    return {"shards": len(contents.shards), "size": size, "sha256": contents.sha256}


def read_record(folder: Path) -> StatesRecord:
    """Read a folder's states.json.

    Raises:
        StatesInvalid: it is missing or does not match the schema.
    """
    if folder.is_file():
        own = folder.absolute().parent
        fix = (
            f"Give {own}."
            if (own / RECORD).exists()
            else f"Prompts are for --prompts. Of these, kconv states TARGET OUT --prompts {folder.name} --captured IDS "
            "makes a folder of states, for a head that captures these layers."
        )
        raise StatesInvalid(f"{folder} is a file, not a folder of states", where=folder, fix=fix)
    missing = StatesInvalid(f"{folder} holds no {RECORD}", where=folder, fix="Create it with kconv states.")
    fix = "Create the states again with this kconv."
    return load_json(
        StatesRecord, folder / RECORD, StatesInvalid, what="record of kconv states", fix=fix, missing=missing
    )


def config_sha256(config: dict[str, Any]) -> str:
    """Return the sha256 of a config.json's values, independent of formatting."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def cut_shards(lengths: Sequence[int], token_bytes: int, shard_bytes: int) -> list[range]:
    """Split sequences into runs of at most `shard_bytes`; a longer one gets a run of its own.

    The lengths are in tokens, each with states of `token_bytes`.
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
    """States on disk, read one sequence at a time.

    Each read raises StatesInvalid if a file is missing or damaged.
    """

    @property
    def folder(self) -> Path: ...

    @property
    def sequences(self) -> Sequence[SequenceRecord]: ...

    def read_tokens(self, index: int) -> torch.Tensor:
        """Read the token ids of one sequence, [T]."""
        ...

    def read_mask(self, index: int) -> torch.Tensor | None:
        """Read which tokens of a sequence belong to an answer, [T] bool; None if unknown."""
        ...

    def read_span(self, index: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read only the captured and final states of a sequence's tokens from `begin` up to `end`."""
        ...

    def read(self, index: int) -> StoredSequence: ...


@dataclass(frozen=True)
class StoredStates:
    """A folder that `kconv states` wrote.

    Attributes:
        columns: which of the stored captured layers to read; positions in the record's order.
        given: what the folder holds, if that was read with the record.
    """

    folder: Path
    record: StatesRecord
    columns: tuple[int, ...]
    given: ContentsRecord | None = field(default=None, repr=False, compare=False)
    _headers: dict[str, dict[str, TensorInfo]] = field(default_factory=dict, repr=False, compare=False)
    _index: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)
    _starts: list[int] = field(default_factory=list, repr=False, compare=False)

    @property
    def sequences(self) -> Sequence[SequenceRecord]:
        return self.contents.sequences

    @property
    def shards(self) -> Sequence[ShardRecord]:
        return self.contents.shards

    def choose(self, captured: Sequence[int]) -> StoredStates:
        """Return the same states, of which these captured layers are read, as outputs; refuse one not stored."""
        absent = sorted(set(captured) - set(self.record.captured))
        if absent:
            raise StatesInvalid(
                f"the states hold layers {list(self.record.captured)}, but layers {absent} are needed (as outputs)",
                where=self.folder,
                fix=f"Run kconv states with --captured {','.join(map(str, captured))}, into a new folder.",
            )
        return replace(self, columns=tuple(self.record.captured.index(layer) for layer in captured))

    @property
    def digests(self) -> frozenset[str]:
        """The prompts' digests."""
        return frozenset(digest for s in self.sequences for digest in (s.digest, *s.answered))

    @cached_property
    def contents(self) -> ContentsRecord:
        """What the folder holds, if it is what the record says; read when it is first asked for."""
        contents = self.given or _read_contents(self.folder, self.record)
        _check_shards(self.folder, self.record, contents)
        return contents

    @cached_property
    def index(self) -> dict[str, TensorInfo]:
        """Where the index's tensors are, by name."""
        if self.record.index is None:
            raise _unlike(self.folder, INDEX)
        header, tokens = read_header(_sized(self.folder, self.record.index)), self.record.tokens
        if any(name not in header or header[name].shape != (tokens,) for name in ("input_ids", "loss_mask")):
            raise StatesInvalid(
                f"{self.record.index.file} does not hold the {tokens:,} tokens that {RECORD} records",
                where=self.folder,
                fix=AGAIN,
            )
        return header

    def read_tokens(self, index: int) -> torch.Tensor:
        return self._indexed(index, "input_ids").long()

    def read_mask(self, index: int) -> torch.Tensor | None:
        return self._indexed(index, "loss_mask") if self.sequences[index].kind != "held-out" else None

    def read_span(self, index: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        from ..checkpoint.tensors import read_tensor

        width, layers = self.record.target.hidden, len(self.record.captured)
        captured, hidden = (
            read_tensor(_rows_of(self._info(index, name, columns), begin, end))
            for name, columns in (("aux_hidden_states", layers * width), ("hidden_states", width))
        )
        return self.select(captured), refuse_zeros(hidden, self.folder)

    def select(self, captured: torch.Tensor) -> torch.Tensor:
        """Return the wanted ones of the stored captured layers' states, [T, A * H].

        Raises:
            StatesInvalid: a token's states are all zero.
        """
        refuse_zeros(captured, self.folder)
        layers = len(self.record.captured)
        if self.columns == tuple(range(layers)):
            return captured
        return captured.unflatten(1, (layers, -1))[:, list(self.columns)].flatten(1)

    def read(self, index: int) -> StoredSequence:
        captured, hidden = self.read_span(index, 0, self.sequences[index].length)
        return StoredSequence(self.read_tokens(index), captured, hidden, self.read_mask(index))

    def _indexed(self, index: int, name: str) -> torch.Tensor:
        """Return the tokens or the mask of a sequence, from the index if there is one."""
        from ..checkpoint.tensors import read_tensor

        if self.record.index is None:
            return read_tensor(self._info(index, name))
        if not self._index:
            self._index.update({name: read_tensor(self.index[name]) for name in ("input_ids", "loss_mask")})
            self._starts.extend(accumulate((s.length for s in self.sequences), initial=0))
        return self._index[name][self._starts[index] : self._starts[index + 1]]

    def place(self, index: int, name: str) -> tuple[int, TensorInfo]:
        """Return the number of the shard with a sequence, and where its captured or final states are."""
        width = self.record.target.hidden * (len(self.record.captured) if name == "aux_hidden_states" else 1)
        return self._shard_of(index), self._info(index, name, width)

    def _shard_of(self, index: int) -> int:
        return bisect_right(self.shards, index, key=lambda shard: shard.first) - 1

    def _info(self, index: int, name: str, *width: int) -> TensorInfo:
        """Find one tensor of a sequence, [T, *width]."""
        shard = self.shards[self._shard_of(index)]
        info = self._header(shard).get(f"{index:06d}.{name}")
        if info is None or info.shape != (self.sequences[index].length, *width):
            raise StatesInvalid(
                f"{shard.file} does not hold sequence {index} as {self._listed_in} describes it",
                where=self.folder,
                fix="Create the states again.",
            )
        return info

    @property
    def _listed_in(self) -> str:
        return CONTENTS if self.given is None else RECORD

    def files_of(self, sequences: Iterable[int]) -> list[str]:
        """Return the names of the files with these sequences, in order."""
        return [self.shards[place].file for place in sorted({self._shard_of(index) for index in sequences})]

    def check_files(self, names: Sequence[str]) -> None:
        """Refuse a folder that lacks one of these files; their sizes are checked when they are read."""
        absent = [name for name in names if not (self.folder / name).exists()]
        if absent:
            raise StatesInvalid(
                f"{len(absent)} of the {len(names)} files that this process reads are missing, first {absent[0]}",
                where=self.folder,
                fix="Fetch them. With several nodes, kconv train --dry-run --json lists the files of each.",
            )

    def check_target(self, target: Source, lm_head: str) -> None:
        """Refuse states of another target with the same config; see `TargetRecord.check_weights`."""
        self.record.target.check_weights(target, lm_head, self.folder)

    def verify(self) -> None:
        """Check every shard against its sha256."""
        # The list of shards is checked when it is read.
        for file in [*self.shards, *([self.record.index] if self.record.index else [])]:
            try:
                whole = file_digest(_sized(self.folder, file)) == file.sha256
            except OSError as fault:
                raise _missing(self.folder / file.file, fault) from fault
            if not whole:
                raise _unlike(self.folder, file.file)

    def _header(self, shard: ShardRecord) -> dict[str, TensorInfo]:
        if shard.file not in self._headers:
            self._headers[shard.file] = read_header(_sized(self.folder, shard))
        return self._headers[shard.file]


def open_states(
    folder: Path, *, config: TargetConfig | None = None, captured: Sequence[int] | None = None
) -> StoredStates:
    """Open a folder that `kconv states` wrote, and refuse states of another target.

    Args:
        config: of the target that the states must come from; not checked if None.
        captured: the layers to read, as outputs; all stored ones if None.

    Raises:
        StatesInvalid: there is no such folder, it comes from another target, or lacks one of the layers.
    """
    record = read_record(folder)
    _check_names(folder, record.contents, record.index)
    if config is not None:
        _check_target(folder, record, config)
    stored = StoredStates(folder, record, tuple(range(len(record.captured))))
    return stored if captured is None else stored.choose(captured)


def _read_contents(folder: Path, record: StatesRecord) -> ContentsRecord:
    if record.contents is None:
        raise _unlike(folder, CONTENTS)
    file = _sized(folder, record.contents)
    if file_digest(file) != record.contents.sha256:
        raise _unlike(folder, file.name)
    what, fix = "list of kconv states", "Create the states again with this kconv."
    return load_json(ContentsRecord, file, StatesInvalid, what=what, fix=fix)


def _check_names(folder: Path, *files: FileRecord | None) -> None:
    """Refuse files that are not in the folder itself."""
    away = [one.file for one in files if one is not None and Path(one.file).name != one.file]
    if away:
        raise StatesInvalid(
            f"{RECORD} names {away[0]}, which is not a file of the folder", where=folder, fix="Create the states again."
        )


def _check_shards(folder: Path, record: StatesRecord, contents: ContentsRecord) -> None:
    """Refuse shards that do not cover all of the sequences in order, or leave the folder."""
    ends = [0, *(shard.first + shard.count for shard in contents.shards)]
    follows = [shard.first for shard in contents.shards] == ends[:-1] and ends[-1] == len(contents.sequences)
    if not follows or record.sequences != count_kinds(contents.sequences):
        raise StatesInvalid(
            f"{CONTENTS} lists shards that do not match its {len(contents.sequences)} sequences",
            where=folder,
            fix="Create the states again.",
        )
    _check_names(folder, *contents.shards)


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


def _sized(folder: Path, wanted: FileRecord) -> Path:
    return check_size(folder / wanted.file, wanted.size)


def check_size(file: Path, wanted: int) -> Path:
    """Return a file's path, and refuse one that is missing or has another size."""
    try:
        size = file.stat().st_size
    except OSError as fault:
        raise _missing(file, fault) from fault
    if size != wanted:
        raise StatesInvalid(
            f"{file.name} has {size:,} bytes, but {wanted:,} were written", where=file.parent, fix=AGAIN
        )
    return file


def refuse_zeros(states: torch.Tensor, folder: Path) -> torch.Tensor:
    """Return states, [T, width], and refuse a token whose states are all zero: a hole in a file reads as that."""
    # The first column alone is read of all tokens.
    suspects = states[states[:, 0] == 0]
    if len(suspects) and not bool(suspects.any(dim=1).all()):
        raise StatesInvalid("a token's states are all zero: part of a file was never written", where=folder, fix=AGAIN)
    return states


def _rows_of(info: TensorInfo, begin: int, end: int) -> TensorInfo:
    """Return a matrix's rows from `begin` up to `end` as a separate tensor."""
    row = info.size // info.shape[0]
    return info._replace(shape=(end - begin, *info.shape[1:]), begin=info.begin + begin * row, size=(end - begin) * row)


def _missing(file: Path, fault: OSError) -> StatesInvalid:
    return StatesInvalid(f"{file.name} cannot be read: {fault.strerror}", where=file.parent, fix=AGAIN)


def _unlike(folder: Path, name: str) -> StatesInvalid:
    return StatesInvalid(f"{name} differs from what kconv states wrote", where=folder, fix=AGAIN)
