"""Which states are written, known before the target runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.bytes import digest
from ..checkpoint.folder import Checkpoint
from ..checkpoint.header import byte_size
from ..errors import PromptsInvalid
from .config import TargetConfig
from .prompts import Prompt, read_prompts
from .states import check_captured
from .states_record import (
    Kind,
    PromptsRecord,
    SequenceRecord,
    StatesRecord,
    TargetRecord,
    config_sha256,
    cut_shards,
)
from .states_runner import Runner
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class Wanted:
    """What states are wanted.

    Attributes:
        prompts: a JSONL of prompts.
        captured: layers, as outputs of 0-based decoder layers.
        prompt_tokens: prompts are cut to this before they are continued; None for whole.
        text_tokens: the prompts' own text is cut to this; None for whole.
        sampled, greedy: tokens to continue each prompt by, at temperature 1 and at 0; 0 for no such sequences.
        held_out: whether the prompts' own text is run as well.
        chat: put prompts through the chat template.
        seed: of the sampled continuations.
    """

    prompts: Path
    captured: tuple[int, ...]
    prompt_tokens: int | None = None
    text_tokens: int | None = None
    sampled: int = 0
    greedy: int = 0
    held_out: bool = True
    chat: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Planned:
    """The record without its shards, and each sequence's tokens as far as they are known."""

    record: StatesRecord
    starts: list[list[int]]
    shards: list[range]


def plan_states(
    runner: Runner,
    checkpoint: Checkpoint,
    config: TargetConfig,
    tokenizer: Tokenizer,
    wanted: Wanted,
    shard_bytes: int,
) -> Planned:
    """Plan every sequence and shard, before anything is run.

    Args as of `write_states.write_states`.

    Raises:
        PromptsInvalid: no prompt is left, or one is too long for the target.
        TargetInvalid: a layer cannot be captured.
    """
    captured = check_captured(wanted.captured, config.layers)
    dtype = runner.dtype
    rows = list(_sequences(read_prompts(wanted.prompts), tokenizer, wanted, config.max_positions))
    if not rows:
        raise PromptsInvalid(
            "no prompt gives a sequence of at least two tokens", where=wanted.prompts, fix="Give longer prompts."
        )
    record = StatesRecord(
        target=TargetRecord(
            source=checkpoint.source,
            config_sha256=config_sha256(config.raw),
            model_type=config.model_type,
            layers=config.layers,
            hidden=config.hidden,
            vocab=config.vocab,
            lm_head_blake3=digest(checkpoint.tensors[config.lm_head]),
        ),
        captured=tuple(captured),
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        prompts=PromptsRecord(
            file=wanted.prompts.name,
            sha256=hashlib.sha256(wanted.prompts.read_bytes()).hexdigest(),
            chat=wanted.chat,
            prompt_tokens=wanted.prompt_tokens,
            text_tokens=wanted.text_tokens,
        ),
        tokenizer=tokenizer.identity,
        seed=wanted.seed,
        new_tokens={"sampled": wanted.sampled, "greedy": wanted.greedy},
        sequences=tuple(sequence for sequence, _ in rows),
    )
    token_bytes = 8 + (len(captured) + 1) * config.hidden * byte_size(dtype, (1,))
    cuts = cut_shards([s.length for s in record.sequences], token_bytes, shard_bytes)
    return Planned(record, [start for _, start in rows], cuts)


def _sequences(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, wanted: Wanted, longest: int
) -> Iterator[tuple[SequenceRecord, list[int]]]:
    """Yield each sequence with its known tokens: all of held-out text, and the prompt of a continuation."""
    for prompt in prompts:
        ids = tokenizer.encode_chat(prompt.turns[:1]) if wanted.chat else tokenizer.encode(prompt.turns[0])
        about = {"prompt": prompt.id, "category": prompt.category, "digest": prompt.digest}
        text = ids[: wanted.text_tokens]
        if wanted.held_out and len(text) > 1:
            _check_length(prompt, len(text), longest)
            yield SequenceRecord(**about, kind="held-out", prompt_length=1, length=len(text)), text
        start = ids[: wanted.prompt_tokens]
        kinds: tuple[tuple[Kind, int], ...] = (("sampled", wanted.sampled), ("greedy", wanted.greedy))
        for kind, added in kinds:
            if added and start:
                length = len(start) + added
                _check_length(prompt, length, longest)
                yield SequenceRecord(**about, kind=kind, prompt_length=len(start), length=length), start


def _check_length(prompt: Prompt, length: int, longest: int) -> None:
    if length > longest:
        raise PromptsInvalid(
            f"prompt {prompt.id} makes {length} tokens, and the target takes {longest}",
            fix="Shorten it with --prompt-tokens and --text-tokens.",
        )
