"""Check first, write beside, rename last."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import KconvError, OutputExists, OutputFailed

PARTIAL = ".kconv-partial-"
# What `staged` calls its folder behind that; a long job's, which may be gone on with, ends in a longer key.
OWN, KEY = re.compile(r"[0-9a-f]{8}"), re.compile(r"[0-9a-f]{16}")
# The folder in an unfinished output where a job notes how far it is.
PROGRESS = f"{PARTIAL}progress"


def cache_root() -> Path:
    """Return the folder for what can be made again: $KCONV_CACHE, else ~/.cache/kconv."""
    return Path(os.environ.get("KCONV_CACHE") or Path.home() / ".cache" / "kconv")


def is_partial(folder: Path) -> bool:
    """Say whether a folder is one that an interrupted run left behind."""
    return folder.resolve().name.startswith(PARTIAL)


def refuse_existing(out: Path, *, fix: str = "Choose another name, or delete it if you no longer need it.") -> None:
    """Raise OutputExists if there is anything at `out`; `fix` says what to do."""
    if os.path.lexists(out):
        _clear_finished(out)
        raise OutputExists(f"{out} already exists", fix=fix)


def _clear_finished(out: Path) -> None:
    """Remove what a long job left that was killed right behind the rename which made its output."""
    prefix = f"{PARTIAL}{out.name[:40]}-"
    shutil.rmtree(out / PROGRESS, ignore_errors=True)
    with suppress(OSError):
        for left in out.parent.iterdir():
            # What became the output is gone from it, so there is nothing in it to go on with.
            own = left.name.startswith(prefix) and KEY.fullmatch(left.name.removeprefix(prefix))
            if own and not files_of(left).exists():
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Give a temporary sibling of `out` to write in; on leaving without a fault, flush and rename it.

    After a kill at any moment `out` is absent or whole. On a fault the sibling is removed; what a killed run left of
    the same output is removed by the next one.

    Args:
        out: the folder to make; its parents are made too.

    Yields:
        The temporary folder, on the same file system as `out`.

    Raises:
        OutputExists: there is something at `out`.
        OutputFailed: the disk is full or not writable.
    """
    refuse_existing(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Not mkdtemp, whose 0700 would follow the folder to its users whatever their umask is. Cut, as a
        # name that is legal for `out` may be too long with a prefix.
        prefix = f"{PARTIAL}{out.name[:40]}-"
        _clear(out.parent, prefix)
        temporary, held = _make(out.parent, prefix)
    except OSError as fault:
        raise _failed(out, fault) from fault
    try:
        yield temporary
        finish(temporary, out)
    except OSError as fault:
        raise _failed(out, fault) from fault
    finally:
        # After the rename there is nothing left at this name.
        shutil.rmtree(temporary, ignore_errors=True)
        if held is not None:
            os.close(held)


def _make(parent: Path, prefix: str) -> tuple[Path, int | None]:
    """Make a folder that is locked for as long as this process lives, by which the next one knows who works in it."""
    while True:
        temporary = parent / f"{prefix}{secrets.token_hex(4)}"
        temporary.mkdir()
        try:
            held = _lock(temporary)
            if temporary.exists():
                return temporary, held
            os.close(held)
        except (BlockingIOError, FileNotFoundError):  # another process took it for one that nobody works in
            continue
        except OSError:  # a disk without locks, where nothing is cleared either
            return temporary, None


def _lock(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _clear(parent: Path, prefix: str) -> None:
    """Remove what runs that were killed left of an output."""
    with suppress(OSError):  # of a folder that may be written and not listed
        for left in parent.iterdir():
            if left.name.startswith(prefix) and OWN.fullmatch(left.name.removeprefix(prefix)) and not left.is_symlink():
                with suppress(OSError):  # somebody works in it, or has cleared it
                    held = _lock(left)
                    shutil.rmtree(left, ignore_errors=True)
                    os.close(held)


def write_new(file: Path, text: str | bytes) -> None:
    """Write a new file, whole or not at all; its folder is made.

    Raises:
        OutputExists: there is something at `file`, which two runs at once find too.
        OutputFailed: the disk is full or not writable.
    """
    beside = file.parent / f"{PARTIAL}{file.name[:40]}-{secrets.token_hex(4)}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("xb") as out:
            out.write(text.encode() if isinstance(text, str) else text)
            out.flush()
            os.fsync(out.fileno())
        try:
            os.link(beside, file)
        except FileExistsError as fault:
            raise OutputExists(f"{file} is already there", fix="Choose another name.") from fault
        except OSError:  # a disk without second names
            refuse_existing(file)
            beside.rename(file)
    except OSError as fault:
        raise _failed(file, fault) from fault
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def finish(temporary: Path, out: Path) -> None:
    """Flush a folder to its disk and give it its name, which must be free.

    Raises:
        OutputExists: there is something at `out`.
        OSError: the disk is full, or the name cannot be given.
    """
    _flush(temporary)
    _rename(temporary, out)


def _flush(folder: Path) -> None:
    """Put every file of a folder on its disk, so that the rename cannot outlive the data."""
    for path in [*(p for p in folder.rglob("*") if not p.is_symlink()), folder]:
        _sync(path)


def _rename(temporary: Path, out: Path) -> None:
    refuse_existing(out)
    try:
        temporary.rename(out)
    except OSError as fault:
        if fault.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise OutputExists(f"{out} was created by something else meanwhile", fix="Choose another name.") from fault
        raise
    with suppress(OSError):  # the output is whole by now, whatever this flush says
        _sync(out.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _failed(out: Path, fault: OSError) -> OutputFailed:
    full = fault.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return OutputFailed(
        f"{out} could not be written: {fault.strerror or fault}",
        where=fault.filename or out.parent,
        fix="Free some space, or choose an output on another disk."
        if full
        else "Check that the folder exists and is writable.",
    )


@contextmanager
def alone(folder: Path, busy: KconvError) -> Iterator[None]:
    """Hold a folder that outlives a run against other processes; on a disk without locks it is not held.

    Raises:
        KconvError: `busy`, where another process holds it.
    """
    try:
        held = _lock(folder)
    except BlockingIOError as fault:
        raise busy from fault
    except OSError:
        held = None
    try:
        yield
    finally:
        if held is not None:
            os.close(held)


def keep_staging(out: Path, key: str) -> Path:
    """Make the workplace of a long job, or find the one that an interrupted run of the same job left.

    Unlike `staged` it outlives a fault. Several processes may make it at once.

    Args:
        out: the folder to make; nothing may be there.
        key: names the job; another job of the same output has a workplace of its own.

    Returns:
        A sibling of `out`. What shall become `out` goes into `files_of` it; the rest of it is the job's own.

    Raises:
        OutputExists: there is something at `out`.
        OutputFailed: the disk is full or not writable.
    """
    refuse_existing(out)
    place = staging_of(out, key)
    try:
        files_of(place).mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise _failed(out, fault) from fault
    return place


def staging_of(out: Path, key: str) -> Path:
    """Return where the workplace of a long job is, or would be."""
    return out.parent / f"{PARTIAL}{out.name[:40]}-{key}"


def files_of(place: Path) -> Path:
    """Return the folder inside a workplace that becomes the output."""
    return place / f"{PARTIAL}files"


def publish(place: Path, out: Path) -> None:
    """Flush what is in a workplace, make it the output by one rename, and remove the rest.

    Raises:
        OutputExists: something appeared at `out`.
        OutputFailed: the disk is full or not writable.
    """
    try:
        finish(files_of(place), out)
    except OSError as fault:
        raise _failed(out, fault) from fault
    shutil.rmtree(place, ignore_errors=True)


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turn the system's faults while writing towards `out` into OutputFailed."""
    try:
        yield
    except OSError as fault:
        raise _failed(out, fault) from fault


@contextmanager
def heed_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process as Ctrl-C does, through what there is to stop or take away; else it just dies."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def free_bytes(out: Path) -> int:
    """Return the bytes that are free where an output is or will be."""
    at = out.absolute()
    return shutil.disk_usage(next(place for place in (at, *at.parents) if place.exists())).free


def check_disk(out: Path, needed: int, *, what: str = "the output takes {} more") -> None:
    """Raise OutputFailed if a disk has no room for what is still to be written.

    Args:
        out: where it will be.
        needed: bytes.
        what: what takes them, for the message; {} stands for their number.
    """
    free = free_bytes(out)
    if needed > free:
        raise OutputFailed(
            f"{what.format(f'{needed / 1e9:.2f} GB')}, but {free / 1e9:.2f} GB are free",
            where=out.absolute().parent,
            fix="Free some space, or choose an output on another disk.",
        )
