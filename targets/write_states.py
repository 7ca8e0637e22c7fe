"""Hidden states written to disk, shard by shard.

One sequence's states are in memory at a time. Finished shards wait in a hidden folder beside the output, each with
its sha256; a run that was killed goes on behind them, and the folder gets its name when all are there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ..checkpoint.bytes import Entry, write_safetensors
from ..checkpoint.folder import Checkpoint
from ..checkpoint.staging import finish, refuse_existing
from ..checkpoint.values import Values
from ..errors import TargetInvalid
from .config import TargetConfig
from .states_partial import PROGRESS, partial, read_finished
from .states_plan import Planned, Wanted, plan_states
from .states_record import RECORD, Kind, ShardRecord, StatesRecord, shard_name
from .states_runner import Runner
from .tokenizer import Tokenizer

SHARD_BYTES = 512 << 20


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


def _continue(runner: Runner, planned: Planned, cut: range, seed: int) -> list[list[int]]:
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
