"""Memory that does not grow with the checkpoint, and the same bytes after kills, on Kimi-K2's own expert shapes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent.parent / "scripts" / "bench"


@pytest.mark.slow
def test_the_peak_of_a_rank_is_the_same_for_half_the_checkpoint_and_below_two_gib(tmp_path):
    command = [sys.executable, str(BENCH), "quantize", "--gb", "0.8", "--pairs", "1", "--dir", str(tmp_path), "--json"]
    facts = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    one, half, whole = *facts["pairs"][0], facts["cold"]
    assert whole["gb"] > 1.9 * half["gb"] > 0.7
    assert max(run["peak"] for run in (one, half, whole)) < 2048
    assert abs(whole["peak"] - half["peak"]) < 48
    assert facts["killed"] >= 1  # the script compares the bytes
    assert list(tmp_path.iterdir()) == []
