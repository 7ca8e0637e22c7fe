"""A quantization from plan to output."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..checkpoint.manifest import read_manifest
from ..checkpoint.staging import keep_staging, publish, staging_of, writing
from ..errors import KconvError, OutputFailed, WorkerFailed
from .finish import copied_files, finish
from .plan import QuantizePlan
from .record import Workplace
from .units import Unit
from .workers import make_units
from .world import ALONE, World

Say = Callable[[str], None]
WAIT = 0.5  # seconds between two looks for other ranks' files
# Seconds that other ranks have to start, and to take back what they said of an earlier run's fault.
GRACE = 60


def quantize(
    plan: QuantizePlan,
    out: Path,
    *,
    world: World = ALONE,
    jobs: int = 1,
    advance: Callable[[int], None] = lambda _: None,
    say: Say = lambda _: None,
) -> bool:
    """Carry out a plan; go on where an interrupted run of the same plan stopped.

    Args:
        plan: what to do.
        out: the folder to make; nothing may be there.
        world: this process among those that share the work, each on the same file systems.
        jobs: processes that this one starts for its share.
        advance: called with the number of source bytes dealt with since the last call, found ones among them.
        say: told what is found or waited for.

    Returns:
        Whether the output is there; ranks other than 0 leave earlier.

    Raises:
        OutputExists, OutputFailed: see `checkpoint.staging`; or the disk is too small.
        TensorValue: a weight is zero throughout, or holds NaN or Inf.
        CorruptHeader, NotACheckpoint: the source cannot be read.
        WorkerFailed: a process was killed, or another rank failed.
    """
    if world.rank and _is_made(plan, out):
        return True
    place, begun = Workplace(staging_of(out, plan.key)), time.monotonic()
    if not world.rank:
        check_disk(plan, out, place)
    keep_staging(out, plan.key)
    with writing(out):
        place.failure(world.rank).unlink(missing_ok=True)
        try:
            _make_own(plan, place, world, jobs, advance, say)
        except BaseException as fault:
            _tell(place, world, fault)
            raise
        if world.rank:
            return False
        _wait_for_others(plan, place, world, begun, advance, say)
        say("writing the index and the manifest")
        finish(plan, place)
    publish(place.root, out)
    return True


def bytes_needed(plan: QuantizePlan, place: Workplace | None = None) -> int:
    """Return the bytes of disk that a plan still takes, all ranks together."""
    left = sum(unit.bytes_out for unit in plan.units if place is None or not place.is_done(unit.file))
    return left + sum(file.stat().st_size for file in copied_files(plan.source.folder))


def free_bytes(out: Path) -> int:
    """Return the bytes that are free where an output will be."""
    return shutil.disk_usage(next(parent for parent in out.absolute().parents if parent.exists())).free


def check_disk(plan: QuantizePlan, out: Path, place: Workplace | None = None) -> None:
    """Raise OutputFailed if the disk has no room for what is still to be written."""
    free, needed = free_bytes(out), bytes_needed(plan, place)
    if free < needed:
        raise OutputFailed(
            f"the output takes {needed / 1e9:.2f} GB more, and {free / 1e9:.2f} GB are free",
            where=out.absolute().parent,
            fix="Free some space, or choose an output on another disk.",
        )


def _make_own(
    plan: QuantizePlan, place: Workplace, world: World, jobs: int, advance: Callable[[int], None], say: Say
) -> None:
    own = world.own(plan.units)
    missing = [unit for unit in own if place.read(unit.file) is None]
    if len(missing) < len(own):
        say(f"{len(own) - len(missing)} of {len(own)} files are there already")
        advance(sum(unit.bytes_in for unit in own if unit not in missing))
    make_units(missing, place, inputs=plan.inputs.description, jobs=jobs, advance=advance)


def _wait_for_others(
    plan: QuantizePlan, place: Workplace, world: World, begun: float, advance: Callable[[int], None], say: Say
) -> None:
    own = {unit.file for unit in world.own(plan.units)}
    waiting: list[Unit] = [unit for unit in plan.units if unit.file not in own]
    while waiting:
        say(f"waiting for {len(waiting)} files of other ranks")
        there = [unit for unit in waiting if place.is_done(unit.file)]
        advance(sum(unit.bytes_in for unit in there))
        waiting = [unit for unit in waiting if unit not in there]
        if waiting:
            if time.monotonic() - begun >= GRACE:
                _hear(place, world)
            time.sleep(WAIT)
    for unit in plan.units:
        if place.read(unit.file) is None:
            raise WorkerFailed(f"{unit.file} is not whole", fix="Run the same command again to make it.")


def _hear(place: Workplace, world: World) -> None:
    for rank in range(world.size):
        if place.failure(rank).exists():
            raise WorkerFailed(
                f"rank {rank} failed: {place.failure(rank).read_text()}",
                fix="Put that right, and run the same command again on all ranks; it goes on where it stopped.",
            )


def _tell(place: Workplace, world: World, fault: BaseException) -> None:
    """Leave word of a fault for rank 0, which may be waiting."""
    with suppress(OSError):
        place.failure(world.rank).write_text(fault.what if isinstance(fault, KconvError) else str(fault))


def _is_made(plan: QuantizePlan, out: Path) -> bool:
    """Say whether rank 0 has finished this very plan already."""
    try:
        return read_manifest(out).spec.get("plan") == plan.key
    except KconvError:
        return False
