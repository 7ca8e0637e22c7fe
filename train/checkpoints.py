"""Checkpoints of a run.

A checkpoint holds the head and its optimizer's state whole and by name, however they were spread over processes: so
a run goes on from it with `--shard` or without.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..checkpoint.bytes import write_safetensors
from ..checkpoint.folder import read_json
from ..checkpoint.header import read_header
from ..checkpoint.staging import alone, refuse_existing, writing
from ..checkpoint.tensors import entry, read_tensor
from ..errors import KconvError, OutputExists, OutputFailed, TrainingFailed
from .module import WEIGHTS

STATE, RUN = "trainer_state.json", "run.json"
# Of an output: the folder of ModelOpt's own module, and the report in it.
MODULE, REPORT = "modelopt", "training.json"
# In the order in which the Trainer writes them; its own state comes last:
# https://github.com/huggingface/transformers/blob/v5.14.1/src/transformers/trainer.py#L3065-L3119
OPTIMIZER, SCHEDULE = "optimizer.pt", "scheduler.pt"
PARTS = (WEIGHTS, OPTIMIZER, SCHEDULE)
PREFIX = "eagle_module."


# Bytes that most file systems take as one name.
LONGEST = 255


def workplace(out: Path) -> Path:
    """Return where the checkpoints of a run stand: in `.NAME.training` beside its output.

    Of a name that leaves no room for that, its beginning and a digest of it stand there.
    """
    name = f".{out.name}.training"
    if len(os.fsencode(name)) > LONGEST:
        name = f".{out.name[:40]}-{hashlib.sha256(os.fsencode(out.name)).hexdigest()[:16]}.training"
    return out.parent / name


@contextmanager
def hold(out: Path) -> Iterator[Path]:
    """Give the folder of an output's checkpoints, held against other runs by the first of a run's processes.

    Raises:
        OutputExists: there is something at `out`, or another run is at work on it.
        OutputFailed: the folder cannot be made.
    """
    work = workplace(out)
    if int(os.environ.get("RANK", "0")):
        refuse_existing(out)
        yield work
        return
    with writing(out):
        work.mkdir(parents=True, exist_ok=True)
    busy = OutputExists(f"another run is training {out}", where=work, fix="Wait for it, or choose another name.")
    with alone(work, busy):
        # The run that held it before may just have ended.
        refuse_existing(out)
        yield work


def clear_finished(out: Path) -> None:
    """Remove the checkpoints of the very run that made what is at `out`, where it was killed before it did that."""
    work = workplace(out)
    with suppress(OSError, KconvError, KeyError):
        if read_json(work / RUN)["key"] == read_json(out / MODULE / REPORT)["key"]:
            with alone(work, OutputExists("another run is at work", fix="Wait for it.")):
                shutil.rmtree(work)


@contextmanager
def writing_checkpoint(work: Path) -> Iterator[None]:
    """Turn what the disk refuses of a checkpoint into OutputFailed; torch's writer raises it as a RuntimeError.

    https://github.com/pytorch/pytorch/blob/v2.13.0/caffe2/serialize/inline_container.cc#L672
    """
    try:
        with writing(work):
            yield
    except RuntimeError as fault:
        if "inline_container.cc" not in str(fault):
            raise
        raise OutputFailed(
            f"a checkpoint in {work} could not be written",
            where=work,
            fix="Free some space, and repeat the command: it resumes from the checkpoint before.",
        ) from fault


def claim(work: Path, key: str, world: int) -> None:
    """Make a run's folder, or take up the one that the same run left.

    Args:
        work: the folder of its checkpoints.
        key: names everything that decides what comes out of the run.
        world: how many processes the run is of; a checkpoint holds random numbers of each.

    Raises:
        OutputExists: another run's checkpoints are there, or this run's of another number of processes.
    """
    work.mkdir(parents=True, exist_ok=True)
    record = work / RUN
    if not record.exists():
        draft = work / f"{RUN}.{os.getpid()}"
        draft.write_text(json.dumps({"key": key, "processes": world}))
        draft.replace(record)
        return
    found = read_json(record)
    if found.get("key") != key:
        raise OutputExists(
            "a stopped run with another recipe, target, data or other libraries is here",
            where=work,
            fix="Repeat that run's command to resume it, or delete the folder to start over.",
        )
    if found.get("processes") != world:
        raise OutputExists(
            f"the stopped run here had WORLD_SIZE {found.get('processes')}, not {world}",
            where=work,
            fix="Start as many processes to resume it, or delete the folder to start over.",
        )


def write_head(state: Mapping[str, Tensor], folder: Path, step: int) -> None:
    """Write a head's weights.

    Args:
        state: of ModelOpt's `eagle_module`, whole.
        folder: the checkpoint's.
        step: after which they are.

    Raises:
        TrainingFailed: a weight is NaN or Inf.
    """
    broken = [name for name, tensor in state.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise TrainingFailed(
            f"{len(broken)} of the head's tensors hold NaN or Inf after step {step}",
            where=broken[0],
            fix="Lower the recipe's lr. The checkpoint before this one is kept.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / WEIGHTS, [entry(name, tensor.cpu()) for name, tensor in state.items()])


def load_head(model: nn.Module, folder: Path) -> None:
    """Give ModelOpt's Eagle model, which may be spread over processes, the weights of a checkpoint.

    Raises:
        TrainingFailed: they are another head's.
    """
    state: dict[str, Any] = {PREFIX + name: read_tensor(info) for name, info in read_header(folder / WEIGHTS).items()}
    # The target's ends are no part of a checkpoint.
    found = set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=False))
    lost = [name for name in found.missing_keys if name.startswith(PREFIX)] + found.unexpected_keys
    if lost:
        raise TrainingFailed(
            f"the checkpoint belongs to another head: {lost[0]} is missing or unknown",
            where=folder,
            fix="Delete the folder it is in, and train again.",
        )


def write_optimizer(
    model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, folder: Path, *, first: bool
) -> None:
    """Write an optimizer's state and its schedule's; each process has to ask, and the first one writes."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    if first:
        torch.save(state, folder / OPTIMIZER)
        torch.save(schedule.state_dict(), folder / SCHEDULE)


def load_optimizer(model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, folder: Path) -> None:
    """Give an optimizer, which may be spread over processes, and its schedule the state of a checkpoint."""
    state = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))
    schedule.load_state_dict(torch.load(folder / SCHEDULE, weights_only=True))


def newest(work: Path, steps: int) -> Path | None:
    """Return the checkpoint that a run of so many steps goes on from; None where there is none.

    It is the newest whole one before the last step: from that of the last step the Trainer would take one more, as it
    looks whether it is done only after a step.
    https://github.com/huggingface/transformers/blob/v5.14.1/src/transformers/trainer_callback.py#L590-L593
    """
    return max((folder for folder in work.glob("checkpoint-*") if _is_usable(folder, steps)), key=step_of, default=None)


def drop_unusable(work: Path, steps: int) -> None:
    """Delete the checkpoints that `newest` passes over: cut short by a kill, or of the last step."""
    for folder in work.glob("checkpoint-*"):
        if not _is_usable(folder, steps):
            shutil.rmtree(folder)


def step_of(folder: Path) -> int:
    """Return after which step a checkpoint was written."""
    return int(folder.name.rpartition("-")[2])


def _is_usable(folder: Path, steps: int) -> bool:
    return step_of(folder) < steps and _is_whole(folder)


def _is_whole(folder: Path) -> bool:
    try:
        read_json(folder / STATE)
    except KconvError:
        return False
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    random = ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks)]
    return all((folder / name).exists() for name in (*PARTS, *random))
