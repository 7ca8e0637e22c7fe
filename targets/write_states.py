"""Hidden states written to disk, shard by shard.

Memory holds as many sequences' states as the target runs at once: one here, or a server's parallel requests. Finished
shards wait in a hidden folder next to the output, each with its sha256. A killed run resumes after them, and the
folder gets its name once all are there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch

from ..checkpoint.bytes import Entry, digest, file_digest, write_safetensors
from ..checkpoint.folder import Checkpoint, open_checkpoint
from ..checkpoint.schema import MAX_JSON, load_json, parse_json, read_bounded
from ..checkpoint.source import Source
from ..checkpoint.staging import PARTIAL, PROGRESS, alone, finish, refuse_existing
from ..checkpoint.tensors import TORCH, entry
from ..checkpoint.values import Values
from ..errors import OutputFailed, PromptsInvalid, StatesInvalid, TargetInvalid, TrainingDataInvalid
from .config import TargetConfig, check_captured, read_target_config
from .dialogues import encode_row, read_rows
from .forward import LocalRunner
from .model import check_memory, find_ends, load_target
from .options import SPLIT, StatesOptions
from .prompts import Prompt, each_prompt
from .rows import SEQ, table_entries
from .states import (
    CONTENTS,
    DTYPE_BYTES,
    INDEX,
    RECORD,
    ContentsRecord,
    FileRecord,
    Kind,
    PromptsRecord,
    SequenceRecord,
    ShardRecord,
    StatesRecord,
    StoredStates,
    TargetRecord,
    config_sha256,
    count_kinds,
    cut_shards,
    describe_shards,
    sample_target,
    shard_name,
)
from .tokenizer import Tokenizer, load_tokenizer

INT32 = "i"  # of an array


@dataclass(frozen=True, slots=True)
class Planned:
    """A sequence: its record, its tokens as far as known, and a dialogue's mask of answers.

    Tokens and mask are an array, and bytes of 0 and 1: small tensors would take half a kilobyte each.
    """

    record: SequenceRecord
    ids: array[int]
    answers: bytes = b""

    @property
    def tokens(self) -> torch.Tensor:
        """The tokens as far as known, [L] int32."""
        return torch.frombuffer(self.ids, dtype=torch.int32)

    @property
    def mask(self) -> torch.Tensor | None:
        """A dialogue's mask of answers, [L]; None for anything else."""
        return torch.frombuffer(bytearray(self.answers), dtype=torch.bool) if self.answers else None


@dataclass(frozen=True)
class PlannedStates:
    """The record without its files, and the sequences."""

    record: StatesRecord
    sequences: list[Planned]
    shards: list[range]

    @cached_property
    def records(self) -> tuple[SequenceRecord, ...]:
        return tuple(row.record for row in self.sequences)


def plan_states(
    runner: Runner,
    checkpoint: Checkpoint,
    config: TargetConfig,
    tokenizer: Tokenizer,
    options: StatesOptions,
    shard_bytes: int,
) -> PlannedStates:
    """Plan every sequence and shard before running anything; the arguments are those of `write_states`.

    Raises:
        PromptsInvalid: no prompt is left, or one is too long for the target.
        TrainingDataInvalid: the dialogues cannot be read, or have no answer.
        TargetInvalid: a layer cannot be captured.
    """
    captured = check_captured(options.captured or (), config.layers)
    dtype = runner.dtype
    if options.data is None:
        rows, prompts = _of_prompts(options, tokenizer, config.max_positions)
        seed, new_tokens = options.seed, {"sampled": options.sampled, "greedy": options.greedy}
    else:
        rows, prompts = _of_dialogues(options, tokenizer, config.max_positions)
        seed, new_tokens = 0, {}
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
        prompts=prompts,
        tokenizer=tokenizer.identity,
        seed=seed,
        new_tokens=new_tokens,  # pyright: ignore[reportArgumentType]
        sequences=count_kinds(row.record for row in rows),
        tokens=sum(row.record.length for row in rows),
    )
    token_bytes = 8 + (len(captured) + 1) * config.hidden * DTYPE_BYTES[dtype]
    cuts = cut_shards([row.record.length for row in rows], token_bytes, shard_bytes)
    return PlannedStates(record, rows, cuts)


def _of_prompts(options: StatesOptions, tokenizer: Tokenizer, longest: int) -> tuple[list[Planned], PromptsRecord]:
    file, rows = Path(options.prompts or ""), list(_continued(options, tokenizer, longest))
    if not rows:
        raise PromptsInvalid("no prompt gives a sequence of at least two tokens", where=file, fix="Use longer prompts.")
    return rows, PromptsRecord(
        file=file.name,
        sha256=file_digest(file),
        chat=options.chat,
        prompt_tokens=options.prompt_tokens,
        text_tokens=options.text_tokens,
    )


def _of_dialogues(options: StatesOptions, tokenizer: Tokenizer, longest: int) -> tuple[list[Planned], PromptsRecord]:
    rows, content, data = [], hashlib.sha256(), options.data or ""
    for place, (where, row) in enumerate(read_rows(data, options.split or SPLIT, options.revision)):
        samples = list(encode_row(row, tokenizer, where))
        for sample in samples:
            ids, mask = sample.ids[: options.text_tokens].int(), sample.mask[: options.text_tokens]
            # Drafting starts after an answer's first token, so a prompt alone teaches nothing.
            if not mask[1:].any():
                continue
            if len(ids) > longest:
                raise TrainingDataInvalid(
                    f"this dialogue has {len(ids)} tokens, but the target takes {longest}",
                    where=where,
                    fix="Cut dialogues with --text-tokens, or remove this one.",
                )
            content.update(ids.numpy().tobytes() + mask.numpy().tobytes())
            record = SequenceRecord(
                prompt=str(row.get("id", place)),
                category=str(row.get("category") or ""),
                # If a template splits a dialogue into several parts, either all or none of them are held out.
                digest=samples[-1].prompts[-1],
                kind="dialogue",
                prompt_length=max(1, int(mask.int().argmax())),
                length=len(ids),
                answered=sample.prompts,
            )
            rows.append(Planned(record, array(INT32, ids.numpy().tobytes()), mask.numpy().tobytes()))
    if not rows:
        raise TrainingDataInvalid(
            "no dialogue has an answer", where=data, fix="Write the answers with kconv generate first."
        )
    file = Path(data)
    return rows, PromptsRecord(
        file=file.name if file.exists() else data,
        sha256=file_digest(file) if file.exists() else content.hexdigest(),
        chat=True,
        dialogues=True,
        prompt_tokens=None,
        text_tokens=options.text_tokens,
    )


def _continued(options: StatesOptions, tokenizer: Tokenizer, longest: int) -> Iterator[Planned]:
    """Yield each sequence with its known tokens: all of a held-out text, or the prompt of a continuation."""
    # Encode no more of a prompt than is kept.
    most = (
        None
        if options.prompt_tokens is None or options.text_tokens is None
        else max(options.prompt_tokens, options.text_tokens)
    )
    for prompt in each_prompt(Path(options.prompts or "")):
        ids = tokenizer.encode_chat(prompt.turns[:1], most) if options.chat else tokenizer.encode(prompt.turns[0], most)
        about: dict[str, Any] = {"prompt": prompt.id, "category": prompt.category, "digest": prompt.digest}
        text = ids[: options.text_tokens]
        if options.held_out and len(text) > 1:
            _check_length(prompt, len(text), longest)
            record = SequenceRecord(**about, kind="held-out", prompt_length=1, length=len(text))
            yield Planned(record, array(INT32, text))
        start = ids[: options.prompt_tokens]
        kinds: tuple[tuple[Kind, int], ...] = (("sampled", options.sampled), ("greedy", options.greedy))
        for kind, added in kinds:
            if added and start:
                length = len(start) + added
                _check_length(prompt, length, longest)
                record = SequenceRecord(**about, kind=kind, prompt_length=len(start), length=length)
                yield Planned(record, array(INT32, start))


def _check_length(prompt: Prompt, length: int, longest: int) -> None:
    if length > longest:
        raise PromptsInvalid(
            f"prompt {prompt.id} has {length} tokens, but the target accepts {longest}",
            fix="Shorten it with --prompt-tokens and --text-tokens.",
        )


Captured = tuple[torch.Tensor, torch.Tensor]
"""Captured [1, T, A * H] and final [1, T, H] states."""


class Runner(Protocol):
    """A target that runs here or in a server."""

    @property
    def dtype(self) -> str:
        """Safetensors name of the states' dtype."""
        ...

    @property
    def at_once(self) -> int:
        """How many sequences it runs in parallel, each requested from its own thread; 1 for no threads."""
        ...

    def capture(self, tokens: torch.Tensor, captured: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run tokens `[1, T]`; return the captured and the final states."""
        ...

    def extend(self, kind: Kind, prompts: Sequence[Sequence[int]], length: int, seed: int) -> list[list[int]]:
        """Return the new tokens of continuations, "sampled" at temperature 1 or "greedy"."""
        ...


SHARD_BYTES = 512 << 20


def capture_states(
    target: Source,
    options: StatesOptions,
    out: Path,
    captured: Callable[[TargetConfig], tuple[int, ...]],
    *,
    connect: Callable[[TargetConfig, str], Runner] | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> StatesRecord:
    """Write the hidden states of a target that a user names; it runs here or in a server.

    Args:
        target: for a hub id the whole model is downloaded, or only config, tokenizer and output matrix if a server runs
            it.
        captured: returns the layers, from the target's config.
        connect: returns the served target, from its config and the dtype of the states; None to load it here.

    Raises:
        OutputExists, OutputFailed, PromptsInvalid, StatesInvalid, TargetInvalid: see `write_states`.
        TargetTooLarge, SourceFormatUnknown, QuantizedWeightInvalid: see `load_target`.
    """
    refuse_existing(out)
    config = read_target_config(target.fetch_config())
    chosen = options.dtype or config.dtype or "BF16"
    if connect:
        # For a target that is served elsewhere, only the files that identify it are needed here.
        folder = target.fetch_tokenizer()
        checkpoint = Checkpoint(folder, config.raw, dict(find_ends(target).tensors), target.name)
    else:
        # Checked before the download.
        check_memory(target.open_headers(), TORCH[chosen])
        folder = target.fetch_model()
        checkpoint = open_checkpoint(folder, source=target.name)
    tokenizer = load_tokenizer(folder, trust_remote_code=options.trust_remote_code)
    if connect:
        runner = connect(config, chosen)
    else:
        log("loading the target")
        runner = LocalRunner(load_target(folder, TORCH[chosen]))
    return write_states(
        runner,
        checkpoint,
        config,
        tokenizer,
        options.model_copy(update={"captured": captured(config)}),
        out,
        shard_bytes=options.shard_mib << 20,
        seq=options.seq,
        advance=lambda progress: log(progress.describe()),
    )


@dataclass(frozen=True)
class Progress:
    """The progress of a run: sequences and tokens, finished and in total.

    Attributes:
        captured: tokens that this run captured itself.
        seconds: time that this took.
    """

    sequences: int
    all_sequences: int
    tokens: int
    all_tokens: int
    captured: int
    seconds: float

    def describe(self) -> str:
        """Return the progress as a line: sequences, tokens per second, and the remaining time."""
        line = f"{self.sequences:,} of {self.all_sequences:,} sequences"
        if not self.captured or not self.seconds:
            return line
        rate = self.captured / self.seconds
        left = timedelta(seconds=round((self.all_tokens - self.tokens) / rate))
        return f"{line}, {rate:,.0f} tokens/s, about {left} left"


def write_states(
    runner: Runner,
    checkpoint: Checkpoint,
    config: TargetConfig,
    tokenizer: Tokenizer,
    options: StatesOptions,
    out: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    seq: int = SEQ,
    advance: Callable[[Progress], None] = lambda _: None,
) -> StatesRecord:
    """Write a target's states over prompts and continuations, or over dialogues; resume a killed run.

    Args:
        runner: the running target; its dtype is that of the states.
        shard_bytes: limit on a file's size.
        seq: tokens of a training row, for the tables of rows in the index.
        advance: called with the progress after each shard.

    Raises:
        OutputExists, OutputFailed: the folder exists, or cannot be written.
        PromptsInvalid: no prompt is left, or one is too long for the target.
        TrainingDataInvalid: the dialogues cannot be read, or have no answer.
        StatesInvalid: a run with other settings was interrupted here, or another one is active.
        TargetInvalid: a layer cannot be captured, or a state is NaN or Inf.
    """
    refuse_existing(out)
    planned = plan_states(runner, checkpoint, config, tokenizer, options, shard_bytes)
    lengths = [row.record.length for row in planned.sequences]
    with partial(out, planned) as folder:
        names = [shard_name(number, len(planned.shards)) for number in range(len(planned.shards))]
        shards = {name: read_finished(folder, name) for name in names}
        left = [number for number, name in enumerate(names) if shards[name] is None]
        missing, began = sum(lengths[i] for number in left for i in planned.shards[number]), time.monotonic()
        before = sum(lengths) - missing
        with Captures(runner, planned, left) as captures:
            captured = 0
            for number in left:
                cut, name = planned.shards[number], names[number]
                shards[name] = _write_shard(captures, planned, folder, name, number)
                captures.forget(number)
                captured += sum(lengths[i] for i in cut)
                done, seconds = before + captured, time.monotonic() - began
                advance(Progress(cut.stop, len(lengths), done, sum(lengths), captured, seconds))
        contents = ContentsRecord(
            sequences=planned.records,
            shards=tuple(shard for shard in shards.values() if shard is not None),
        )
        # Not in the plan: where a server runs the target, its layers may be there at one start and not at the next.
        sample = sample_target(checkpoint.folder, config.layers)
        told = planned.record.target.model_copy(update=asdict(sample) if sample else {})
        record = planned.record.model_copy(update={"target": told} | describe_shards(contents))
        record = record.model_copy(update=_write_index(folder, record, contents, seq))
        text = contents.to_json().encode()
        (folder / CONTENTS).write_bytes(text)
        held = FileRecord(file=CONTENTS, size=len(text), sha256=hashlib.sha256(text).hexdigest())
        record = record.model_copy(update={"contents": held})
        (folder / RECORD).write_text(record.to_json(), encoding="utf-8")
        finish(folder, out)
    shutil.rmtree(out / PROGRESS, ignore_errors=True)
    return record


class Captures:
    """States of planned sequences, requested ahead of need, as many at once as the target runs in parallel.

    `left` has the numbers of the shards whose sequences to request, in this order.
    """

    def __init__(self, runner: Runner, planned: PlannedStates, left: Sequence[int]) -> None:
        self._runner, self._planned = runner, planned
        self._pool = ThreadPoolExecutor(runner.at_once)
        self._tokens: dict[int, list[torch.Tensor]] = {}
        self._asked: deque[tuple[int, Future[Captured]]] = deque()
        self._next = (pair for number in left for pair in zip(planned.shards[number], self.tokens(number), strict=True))

    def __enter__(self) -> Captures:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def tokens(self, number: int) -> list[torch.Tensor]:
        """Return the whole tokens of a shard's sequences; sampling depends only on the shard, wherever a run begins."""
        if number not in self._tokens:
            self._tokens[number] = self._continue(number)
        return self._tokens[number]

    def forget(self, number: int) -> None:
        """Drop the tokens of a written shard."""
        del self._tokens[number]

    def take(self, index: int) -> Captured:
        """Return the next sequence's states; each is returned once, in the order of the shards."""
        if self._runner.at_once == 1:
            place, tokens = next(self._next)
            states = self._capture(tokens)
        else:
            for place, tokens in islice(self._next, self._runner.at_once - len(self._asked)):
                self._asked.append((place, self._pool.submit(self._capture, tokens)))
            place, future = self._asked.popleft()
            states = future.result()
        if place != index:
            raise RuntimeError(f"sequence {place} is next, but {index} was requested")
        return states

    def _capture(self, tokens: torch.Tensor) -> Captured:
        return self._runner.capture(tokens.long().unsqueeze(0), self._planned.record.captured)

    def _continue(self, number: int) -> list[torch.Tensor]:
        planned = self._planned
        rows = [planned.sequences[i] for i in planned.shards[number]]
        tokens = [row.tokens for row in rows]
        kinds: tuple[Kind, ...] = ("sampled", "greedy")
        for kind in kinds:
            own = [at for at, row in enumerate(rows) if row.record.kind == kind]
            if own:
                starts, added = [tokens[at].tolist() for at in own], planned.record.new_tokens[kind]
                found = self._runner.extend(kind, starts, added, planned.record.seed + number)
                for at, start, new in zip(own, starts, found, strict=True):
                    tokens[at] = torch.tensor(start + new, dtype=torch.int32)
        return tokens


def _write_index(folder: Path, record: StatesRecord, contents: ContentsRecord, seq: int) -> dict[str, Any]:
    """Write tokens and masks of all sequences, in order, and the tables of training rows; return their records."""
    (folder / INDEX).unlink(missing_ok=True)
    stored = StoredStates(folder, record, (), contents)
    tokens = torch.empty(record.tokens, dtype=torch.int32)
    masks = torch.empty(record.tokens, dtype=torch.bool)
    at = 0
    for i, sequence in enumerate(contents.sequences):
        own, mask = slice(at, at + sequence.length), stored.read_mask(i)
        tokens[own] = stored.read_tokens(i)
        masks[own] = torch.arange(sequence.length) >= sequence.prompt_length if mask is None else mask
        at += sequence.length
    entries, rows = table_entries(stored, tokens, masks, seq)
    entries += [entry("input_ids", tokens), entry("loss_mask", masks)]
    written = write_safetensors(folder / INDEX, entries)
    return {"index": FileRecord(file=INDEX, size=written.size, sha256=written.sha256), "rows": rows}


def _write_shard(captures: Captures, planned: PlannedStates, folder: Path, name: str, number: int) -> ShardRecord:
    """Write one shard under a temporary name, rename it once it is on disk, and note its sha256."""
    running = folder / PROGRESS / name
    running.unlink(missing_ok=True)
    cut = planned.shards[number]
    rows = zip(cut, captures.tokens(number), strict=True)
    entries = [entry for i, tokens in rows for entry in _entries(captures, planned, i, tokens.long())]
    written = write_safetensors(running, entries, check=_check_finite)
    with running.open("rb") as file:
        os.fsync(file.fileno())
    running.rename(folder / name)
    done = ShardRecord(file=name, size=written.size, sha256=written.sha256, first=cut.start, count=len(cut))
    note = folder / PROGRESS / f"{name}.json"
    note.with_suffix(".new").write_text(done.model_dump_json(), encoding="utf-8")
    note.with_suffix(".new").rename(note)
    return done


def _entries(captures: Captures, planned: PlannedStates, index: int, tokens: torch.Tensor) -> Iterator[Entry]:
    """Yield a sequence's tensors; the first one waits for its states."""
    record, sequence = planned.record, planned.sequences[index]
    length, hidden, states = len(tokens), record.target.hidden, {}

    def give(which: str) -> Iterator[memoryview]:
        if not states:
            # A file's tensors are written by dtype and name, so the two states of a sequence are adjacent.
            states["aux_hidden_states"], states["hidden_states"] = captures.take(index)
        yield states.pop(which)[0].contiguous().view(torch.uint8).numpy().reshape(-1).data

    mask = torch.arange(length) >= sequence.record.prompt_length if sequence.mask is None else sequence.mask
    parts = {
        "input_ids": ("I64", (length,), lambda: [tokens.numpy().view("u1").reshape(-1).data]),
        "aux_hidden_states": (
            record.dtype,
            (length, len(record.captured) * hidden),
            lambda: give("aux_hidden_states"),
        ),
        "hidden_states": (record.dtype, (length, hidden), lambda: give("hidden_states")),
    }
    if sequence.record.kind != "held-out":
        parts["loss_mask"] = ("BOOL", (length,), lambda: [mask.numpy().view("u1").data])
    for part, (dtype, shape, chunks) in parts.items():
        yield Entry(f"{index:06d}.{part}", dtype, shape, chunks)


def _check_finite(name: str, values: Values) -> None:
    if values.not_finite:
        raise TargetInvalid(
            f"{values.not_finite} of the target's states are NaN or Inf",
            where=name,
            fix="Run the target in another dtype (--dtype), and check its weights.",
        )


PLAN = "plan.json"


def read_finished(folder: Path, name: str) -> ShardRecord | None:
    """Return an earlier run's note on a shard, if the file is still the one it wrote."""
    try:
        note = folder / PROGRESS / f"{name}.json"
        done = load_json(ShardRecord, note, StatesInvalid, what="shard record", fix="Delete it.")
        return done if file_digest(folder / name) == done.sha256 else None
    except (OSError, StatesInvalid):
        return None


@contextmanager
def partial(out: Path, plan: PlannedStates) -> Iterator[Path]:
    """Yield the hidden folder in which a run of this plan writes, locked against other runs.

    It survives errors, since its finished parts count; the lock ends with the process.
    """
    folder = out.parent / f"{PARTIAL}{out.name[:40]}-states"
    try:
        (folder / PROGRESS).mkdir(parents=True, exist_ok=True)
        busy = StatesInvalid(f"another run is writing {out}", where=folder, fix="Wait for it, or choose another name.")
        with alone(folder, busy):
            _hold_plan(folder, plan)
            yield folder
    except OSError as fault:
        raise OutputFailed(
            f"{out} could not be written: {fault.strerror or fault}",
            where=fault.filename or folder,
            fix="Free some space, or check that the folder is writable; then run the command again to resume.",
        ) from fault


class _PlanRecord(StatesRecord):
    """A record without its files, and the sequences to come."""

    planned: tuple[SequenceRecord, ...]


def _hold_plan(folder: Path, plan: PlannedStates) -> None:
    file = folder / PROGRESS / PLAN
    text = _PlanRecord.model_construct(**dict(plan.record), planned=plan.records).to_json().encode()
    if not file.exists():
        file.write_bytes(text)
        return
    # The parsed form takes many times the memory.
    if file.is_file() and file.stat().st_size == len(text) and file.read_bytes() == text:
        return
    before, now = _load_plan(file), json.loads(text)
    other = [key for key in now if before.get(key) != now[key]]
    if other:
        raise StatesInvalid(
            f"an interrupted run here differs in {', '.join(other)}",
            where=folder,
            fix="Run that command again to finish it, choose another name, or delete this folder.",
        )


def _load_plan(file: Path) -> dict[str, object]:
    try:
        held = parse_json(read_bounded(file, StatesInvalid, limit=MAX_JSON, fix="Delete this folder."))
        return held if isinstance(held, dict) else {}
    except ValueError:  # the run was killed while writing it; no shard can exist yet
        return {}
