"""What prometheus_client, which TensorRT-LLM counts with, shows of counters: the same as the stand-in server does."""

from __future__ import annotations

import json
import subprocess
import tempfile

import pytest
from support.loopback import K, SpecServer

from kconv.engines.trtllm import ENGINE

pytestmark = [pytest.mark.slow, pytest.mark.engine]

# As TensorRT-LLM serves its page: mount_metrics registers the multi-process collector, and labels come before values.
# https://github.com/NVIDIA/TensorRT-LLM/blob/00057725d9a6591f033e44f31c219e2426827bb7/tensorrt_llm/serve/openai_server.py
SCRIPT = """
import json, sys
from prometheus_client import CollectorRegistry, Counter, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
drafted, accepted = (
    Counter(f"trtllm_spec_decode_{what}_tokens_total", what, ["engine_type", "model_name", "token_position"])
    for what in ("drafted", "accepted")
)
def page():
    return generate_latest(registry).decode()
pages = [page()]
for place, count in enumerate([2, 1, 0]):
    drafted.labels("trtllm", "tiny", place).inc(4)
    if count:
        accepted.labels("trtllm", "tiny", place).inc(count)
json.dump([*pages, page()], sys.stdout)
"""


def test_a_counter_that_was_never_raised_is_not_shown(engine_python):
    with tempfile.TemporaryDirectory() as folder:
        shown = subprocess.run(
            [engine_python, "-c", SCRIPT],
            env={"PROMETHEUS_MULTIPROC_DIR": folder},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    fresh, counted = json.loads(shown.stdout)
    assert fresh == SpecServer("trtllm").metrics("/prometheus/metrics") == ""
    trtllm, steps = ENGINE.counters, [2, 1, 0, 0]
    assert trtllm
    found, stand_in = (
        {name: value for name, value in trtllm.read(page).totals.items() if "spec_decode" in name}
        for page in (counted, SpecServer("trtllm", steps=steps).metrics("/prometheus/metrics"))
    )
    assert found == stand_in
    counts = trtllm.count(trtllm.read(counted).totals, K, 1, 1)
    assert (counts.drafts, counts.accepted, counts.per_position) == (4.0, 3.0, (2.0, 1.0, 0.0))
