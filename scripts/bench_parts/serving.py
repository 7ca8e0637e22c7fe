"""A vLLM for CPU that hands out hidden states."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from kconv.engines.base import Serving
from kconv.engines.vllm import ENGINE
from kconv.serving.start import serve
from kconv.serving.states import states_options
from kconv.targets.config import read_target_config

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class StatesServer:
    """A server: its address, its name for the target, the folder that it writes states to, and its Python."""

    url: str
    model: str
    shared: Path
    python: Path


@contextmanager
def serve_states(
    target: Path, captured: Sequence[int], max_model_len: int, options: Mapping[str, str]
) -> Iterator[StatesServer]:
    """Serve a target in fp32 by the vLLM of scripts/engine-env, and give where its states come out.

    Args:
        target: its folder.
        captured: layers, as outputs of 0-based decoder layers.
        max_model_len: context, tokens.
        options: more options of the server's command line.
    """
    given = os.environ.get("KCONV_ENGINE_PYTHON")
    made = given or subprocess.run([ROOT / "scripts" / "engine-env"], stdout=subprocess.PIPE, text=True).stdout
    python, layers = Path(made.strip()), read_target_config(target).layers
    # In memory, as on one machine it should be.
    with tempfile.TemporaryDirectory(prefix="states-", dir="/dev/shm") as shared:
        extract = states_options(captured, layers, Path(shared))
        connect = json.loads(extract["--kv-transfer-config"])
        # The CPU build has neither CUDA streams nor pinned memory; all else of the connector is vLLM's.
        connect |= {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "vllm_states_connector"}
        extract["--kv-transfer-config"] = json.dumps(connect)
        serving = Serving(python, target, options={**extract, **options}, max_model_len=max_model_len)
        path = os.pathsep.join([str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
        undo = patch.dict(os.environ, PYTHONPATH=path)
        undo.start()
        with serve(serving, ENGINE) as served:
            # What the server needs is no path of kconv's own.
            undo.stop()
            yield StatesServer(served.client.url, served.client.model, Path(shared), python)
