"""`kconv serve` starts vLLM itself, which drafts with the head."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kconv.engines.base import HOST
from kconv.engines.vllm import ACCEPTED, DRAFTS, ENGINE, ENVIRONMENT
from kconv.serving.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.engine]
READY_SECONDS = 300
# On a CPU vLLM computes experts in bfloat16 alone, and MLA rightly with PyTorch's rotary embedding.
ON_A_CPU = (
    "--dtype", "bfloat16", "--max-model-len", "256", "--enforce-eager",
    "--compilation-config", '{"custom_ops": ["all", "-rotary_embedding"]}',
)  # fmt: skip


def test_vllm_is_started_and_accepts_drafts(demo: Path, engine_python: Path, tmp_path: Path):
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "kconv", "serve", demo / "mla" / "vllm", "--target", demo / "target"]
    words += ["--engine-python", engine_python, "--", "--host", HOST, "--port", str(port), *ON_A_CPU]
    client = Client(f"http://{HOST}:{port}", str(demo / "target"))
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(list(map(str, words)), env=os.environ | ENVIRONMENT, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not client.is_healthy():
            assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-2000:]
            time.sleep(0.5)
        client.complete([7, 8, 9, 10], 64)
        assert ENGINE.counters
        counted = client.read_counters(ENGINE.counters).totals
    finally:
        server.terminate()
        server.wait(60)
    assert counted[DRAFTS] > 0 and counted[ACCEPTED] / counted[DRAFTS] > 0.3, counted
