"""Hidden states written to disk, shard by shard.

One sequence's states are in memory at a time. Finished shards wait in a hidden folder beside the output, each with
its sha256; a run that was killed goes on behind them, and the folder gets its name when all are there.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from ..checkpoint.bytes import Entry, digest, file_digest, write_safetensors
from ..checkpoint.folder import Checkpoint, open_checkpoint
from ..checkpoint.schema import MAX_JSON, load_json, parse_json, read_bounded
from ..checkpoint.source import Source
from ..checkpoint.staging import PARTIAL, finish, refuse_existing
from ..checkpoint.tensors import TORCH
from ..checkpoint.values import Values
from ..errors import OutputFailed, PromptsInvalid, StatesInvalid, TargetInvalid
from .config import TargetConfig, read_target_config
from .forward import LocalRunner, check_captured
from .model import load_target
from .prompts import Prompt, read_prompts
from .states import (
    DTYPE_BYTES,
    RECORD,
    Kind,
    PromptsRecord,
    SequenceRecord,
    ShardRecord,
    StatesRecord,
    TargetRecord,
    config_sha256,
    cut_shards,
    shard_name,
)
from .tokenizer import Tokenizer, load_tokenizer


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
class PlannedStates:
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
) -> PlannedStates:
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
            sha256=file_digest(wanted.prompts),
            chat=wanted.chat,
            prompt_tokens=wanted.prompt_tokens,
            text_tokens=wanted.text_tokens,
        ),
        tokenizer=tokenizer.identity,
        seed=wanted.seed,
        new_tokens={"sampled": wanted.sampled, "greedy": wanted.greedy},
        sequences=tuple(sequence for sequence, _ in rows),
    )
    token_bytes = 8 + (len(captured) + 1) * config.hidden * DTYPE_BYTES[dtype]
    cuts = cut_shards([s.length for s in record.sequences], token_bytes, shard_bytes)
    return PlannedStates(record, [start for _, start in rows], cuts)


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


class Runner(Protocol):
    """A target that runs, here or behind a server."""

    @property
    def dtype(self) -> str:
        """Safetensors name of the dtype that its states have."""
        ...

    def capture(self, tokens: torch.Tensor, captured: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run tokens `[1, T]`; see `target.states.capture`."""
        ...

    def extend(self, kind: Kind, prompts: Sequence[Sequence[int]], length: int, seed: int) -> list[list[int]]:
        """Return the new tokens of continuations, "sampled" at temperature 1 or "greedy"."""
        ...


SHARD_BYTES = 512 << 20


def capture_states(
    target: Source,
    wanted: Callable[[TargetConfig], Wanted],
    out: Path,
    *,
    connect: Callable[[TargetConfig, str], Runner] | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    trust_remote_code: bool = False,
    log: Callable[[str], None] = lambda _: None,
) -> StatesRecord:
    """Write the hidden states of a target that a user names, run here or by a server.

    Args:
        target: the target; of a hub id the whole model is downloaded, or config, tokenizer and output matrix where a
            server runs it.
        wanted: gives what states are wanted, by the target's config.
        out: the folder to make.
        connect: gives the served target, by its config and the dtype of the states; None to load it here.
        dtype: safetensors name of what is computed and stored in; None for the target's own.
        shard_bytes: bound on a file's size.
        trust_remote_code: run the tokenizer's own Python.
        log: called with what is going on.

    Raises:
        OutputExists, OutputFailed, PromptsInvalid, StatesInvalid, TargetInvalid: see `write_states`.
        TargetTooLarge, SourceFormatUnknown, TensorShape: see `load_target`.
    """
    refuse_existing(out)
    folder = target.fetch_tokenizer() if connect else target.fetch_model()
    config = read_target_config(folder)
    chosen = dtype or config.dtype or "BF16"
    # Of a target that is served elsewhere, only what its identity hangs on need be here.
    checkpoint = (
        Checkpoint(folder, config.raw, target.open_tensors({config.lm_head}), target.name)
        if connect
        else open_checkpoint(folder, source=target.name)
    )
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
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
        wanted(config),
        out,
        shard_bytes=shard_bytes,
        advance=lambda done, total: log(f"{done} of {total} sequences"),
    )


def write_states(
    runner: Runner,
    checkpoint: Checkpoint,
    config: TargetConfig,
    tokenizer: Tokenizer,
    wanted: Wanted,
    out: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> StatesRecord:
    """Write a target's states over prompts and its continuations of them; go on where a killed run stopped.

    Args:
        runner: the target, running; its dtype is that of the states.
        checkpoint, config: the same target's folder and config.
        tokenizer: the target's.
        wanted: what to write.
        out: the folder to make.
        shard_bytes: bound on a file's size.
        advance: told how many sequences are done, of how many.

    Raises:
        OutputExists, OutputFailed: see `checkpoint.staging`.
        PromptsInvalid: no prompt is left, or one is too long for the target.
        StatesInvalid: a run of other settings was interrupted here, or another one is at work.
        TargetInvalid: a layer cannot be captured, or a state is NaN or Inf.
    """
    refuse_existing(out)
    planned = plan_states(runner, checkpoint, config, tokenizer, wanted, shard_bytes)
    sequences = planned.record.sequences
    with partial(out, planned.record) as folder:
        shards = []
        for number, cut in enumerate(planned.shards):
            name = shard_name(number, len(planned.shards))
            done = read_finished(folder, name)
            if done is None:
                tokens = _continue(runner, planned, cut, wanted.seed + number)
                done = _write_shard(runner, planned.record, folder, name, cut, tokens)
            shards.append(done)
            advance(cut.stop, len(sequences))
        record = planned.record.model_copy(update={"shards": tuple(shards)})
        (folder / RECORD).write_text(record.to_json())
        finish(folder, out)
    shutil.rmtree(out / PROGRESS)
    return record


def _continue(runner: Runner, planned: PlannedStates, cut: range, seed: int) -> list[list[int]]:
    """Return the whole tokens of a shard's sequences; the draws hang on the shard alone, wherever a run begins."""
    sequences, tokens = planned.record.sequences, [planned.starts[i] for i in cut]
    kinds: tuple[Kind, ...] = ("sampled", "greedy")
    for kind in kinds:
        own = [at for at, i in enumerate(cut) if sequences[i].kind == kind]
        if own:
            found = runner.extend(kind, [tokens[at] for at in own], planned.record.new_tokens[kind], seed)
            for at, new in zip(own, found, strict=True):
                tokens[at] = tokens[at] + new
    return tokens


def _write_shard(
    runner: Runner,
    record: StatesRecord,
    folder: Path,
    name: str,
    cut: range,
    tokens: list[list[int]],
) -> ShardRecord:
    """Write one shard under a name of its own, give it its name when it is on the disk, and note its sha256."""
    running = folder / PROGRESS / name
    running.unlink(missing_ok=True)
    entries = [
        entry for i, row in zip(cut, tokens, strict=True) for entry in _entries(runner, record, i, torch.tensor([row]))
    ]
    written = write_safetensors(running, entries, check=_check_finite)
    with running.open("rb") as file:
        os.fsync(file.fileno())
    running.rename(folder / name)
    done = ShardRecord(file=name, size=written.size, sha256=written.sha256, first=cut.start, count=len(cut))
    note = folder / PROGRESS / f"{name}.json"
    note.with_suffix(".new").write_text(done.model_dump_json())
    note.with_suffix(".new").rename(note)
    return done


def _entries(runner: Runner, record: StatesRecord, index: int, tokens: torch.Tensor) -> Iterator[Entry]:
    """Yield a sequence's tensors; the target runs when the first of its states is asked for."""
    length, hidden, states = tokens.shape[1], record.target.hidden, {}

    def give(which: str) -> Iterator[memoryview]:
        if not states:
            # A file's tensors are written by dtype and name, so the two states of a sequence follow each other.
            states["aux_hidden_states"], states["hidden_states"] = runner.capture(tokens, record.captured)
        yield states.pop(which)[0].contiguous().view(torch.uint8).numpy().reshape(-1).data

    mask = torch.arange(length) >= record.sequences[index].prompt_length
    parts = {
        "input_ids": ("I64", (length,), lambda: [tokens.numpy().view("u1").reshape(-1).data]),
        "aux_hidden_states": (
            record.dtype,
            (length, len(record.captured) * hidden),
            lambda: give("aux_hidden_states"),
        ),
        "hidden_states": (record.dtype, (length, hidden), lambda: give("hidden_states")),
    }
    if record.sequences[index].kind != "held-out":
        parts["loss_mask"] = ("BOOL", (length,), lambda: [mask.numpy().view("u1").data])
    for part, (dtype, shape, chunks) in parts.items():
        yield Entry(f"{index:06d}.{part}", dtype, shape, chunks)


def _check_finite(name: str, values: Values) -> None:
    if values.not_finite:
        raise TargetInvalid(
            f"{values.not_finite} of the target's states are NaN or Inf",
            where=name,
            fix="Run it in another dtype (--dtype), and check its weights.",
        )


PROGRESS, PLAN, LOCK = "progress", "plan.json", "lock"


def read_finished(folder: Path, name: str) -> ShardRecord | None:
    """Return what an earlier run noted of a shard, if the file is still what it wrote."""
    try:
        note = folder / PROGRESS / f"{name}.json"
        done = load_json(ShardRecord, note, StatesInvalid, what="record of a shard", fix="Delete it.")
        return done if file_digest(folder / name) == done.sha256 else None
    except (OSError, StatesInvalid):
        return None


@contextmanager
def partial(out: Path, plan: StatesRecord) -> Iterator[Path]:
    """Give the hidden folder where a run of this plan writes, and hold it against other runs.

    It outlives a fault, as what is finished in it counts; its lock goes with the process.
    """
    folder = out.parent / f"{PARTIAL}{out.name[:40]}-states"
    try:
        (folder / PROGRESS).mkdir(parents=True, exist_ok=True)
        with (folder / PROGRESS / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as fault:
                raise StatesInvalid(
                    f"another run is writing {out}", where=folder, fix="Wait for it, or choose another name."
                ) from fault
            _hold_plan(folder, plan)
            yield folder
    except OSError as fault:
        raise OutputFailed(
            f"{out} could not be written: {fault.strerror or fault}",
            where=fault.filename or folder,
            fix="Free some space, or check that the folder is writable; then run again, and it goes on.",
        ) from fault


def _hold_plan(folder: Path, plan: StatesRecord) -> None:
    file = folder / PROGRESS / PLAN
    text = plan.to_json()
    if not file.exists():
        file.write_text(text)
        return
    before, now = _load_plan(file), json.loads(text)
    other = [key for key in now if before.get(key) != now[key]]
    if other:
        raise StatesInvalid(
            f"a run of other {', '.join(other)} was interrupted here",
            where=folder,
            fix="Run that one again to finish it, choose another name, or delete this folder.",
        )


def _load_plan(file: Path) -> dict[str, object]:
    try:
        held = parse_json(read_bounded(file, StatesInvalid, limit=MAX_JSON, fix="Delete this folder."))
        return held if isinstance(held, dict) else {}
    except ValueError:  # killed while it was written; no shard can be there
        return {}
