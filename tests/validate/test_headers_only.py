"""Headers alone of a target of Kimi-K2's real size: what it takes, and that no value is read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent.parent / "scripts" / "bench"


def measure(*arguments: str) -> dict:
    ran = subprocess.run(
        [sys.executable, BENCH, "validate", "--json", *arguments], capture_output=True, text=True, check=True
    )
    return json.loads(ran.stdout)


def test_a_target_is_checked_without_its_data():
    """Its data is a hole of 10 GB, which would be found to be zero."""
    found = measure("--size", "small", "--runs", "1")
    assert [run["code"] for run in found["runs"]] == [0] and found["target"]["tensors"] > 1000


@pytest.mark.slow
def test_kimi_k2s_own_size_takes_less_than_500_mib():
    found = measure("--runs", "1")
    assert found["target"]["tensors"] > 200_000 and found["target"]["shards"] == 100
    assert [run["code"] for run in found["runs"]] == [0]
    assert all(run["peak"] < 500 for run in found["runs"])


def test_headers_are_checked_without_torch():
    """Importing it takes as long as the headers of a Kimi-K2, and as much memory."""
    code = "import sys, kconv.validate.head, kconv.validate.target; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
