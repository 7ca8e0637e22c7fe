"""Run a quantization from plan to output, shared by processes and ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, Literal

from ..checkpoint.manifest import read_manifest
from ..checkpoint.schema import read_text
from ..checkpoint.source import Source
from ..checkpoint.staging import check_disk, keep_staging, publish, staging_of, writing
from ..errors import KconvError, WorkerFailed
from ..targets.config import parse_target_config
from .calibration import CalibrationPrompts, data_free, from_calibration
from .output import bytes_needed, finish
from .plan import QuantizePlan, Unit, plan_quantize
from .recipe import Recipe
from .stream import Advance, Workplace, make_unit

Say = Callable[[str], None]
Backend = Literal["stream", "modelopt"]
WAIT = 0.5  # seconds between two checks for other ranks' files
# Seconds for other ranks to start, and to remove their error reports from an earlier run.
GRACE = 60


def plan_target(
    target: Source,
    recipe: Recipe,
    *,
    input_scale: Path | None = None,
    backend: Backend = "stream",
    prompts: CalibrationPrompts | None = None,
    headers_only: bool = False,
) -> QuantizePlan:
    """Decide what becomes of each tensor of a target.

    Args:
        target: the target; a hub id is downloaded, unless `headers_only`.
        input_scale: for "stream": a file that kconv calibrate wrote; None for 1.0 throughout (data-free).
        backend: "stream", one tensor at a time from disk, or "modelopt", with the whole target in memory.
        prompts: for "modelopt": the calibration text; None if activations stay unquantized.
        headers_only: whether the plan is only shown, so that a hub id's weights are not needed.

    Raises:
        RecipeInvalid: a pattern of the recipe matches no module, the target is already NVFP4, or it is wrapped and the
            backend is "modelopt".
        SourceFormatUnknown, QuantizedWeightInvalid: kconv cannot read the form in which the target is stored.
        TensorShape: a module cannot be split into groups of sixteen.
        InputScalesInvalid: the calibration cannot be read, belongs to another target, or has no amax for a module or
            an impossible one.
    """
    source = target.open_headers() if headers_only else target.open_weights()
    config = parse_target_config(source.config, where=source.folder / "config.json")
    if backend == "modelopt":
        # Imported here, since it loads transformers.
        from .modelopt_backend import plan_in_memory

        return plan_in_memory(source, config, recipe, prompts)
    inputs = from_calibration(input_scale, source, config) if input_scale else data_free()
    return plan_quantize(source, config, recipe, inputs)


@dataclass(frozen=True)
class World:
    """This process among those that share one job, numbered as by torchrun; rank 0 finishes the output."""

    rank: int = 0
    size: int = 1

    def own(self, units: tuple[Unit, ...]) -> list[Unit]:
        """Return this rank's share: the largest file first, each goes to the rank with the fewest bytes to read."""
        loads = [0] * self.size
        mine: set[str] = set()
        for unit in sorted(units, key=lambda unit: -unit.bytes_in):
            rank = loads.index(min(loads))
            loads[rank] += unit.bytes_in
            if rank == self.rank:
                mine.add(unit.file)
        return [unit for unit in units if unit.file in mine]


ALONE = World()


def quantize(
    plan: QuantizePlan,
    out: Path,
    *,
    world: World = ALONE,
    jobs: int = 1,
    advance: Callable[[int], None] = lambda _: None,
    say: Say = lambda _: None,
) -> bool:
    """Execute a plan; resume an interrupted run of the same plan.

    Args:
        world: this process among those that share the work, all on the same file systems.
        jobs: processes that this one starts for its share.
        advance: called with the number of source bytes finished since the last call, including those of files found
            done.

    Returns:
        Whether the output exists; ranks other than 0 leave earlier.

    Raises:
        OutputExists, OutputFailed: something exists at `out`, it cannot be written, or the disk is too small.
        TensorValue: a weight is all zeros, or holds NaN or Inf.
        CorruptHeader, NotACheckpoint: the source cannot be read.
        WorkerFailed: a process was killed, or another rank failed.
    """
    if world.rank and _is_made(plan, out):
        return True
    place, begun = Workplace(staging_of(out, plan.key)), time.monotonic()
    if not world.rank:
        check_disk(out, bytes_needed(plan, place))
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


def _make_own(
    plan: QuantizePlan, place: Workplace, world: World, jobs: int, advance: Callable[[int], None], say: Say
) -> None:
    own = world.own(plan.units)
    missing = [unit for unit in own if place.read(unit.file) is None]
    if len(missing) < len(own):
        say(f"{len(own) - len(missing)} of {len(own)} files are already there")
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
            raise WorkerFailed(f"{unit.file} is incomplete", fix="Run the same command again.")


def _hear(place: Workplace, world: World) -> None:
    again = "Run the same command again on all ranks; it resumes."
    for rank in range(world.size):
        if place.failure(rank).exists():
            raise WorkerFailed(
                f"rank {rank} failed: {read_text(place.failure(rank), WorkerFailed, fix=again)}",
                fix="Fix that, and run the same command again on all ranks to resume.",
            )


def _tell(place: Workplace, world: World, fault: BaseException) -> None:
    """Leave an error report for rank 0, which may be waiting."""
    with suppress(OSError):
        place.failure(world.rank).write_text(
            fault.what if isinstance(fault, KconvError) else str(fault), encoding="utf-8"
        )


def _is_made(plan: QuantizePlan, out: Path) -> bool:
    """Return whether rank 0 has already finished this plan."""
    try:
        return read_manifest(out).spec.get("plan") == plan.key
    except KconvError:
        return False


POLL = 0.2  # seconds between two progress checks


def make_units(units: Sequence[Unit], place: Workplace, *, inputs: str, jobs: int, advance: Advance) -> None:
    """Make some files of the output, in this process or in `jobs` others; `advance` is called in this one."""
    for unit in units:
        place.clear(unit.file)
    if jobs == 1 or len(units) < 2:
        for unit in units:
            make_unit(unit, place, inputs=inputs, advance=advance)
        return
    context = get_context("spawn")  # a fork of a process with threads may hang
    done = context.Value("Q", 0)
    try:
        with ProcessPoolExecutor(
            min(jobs, len(units)), mp_context=context, initializer=_start, initargs=(done, os.getpid())
        ) as pool:
            try:
                # Started so, workers ignore Ctrl-C, at which each would print a traceback; this process ends them.
                with _at_interrupts(signal.SIG_IGN):
                    futures = [pool.submit(_make, unit, place, inputs) for unit in units]
                interrupted = threading.Event()
                with _at_interrupts(lambda *_: interrupted.set()):
                    _follow(futures, done, advance, interrupted)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for worker in active_children():
                    worker.terminate()
                raise
    except BrokenProcessPool as fault:
        raise WorkerFailed(
            "a process that packed one of the files was killed",
            fix="It may have run out of memory: use fewer --jobs. The same command resumes.",
        ) from fault


@contextmanager
def _at_interrupts(handler: Any) -> Iterator[None]:
    """Let a signal handler take Ctrl-C; only the main thread hears of it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _follow(futures: list[Future[None]], done: Any, advance: Advance, interrupted: threading.Event) -> None:
    seen, left = 0, set(futures)
    while left:
        ended, left = wait(left, timeout=POLL, return_when=FIRST_COMPLETED)
        # Not inside of wait, which locks each future: one that stays locked hangs the pool's thread, and the exit.
        if interrupted.is_set():
            raise KeyboardInterrupt
        now = done.value
        advance(now - seen)
        seen = now
        for future in ended:
            future.result()


_done: Any = None


def _start(done: Any, parent: int) -> None:
    """Prepare a worker: one thread, and it ends with its parent."""
    import torch

    global _done
    _done = done
    torch.set_num_threads(1)
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()


def _die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL)
    os._exit(1)


def _make(unit: Unit, place: Workplace, inputs: str) -> None:
    def advance(count: int) -> None:
        with _done.get_lock():
            _done.value += count

    make_unit(unit, place, inputs=inputs, advance=advance)


def read_world(environment: Mapping[str, str] = os.environ) -> World:
    """Read RANK and WORLD_SIZE; without them this process is alone.

    Raises:
        WorkerFailed: only one of them is set, or they are not a valid rank and size.
    """
    said = {name: environment.get(name) for name in ("RANK", "WORLD_SIZE")}
    if not any(said.values()):
        return ALONE
    try:
        world = World(*(int(value or "") for value in said.values()))
    except ValueError:
        world = World(-1, 0)
    if not 0 <= world.rank < world.size:
        raise WorkerFailed(
            "the environment has " + ", ".join(f"{name}={value}" for name, value in said.items()),
            fix="Start the ranks with torchrun, or set both: RANK from 0 to WORLD_SIZE - 1.",
        )
    return world
