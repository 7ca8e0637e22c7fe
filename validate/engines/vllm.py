"""vLLM started as a witness.

The settings are those under which greedy decoding on CPU was found to be right: fp32, no compilation, and
PyTorch's own rotary embedding, as the CPU kernel turns MLA's 3-D queries wrongly:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/rotary_embedding/base.py#L298
Greedy only: at temperature 1 the CPU build's rejection sampling is no witness.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ...checkpoint.folder import read_json
from ...errors import EngineFailed
from .client import Client

HOST = "127.0.0.1"
POLL_SECONDS = 0.5
STOP_SECONDS = 20.0
SHOWN_LINES = 20
# The last line of a traceback, bare or behind vLLM's "(Worker pid=7) ERROR 11-20 13:57:45 [core.py:953] ".
CAUSE = re.compile(r"(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?(?:\[rank\d+\]: )?([A-Za-z_.]*(?:Error|Exception): .+)")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True)
class Serving:
    """What vLLM shall serve.

    Attributes:
        python: the interpreter of an environment that holds vLLM (see scripts/engine-env).
        target: the target's folder.
        head: the draft head's folder; None to serve without speculation.
        draft_tokens: tokens drafted per verify step (K).
        dtype: of the weights in memory, target's and head's.
        max_model_len: context, tokens.
        ready_seconds: how long it may take to be ready.
        options: further options of its command line, by name.
    """

    python: Path
    target: Path
    head: Path | None = None
    draft_tokens: int = 3
    dtype: str = "float32"
    max_model_len: int = 256
    ready_seconds: float = 300.0
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Served:
    """A vLLM that is ready.

    Attributes:
        client: to speak with it.
        log: the file that its output goes to; gone when it is stopped.
    """

    client: Client
    log: Path


@contextmanager
def serve(serving: Serving) -> Iterator[Served]:
    """Start vLLM, wait until it is ready, and stop it with all its processes in the end.

    Raises:
        EngineFailed: it dies or is not ready in time; the message ends with the log's last lines.
    """
    with _heed_sigterm(), tempfile.TemporaryDirectory(prefix="kconv-vllm-") as folder, socket.socket() as reserved:
        log = Path(folder) / "vllm.log"
        # Bound, not listening: another search for a free port passes over it until vLLM has taken it.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((HOST, 0))
        port = reserved.getsockname()[1]
        process = _start(serving, port, log)
        try:
            client = Client(f"http://{HOST}:{port}", str(serving.target.absolute()))
            _wait(process, client, serving, log)
            yield Served(client, log)
        finally:
            _stop(process)


def command(serving: Serving, port: int) -> list[str]:
    """Return vLLM's command line; `vllm serve` itself wants a distribution named vllm, which vllm-cpu is not."""
    options = {
        "--model": str(serving.target.absolute()),
        "--host": HOST,
        "--port": str(port),
        "--dtype": serving.dtype,
        "--max-model-len": str(serving.max_model_len),
        "--compilation-config": json.dumps({"custom_ops": ["all", "-rotary_embedding"]}),
    }
    if serving.head:
        options["--speculative-config"] = json.dumps(
            {"model": str(serving.head.absolute()), "method": "eagle3", "num_speculative_tokens": serving.draft_tokens}
        )
    words = [word for option in (options | dict(serving.options)).items() for word in option]
    # Not resolved: the link in its environment's folder is what makes it that environment's python.
    return [str(serving.python.absolute()), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *words]


def environment(serving: Serving) -> dict[str, str]:
    """Return the variables that are set for vLLM beside the caller's own.

    The CPU build has no KV block size that MLA (16) and other attention (multiples of 32) share, so where the two
    meet the target's MLA is computed as plain attention:
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/attention/backends/mla/cpu_mla.py#L67 and
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/attention/backends/cpu_attn.py#L65
    """
    mixed = serving.head is not None and _has_mla(serving.target) and not _has_mla(serving.head)
    return ENVIRONMENT | ({"VLLM_MLA_DISABLE": "1"} if mixed else {})


def _start(serving: Serving, port: int, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        try:
            return subprocess.Popen(
                command(serving, port),
                env=os.environ | environment(serving),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                # Not the caller's folder, whose files would shadow modules of the same name.
                cwd=log.parent,
                start_new_session=True,
            )
        except OSError as fault:
            raise EngineFailed(
                f"{serving.python} cannot be run: {fault.strerror}",
                fix="Give the python of an environment with vLLM in it.",
            ) from fault


def _has_mla(folder: Path) -> bool:
    config = read_json(folder / "config.json")
    return bool(config.get("text_config", config).get("kv_lora_rank"))


def _wait(process: subprocess.Popen[bytes], client: Client, serving: Serving, log: Path) -> None:
    deadline = time.monotonic() + serving.ready_seconds
    while not client.is_healthy():
        if process.poll() is not None:
            raise _failure(f"vLLM died while it was starting (exit status {process.returncode})", serving, log)
        if time.monotonic() > deadline:
            raise _failure(f"vLLM was not ready after {serving.ready_seconds:.0f} s", serving, log)
        time.sleep(POLL_SECONDS)


def _failure(what: str, serving: Serving, log: Path) -> EngineFailed:
    lines = log.read_text(errors="replace").splitlines()
    # The first error is the cause; the last lines speak of what it entailed.
    causes = [found[1] for line in lines if (found := CAUSE.match(line))]
    because = f": {causes[0]}" if causes else ""
    served = f"{serving.target} with {serving.head}" if serving.head else serving.target
    return EngineFailed(
        "\n".join([what + because, *(f"  | {line}" for line in lines[-SHOWN_LINES:])]),
        where=served,
        fix="Put right what vLLM complains about.",
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    _signal(process, signal.SIGTERM)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    finally:
        # Whatever is left: workers outlive a server that was killed, SIGTERM may be waited out, and a user who
        # interrupts a second time is not to be left with half of it.
        _signal(process, signal.SIGKILL)
        process.wait()


@contextmanager
def _heed_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process as Ctrl-C does, through what there is to stop; by default it just dies."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
