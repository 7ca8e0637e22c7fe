"""Check first, write beside, rename last."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import KconvError, OutputExists, OutputFailed
from .posix import NONBLOCKING, lock

PARTIAL = ".kconv-partial-"
# The suffix of `staged`'s folder. The folder of a long job, which can be resumed, ends in a longer key.
OWN, KEY = re.compile(r"[0-9a-f]{8}"), re.compile(r"[0-9a-f]{16}")
# The folder in an unfinished output where a job records its progress.
PROGRESS = f"{PARTIAL}progress"


def cache_root() -> Path:
    """Return the cache folder: $KCONV_CACHE, else ~/.cache/kconv. Its contents can be rebuilt.

    Raises:
        OutputFailed: KCONV_CACHE is a file.
    """
    given = os.environ.get("KCONV_CACHE")
    if given and Path(given).is_file():
        raise OutputFailed(f"KCONV_CACHE is {given}, which is a file", fix="Set it to a folder, or unset it.")
    return Path(given or Path.home() / ".cache" / "kconv")


def is_partial(folder: Path) -> bool:
    """Return whether a folder was left behind by an interrupted run."""
    return folder.resolve().name.startswith(PARTIAL)


ANOTHER_NAME = "Choose another name: kconv overwrites nothing."


def refuse_existing(out: Path, *, fix: str = ANOTHER_NAME) -> None:
    """Refuse an output that exists, or that cannot be written, before anything slow.

    Raises:
        OutputExists: something exists at `out`; `fix` says what to do.
        OutputFailed: the folder in which it would be is none, or is not writable.
    """
    if os.path.lexists(out):
        _clear_finished(out)
        raise OutputExists(f"{out} already exists", fix=fix)
    place = next(place for place in out.absolute().parents if os.path.lexists(place))
    wrong = errno.ENOTDIR if not place.is_dir() else 0 if os.access(place, os.W_OK | os.X_OK) else errno.EACCES
    if wrong:
        raise _failed(out, OSError(wrong, os.strerror(wrong), str(place)))


def _clear_finished(out: Path) -> None:
    """Remove the remains of a long job that was killed right after the rename of its output."""
    prefix = f"{PARTIAL}{out.name[:40]}-"
    shutil.rmtree(out / PROGRESS, ignore_errors=True)
    with suppress(OSError):
        for left in out.parent.iterdir():
            # Its files became the output, so there is nothing left to resume.
            own = left.name.startswith(prefix) and KEY.fullmatch(left.name.removeprefix(prefix))
            if own and not files_of(left).exists():
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def staged(out: Path) -> Generator[Path]:
    """Yield a temporary sibling of `out` to write in; on success, flush and rename it.

    After a kill at any moment `out` is absent or whole. An exception removes the sibling; the next run removes the
    remains of a killed run for the same output.

    Raises:
        OutputExists: something exists at `out`.
        OutputFailed: the disk is full or not writable.
    """
    refuse_existing(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Not mkdtemp: its mode 0700 would stay with the folder whatever the user's umask is. Cut, since a name that is
        # legal for `out` may be too long with a prefix.
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
        # After the rename nothing is left at this name.
        shutil.rmtree(temporary, ignore_errors=True)
        if held is not None:
            os.close(held)


def make_private(prefix: str) -> tuple[Path, Callable[[], None]]:
    """Create a folder in the system's temporary one that only this user can read; those of killed runs are removed."""
    parent = Path(tempfile.gettempdir())
    _clear(parent, prefix)
    folder, held = _make(parent, prefix, mode=0o700)

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if held is not None:
            os.close(held)

    return folder, remove


def _make(parent: Path, prefix: str, mode: int = 0o777) -> tuple[Path, int | None]:
    """Create a folder and lock it while this process lives, so that other runs can tell that it is in use."""
    while True:
        temporary = parent / f"{prefix}{os.urandom(4).hex()}"
        temporary.mkdir(mode)
        try:
            return temporary, _lock(temporary)
        except (BlockingIOError, FileNotFoundError):  # another process took it for an abandoned one
            continue
        except OSError:  # a disk without locks, where nothing is removed either
            return temporary, None


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | NONBLOCKING)
    try:
        lock(descriptor)
        if not os.path.samestat(os.fstat(descriptor), path.stat()):
            raise BlockingIOError(f"{path} was replaced by the process that held its lock")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _clear(parent: Path, prefix: str) -> None:
    """Remove what killed runs left behind for an output."""
    with suppress(OSError):  # for a folder that is writable but not listable
        for left in parent.iterdir():
            if left.name.startswith(prefix) and OWN.fullmatch(left.name.removeprefix(prefix)) and not left.is_symlink():
                with suppress(OSError):  # another run uses it, or has removed it
                    held = _lock(left)
                    shutil.rmtree(left, ignore_errors=True)
                    os.close(held)


def write_new(file: Path, text: str | bytes) -> None:
    """Write a new file, whole or not at all, and create its folder.

    Raises:
        OutputExists: something exists at `file`; if two runs race, the second gets this too.
        OutputFailed: the disk is full or not writable.
    """
    beside = file.parent / f"{PARTIAL}{file.name[:40]}-{os.urandom(4).hex()}"
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
        except OSError:  # a disk without hard links
            refuse_existing(file)
            beside.rename(file)
    except OSError as fault:
        raise _failed(file, fault) from fault
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def finish(temporary: Path, out: Path) -> None:
    """Flush a folder to disk and rename it; the new name must be free.

    Raises:
        OutputExists: something exists at `out`.
        OSError: the disk is full, or the rename failed.
    """
    _flush(temporary)
    _rename(temporary, out)


def _flush(folder: Path) -> None:
    """Flush every file of a folder to disk, so that the rename cannot outlive the data."""
    for path in [*(p for p in folder.rglob("*") if not p.is_symlink()), folder]:
        _sync(path)


def _rename(temporary: Path, out: Path) -> None:
    refuse_existing(out)
    try:
        temporary.rename(out)
    except OSError as fault:
        if fault.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise OutputExists(
                f"{out} was created by another program in the meantime", fix="Choose another name."
            ) from fault
        raise
    with suppress(OSError):  # the output is already whole, even if this flush fails
        _sync(out.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _failed(out: Path, fault: OSError) -> OutputFailed:
    if isinstance(fault, shutil.Error):
        # copytree goes on after an error, and raises a list of all, each as text.
        (_, _, why), *_ = fault.args[0]
        fault = OSError(errno.ENOSPC if os.strerror(errno.ENOSPC) in why else 0, why)
    full = fault.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return OutputFailed(
        f"{out} could not be written: {fault.strerror or fault}",
        # A user knows the output's folder, and not the name beside it that the work goes to until it is done.
        where=out.parent if PARTIAL in str(fault.filename or PARTIAL) else fault.filename,
        fix="Free some space, or choose an output on another disk."
        if full
        else "Check that the folder exists and is writable.",
    )


@contextmanager
def alone(path: Path, busy: KconvError) -> Generator[None]:
    """Lock a folder or file that outlives a run, or raise `busy`; on a disk without locks it stays unlocked."""
    try:
        held = _lock(path)
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
    """Create the workplace of a long job, or find the one left by an interrupted run of the same job.

    Unlike `staged` it survives an exception. Several processes may create it at once.

    Args:
        key: identifies the job; another job for the same output has its own workplace.

    Returns:
        A sibling of `out`. Files for `out` go into its `files_of`; the rest of it is the job's own.

    Raises:
        OutputExists: something exists at `out`.
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
    """Flush a workplace, turn it into the output with one rename, and remove the rest.

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
def writing(out: Path) -> Generator[None]:
    """Turn OS errors while writing `out` into OutputFailed."""
    try:
        yield
    except OSError as fault:
        raise _failed(out, fault) from fault


@contextmanager
def heed_sigterm() -> Generator[None]:
    """Let SIGTERM end this process as Ctrl-C does, so that cleanup runs; by default it just dies."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def free_bytes(out: Path) -> int:
    """Return the free bytes on the disk of an output that may not exist yet."""
    at = out.absolute()
    return shutil.disk_usage(next(place for place in (at, *at.parents) if place.exists())).free


def check_disk(out: Path, needed: int, *, what: str = "the output needs {} more") -> None:
    """Raise OutputFailed if a disk has too little room for what is still to be written.

    Args:
        needed: bytes.
        what: what needs them, for the message; {} stands for their number.
    """
    free = free_bytes(out)
    if needed > free:
        raise OutputFailed(
            f"{what.format(f'{needed / 1e9:.2f} GB')}, but only {free / 1e9:.2f} GB are free",
            where=out.absolute().parent,
            fix="Free some space, or choose an output on another disk.",
        )
