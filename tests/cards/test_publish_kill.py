"""Publications killed at each of their calls and at random moments: what is seen then, and that the next goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support import again
from support.hub import Hub
from support.releases import write_release

TOKEN, REPO, TAG = "hf_aVerySecretTokenOfNobody", "org/head", "v1"
RANDOM_KILLS = 6


class Publisher:
    """The program that publishes in a process of its own for each line it is sent."""

    def __init__(self, folder: Path) -> None:
        program = [sys.executable, again.__file__, "publish", str(folder), REPO, TAG]
        # Where each run lays the copy that it checks and uploads.
        self.room = folder.parent / "tmp"
        self.room.mkdir()
        env = os.environ | {"HF_TOKEN": TOKEN, "TMPDIR": str(self.room)}
        self.process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def run(self, started: Callable[[int], None] = lambda _: None) -> int:
        """Publish once and return the exit status, which is -9 where it was killed; `started` is told the process."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        started(int(self.process.stdout.readline()))
        return int(self.process.stdout.readline())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_release(tmp_path / "head")


@pytest.fixture
def publishing(hub: Hub, folder: Path) -> Iterator[Publisher]:
    hub.tokens = {TOKEN}
    started = Publisher(folder)
    yield started
    assert started.process.stdin
    started.process.stdin.close()
    assert started.process.wait(30) == 0
    # Each run removes what killed ones left; this program ends without removing the last one's.
    assert len(list(started.room.glob("kconv-publish-*"))) == 1


def is_whole(hub: Hub, folder: Path) -> bool:
    held = hub.repos[REPO]
    files = dict(held.commits[held.tags[TAG]])
    del files[".gitattributes"]
    return files == {path.name: path.read_bytes() for path in folder.iterdir()}


def nothing_unproven_is_seen(hub: Hub, folder: Path) -> bool:
    """Say whether the tag is absent or whole, and the repository private unless it is whole."""
    held = hub.repos.get(REPO)
    if held is None or not held.tags:
        return held is None or held.private
    return is_whole(hub, folder)


def forget(hub: Hub) -> None:
    """Have the stand-in start anew."""
    hub.repos.clear()
    hub.objects.clear()


def kill_at(hub: Hub, count: int) -> Callable[[int], None]:
    """Have the process killed at its count-th call, before that is carried out."""
    left, known, process = count, threading.Event(), 0

    def before(_call) -> None:
        nonlocal left
        known.wait()
        left -= 1
        if left == 0:
            os.kill(process, signal.SIGKILL)

    def started(number: int) -> None:
        nonlocal process
        process = number
        known.set()

    hub.before = before
    return started


@pytest.mark.slow
def test_a_kill_at_any_call_leaves_nothing_unproven_and_the_next_goes_on(hub, folder, publishing):
    for count in range(1, 200):
        forget(hub)
        status = publishing.run(kill_at(hub, count))
        hub.before = lambda _: None
        assert nothing_unproven_is_seen(hub, folder), count
        if status == 0:
            break
        assert status == -signal.SIGKILL
        assert publishing.run() == 0, count
        assert is_whole(hub, folder) and not hub.repos[REPO].private, count
        assert len(hub.repos[REPO].commits) == 2, count
    assert count > 20
    assert is_whole(hub, folder)


def test_kills_at_random_moments_leave_nothing_unproven_and_the_last_goes_on(hub, folder, publishing):
    assert publishing.run() == 0  # the first one loads what the later ones find loaded
    forget(hub)
    begin = time.monotonic()
    assert publishing.run() == 0
    whole = time.monotonic() - begin
    forget(hub)
    moments = random.Random(0)

    def soon(process: int) -> None:
        time.sleep(moments.uniform(0, 0.9) * whole)
        with suppress(ProcessLookupError):  # it was quicker this time
            os.kill(process, signal.SIGKILL)

    statuses = []
    for _ in range(RANDOM_KILLS):
        statuses.append(publishing.run(soon))
        assert nothing_unproven_is_seen(hub, folder)
        if statuses[-1] == 0:
            forget(hub)
    assert -signal.SIGKILL in statuses
    assert publishing.run() == 0
    assert is_whole(hub, folder) and not hub.repos[REPO].private and len(hub.repos[REPO].commits) == 2
