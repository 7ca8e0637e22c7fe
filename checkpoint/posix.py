"""What only POSIX systems have: locks of files, and a limit of this process's memory. kconv was not tried elsewhere."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
    import resource
except ImportError:  # Windows
    fcntl = resource = None

# Nonblocking, since the other end of a pipe may never come.
NONBLOCKING = getattr(os, "O_NONBLOCK", 0)


def lock(descriptor: int, *, shared: bool = False) -> None:
    """Lock an open file until it is closed, without waiting.

    Raises:
        BlockingIOError: another process holds it.
        OSError: this system, or this disk, has no locks.
    """
    if fcntl is None:
        raise OSError(errno.ENOTSUP, "this system has no file locks")
    fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


@contextmanager
def bounded(room: int) -> Generator[None]:
    """Limit this process's memory growth, where /proc shows it: allocations past `room` bytes raise MemoryError."""
    statm = Path("/proc/self/statm")
    if resource is None or not statm.exists():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = int(statm.read_text(encoding="utf-8").split()[0]) * resource.getpagesize() + room
    if before[0] != resource.RLIM_INFINITY and most >= before[0]:
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
