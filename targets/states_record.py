"""`states.json`, the record beside stored hidden states."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import StatesInvalid

RECORD = "states.json"
Kind = Literal["held-out", "sampled", "greedy"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetRecord(_Record):
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


class PromptsRecord(_Record):
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


class SequenceRecord(_Record):
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


class ShardRecord(_Record):
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


class StatesRecord(_Record):
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
    file = folder / RECORD
    try:
        return StatesRecord.model_validate_json(file.read_bytes())
    except OSError as fault:
        raise StatesInvalid(
            f"{folder} holds no {RECORD}: {fault.strerror}", where=folder, fix="Make it with kconv states."
        ) from fault
    except ValidationError as fault:
        first = fault.errors()[0]
        raise StatesInvalid(
            f"{RECORD} is not of kconv's schema at {'.'.join(map(str, first['loc']))}: {first['msg']}",
            where=file,
            fix="Make the states again with this kconv.",
        ) from fault


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
