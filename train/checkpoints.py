"""Checkpoints of a run.

A checkpoint holds the head and its optimizer's state by name, in the safetensors form of torch.distributed.checkpoint:
each process writes a part, and reads what it needs, however the parts are distributed. So a run can resume with
`--shard` or without.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import is_initialized
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..checkpoint.folder import read_json
from ..checkpoint.staging import alone, refuse_existing, writing
from ..errors import KconvError, OutputExists, OutputFailed, TrainingFailed

STATE, RUN = "trainer_state.json", "run.json"
# In an output: the folder of ModelOpt's own module, and the report in it.
MODULE, REPORT = "modelopt", "training.json"
# In the order in which the Trainer writes them; its own state comes last:
# https://github.com/huggingface/transformers/blob/v5.14.1/src/transformers/trainer.py#L3065-L3119
HEAD, OPTIMIZER, SCHEDULE = "head", "optimizer", "scheduler.pt"
PARTS = (HEAD, OPTIMIZER, SCHEDULE)


# The longest file name on most file systems, in bytes.
LONGEST = 255


def workplace(out: Path) -> Path:
    """Return the folder of a run's checkpoints: `.NAME.training` next to its output, shortened if it is too long."""
    name = f".{out.name}.training"
    if len(os.fsencode(name)) > LONGEST:
        name = f".{out.name[:40]}-{hashlib.sha256(os.fsencode(out.name)).hexdigest()[:16]}.training"
    return out.parent / name


@contextmanager
def hold(out: Path) -> Iterator[Path]:
    """Yield the folder of an output's checkpoints; the first of a run's processes locks it against other runs."""
    work = workplace(out)
    if int(os.environ.get("RANK", "0")):
        refuse_existing(out)
        yield work
        return
    with writing(out):
        work.mkdir(parents=True, exist_ok=True)
    busy = OutputExists(f"another run is training {out}", where=work, fix="Wait for it, or choose another name.")
    with alone(work, busy):
        # The run that held the lock may just have ended.
        refuse_existing(out)
        yield work


def clear_finished(out: Path) -> None:
    """Remove the checkpoints of the run that made `out`, if it was killed before it could."""
    work = workplace(out)
    with suppress(OSError, KconvError, KeyError):
        if read_json(work / RUN)["key"] == read_json(out / MODULE / REPORT)["key"]:
            with alone(work, OutputExists("another run is at work", fix="Wait for it.")):
                shutil.rmtree(work)


@contextmanager
def writing_checkpoint(work: Path) -> Iterator[None]:
    """Turn disk errors while writing a checkpoint into OutputFailed.

    torch.save raises them as RuntimeError, torch.distributed.checkpoint wraps each process's exception in its own:
    https://github.com/pytorch/pytorch/blob/v2.13.0/caffe2/serialize/inline_container.cc#L672
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/checkpoint/api.py#L30-L41
    """
    try:
        with writing(work):
            yield
    except (RuntimeError, CheckpointException) as fault:
        failures = fault.failures.values() if isinstance(fault, CheckpointException) else ()
        if "inline_container.cc" not in str(fault) and not any(isinstance(each, OSError) for each, _ in failures):
            raise
        raise OutputFailed(
            f"a checkpoint in {work} could not be written",
            where=work,
            fix="Free some space, and repeat the command: it resumes from the previous checkpoint.",
        ) from fault


def _apart(before: object, now: Mapping[str, Any]) -> str:
    """Return in which parts a stopped run was another one."""
    then: Mapping[str, Any] = before if isinstance(before, Mapping) else {}
    recipe = then.get("recipe")
    changed = [
        f"{key} is {value!r} in its recipe, {now['recipe'].get(key)!r} now"
        for key, value in (recipe.items() if isinstance(recipe, Mapping) else ())
        if value != now["recipe"].get(key)
    ]
    others = [name for name in now if name != "recipe" and then.get(name) != now[name]]
    if others:
        changed.append(f"{' and '.join(others)} {'were others' if len(others) > 1 else 'was another'} then")
    return "; ".join(changed) or "its recipe, target, data or libraries were others"


def claim(work: Path, key: str, parts: Mapping[str, Any], world: int) -> None:
    """Create a run's folder, or reuse what the same run left; a checkpoint holds the random state of each process.

    Args:
        key, parts: see `job.job_parts`; another run is told by what differs.
    """
    work.mkdir(parents=True, exist_ok=True)
    record = work / RUN
    if not record.exists():
        draft = work / f"{RUN}.{os.getpid()}"
        draft.write_text(json.dumps({"key": key, "processes": world, "parts": parts}), encoding="utf-8")
        draft.replace(record)
        return
    found = read_json(record)
    if found.get("key") != key:
        raise OutputExists(
            f"this folder holds a stopped run, but {_apart(found.get('parts'), parts)}",
            where=work,
            fix="Repeat that run's command to resume it, or delete the folder to start over.",
        )
    if found.get("processes") != world:
        raise OutputExists(
            f"the stopped run had WORLD_SIZE {found.get('processes')}, not {world}",
            where=work,
            fix="Start as many processes as then to resume it, or delete the folder to start over.",
        )


def write_head(model: nn.Module, part: str, folder: Path, step: int) -> None:
    """Write the weights of the model's `part`, but not NaN or Inf; each process must call this, and writes some."""
    state = _head(model, part)
    broken = [name for name, tensor in state.items() if not torch.isfinite(_local(tensor)).all()]
    if broken:
        raise TrainingFailed(
            f"{len(broken)} of the head's tensors hold NaN or Inf after step {step}",
            where=broken[0],
            fix="Lower the recipe's lr. The previous checkpoint is kept.",
        )
    _save(state, folder / HEAD)


def load_head(model: nn.Module, part: str, folder: Path) -> None:
    """Load a checkpoint's weights into a model's `part`, which may be distributed over processes."""
    _load(_head(model, part), folder / HEAD)


def write_optimizer(
    model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, folder: Path, *, first: bool
) -> None:
    """Write an optimizer's state: each process writes a part, and the first one also writes everything but tensors."""
    state = get_optimizer_state_dict(model, optimizer)
    _save(_tensors(state), folder / OPTIMIZER)
    if first:
        torch.save({"groups": state["param_groups"], "schedule": schedule.state_dict()}, folder / SCHEDULE)


def load_optimizer(model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, folder: Path) -> None:
    """Load a checkpoint's state into an optimizer, which may be distributed over processes, and into its schedule."""
    # A step with learning rate 0 creates tensors of the right shapes, into which the checkpoint's are read.
    state = get_optimizer_state_dict(model, optimizer)
    _load(_tensors(state), folder / OPTIMIZER)
    told = torch.load(folder / SCHEDULE, weights_only=True)
    set_optimizer_state_dict(model, optimizer, state | {"param_groups": told["groups"]})
    schedule.load_state_dict(told["schedule"])


def _head(model: nn.Module, part: str) -> dict[str, Tensor]:
    """Return the head's own weights as the processes hold them; a checkpoint omits the target's ends."""
    state = get_model_state_dict(model)
    return {name: tensor for name, tensor in state.items() if name.startswith(f"{part}.")}  # pyright: ignore


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {f"{name}.{what}": value for name, held in state["state"].items() for what, value in held.items()}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warning that a run has only one process, and torch's traceback of a damaged checkpoint."""
    root = logging.getLogger()
    root.addFilter(_is_of_interest)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    finally:
        root.removeFilter(_is_of_interest)


def _is_of_interest(record: logging.LogRecord) -> bool:
    return "metadata is not found" not in record.getMessage()


def _save(state: Mapping[str, Tensor], folder: Path) -> None:
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    # Parameters as plain tensors, the only kind that it writes.
    plain = {name: tensor.detach() for name, tensor in state.items()}
    with _quiet():
        save(plain, storage_writer=writer, no_dist=not is_initialized())


def _load(state: Mapping[str, Tensor], folder: Path) -> None:
    """Read a checkpoint into tensors, in place."""
    try:
        plain = {name: tensor.detach() for name, tensor in state.items()}
        with _quiet():
            load(plain, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not is_initialized())
    except (CheckpointException, ValueError, RuntimeError) as fault:
        # torch's own text of a process's exception holds its traceback.
        inner = next(iter(fault.failures.values()))[0] if isinstance(fault, CheckpointException) else fault
        raise TrainingFailed(
            f"the checkpoint is damaged or belongs to another head: {inner}",
            where=folder,
            fix=f"Delete {folder.parent}, and repeat the command: an earlier checkpoint is taken, if there is one.",
        ) from fault


def newest(work: Path, steps: int) -> Path | None:
    """Return the checkpoint from which a run of this many steps resumes; None if there is none.

    It is the newest whole one before the last step: from the last step's checkpoint the Trainer would take one more
    step, since it checks whether it is done only after a step.
    https://github.com/huggingface/transformers/blob/v5.14.1/src/transformers/trainer_callback.py#L590-L593
    """
    return max((folder for folder in work.glob("checkpoint-*") if _is_usable(folder, steps)), key=step_of, default=None)


def drop_unusable(work: Path, steps: int) -> None:
    """Delete the checkpoints that `newest` skips: incomplete after a kill, or of the last step."""
    for folder in work.glob("checkpoint-*"):
        if not _is_usable(folder, steps):
            shutil.rmtree(folder)


def step_of(folder: Path) -> int:
    """Return the step after which a checkpoint was written."""
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
