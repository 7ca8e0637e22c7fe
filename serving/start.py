"""Start an engine's server, and stop it with all its processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.schema import parse_json
from ..checkpoint.staging import heed_sigterm
from ..engines.base import HOST, Engine, Serving, Starter
from ..engines.start_server import REPORT
from ..errors import EngineFailed
from .client import Client

POLL_SECONDS = 0.5
STOP_SECONDS = 20.0
SHOWN_LINES = 20


@dataclass(frozen=True)
class Served:
    """A server that is ready.

    Attributes:
        client: for requests to it.
        log: the file with its output; deleted when it stops.
        loaded: the file in which it lists the head's parameters that no tensor filled; deleted when it stops.
    """

    client: Client
    log: Path
    loaded: Path

    def unreached(self) -> tuple[str, ...] | None:
        """Return the head's parameters that no tensor filled, by the engine's names, once it has drafted.

        None if the engine used a loader that kconv cannot watch.
        """
        return tuple(parse_json(self.loaded.read_text(encoding="utf-8"))) if self.loaded.exists() else None


def check_start(serving: Serving, engine: Engine) -> None:
    """Refuse what the engine would, before anything slow.

    Raises:
        KconvError: it cannot be started so.
    """
    if engine.starter:
        engine.starter.command(serving, 0)


@contextmanager
def serve(serving: Serving, engine: Engine) -> Iterator[Served]:
    """Start an engine, wait until it is ready, and finally stop it with all its processes.

    Raises:
        EngineFailed: kconv cannot start it; or it dies or is not ready in time, and the message ends with the
            log's last lines.
    """
    if (starter := engine.starter) is None:
        raise EngineFailed(f"kconv cannot start {engine.title}", fix="Pass the --url of a running server.")
    with (
        heed_sigterm(),
        tempfile.TemporaryDirectory(prefix=f"kconv-{engine.name}-") as folder,
        socket.socket() as reserved,
    ):
        log = Path(folder) / f"{engine.name}.log"
        # Bound but not listening: another search for a free port skips it until the engine has taken it.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((HOST, 0))
        port = reserved.getsockname()[1]
        process = _start(serving, engine.title, starter, port, log)
        try:
            client = Client(f"http://{HOST}:{port}", str(serving.target.absolute()))
            _wait(process, client, serving, engine.title, starter, log)
            yield Served(client, log, _loaded(log))
        finally:
            _stop(process)


def _start(serving: Serving, title: str, starter: Starter, port: int, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        try:
            return subprocess.Popen(
                starter.command(serving, port),
                env={**os.environ, **starter.environment(serving), REPORT: str(_loaded(log))},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                # Not the caller's folder: its files could shadow modules of the same name.
                cwd=log.parent,
                start_new_session=True,
            )
        except OSError as fault:
            raise EngineFailed(
                f"{serving.python} cannot be run: {fault.strerror}",
                fix=f"Pass the python of an environment that has {title} installed.",
            ) from fault


def _loaded(log: Path) -> Path:
    return log.with_name("unreached.json")


def _wait(
    process: subprocess.Popen[bytes], client: Client, serving: Serving, title: str, starter: Starter, log: Path
) -> None:
    deadline = time.monotonic() + serving.ready_seconds
    while not client.is_healthy():
        if process.poll() is not None:
            what = f"{title} died while it was starting (exit status {process.returncode})"
            raise _failure(what, serving, title, starter, log)
        if time.monotonic() > deadline:
            what = f"{title} was not ready after {serving.ready_seconds:.0f} s"
            raise _failure(what, serving, title, starter, log)
        time.sleep(POLL_SECONDS)


def _failure(what: str, serving: Serving, title: str, starter: Starter, log: Path) -> EngineFailed:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    # The first error is the cause; the last lines are its consequences.
    causes = [found[1] for line in lines if (found := starter.cause.match(line))]
    because = f": {causes[0]}" if causes else ""
    served = f"{serving.target} with {serving.head}" if serving.head else serving.target
    return EngineFailed(
        "\n".join([what + because, *(f"  | {line}" for line in lines[-SHOWN_LINES:])]),
        where=served,
        fix=f"Fix the {title} error above.",
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    _signal(process, signal.SIGTERM)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    finally:
        # Kill whatever is left: workers outlive a killed server, may wait out SIGTERM, and should not be left behind
        # when a user interrupts a second time.
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
