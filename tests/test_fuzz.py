"""A small part of what scripts/fuzz does; heads have their own in tests/convert."""

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.fuzzing import Hung, bounded

TESTS = Path(__file__).parent
LOADER = importlib.machinery.SourceFileLoader("fuzz_script", str(TESTS.parent / "scripts" / "fuzz"))
SCRIPT = importlib.util.module_from_spec(importlib.util.spec_from_loader("fuzz_script", LOADER))
LOADER.exec_module(SCRIPT)


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("part, examples", [("evidence", 150), ("hub", 60)])
def test_what_was_changed_at_random_is_refused_by_name_or_taken_whole(tmp_path, part, examples):
    command = [sys.executable, "-m", SCRIPT.PARTS[part][1], str(tmp_path / part), str(time.time_ns()), str(examples)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=TESTS)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["faults"] == []
    assert found["refused"] + found["taken"] == examples and found["refused"] > examples // 4 and found["taken"] > 0
    assert found["grown"] < 256 << 20
    assert [path.name for path in tmp_path.iterdir()] == [part]


def test_the_page_has_a_row_of_each_part_that_a_whole_run_has():
    page = SCRIPT.PAGE.read_text().partition(SCRIPT.BEGIN)[2].partition(SCRIPT.END)[0]
    for what, _, _ in SCRIPT.PARTS.values():
        [row] = [line for line in page.splitlines() if line.startswith(f"| {what} |")]
        tried, refused, taken, failed = (int(cell.replace(",", "")) for cell in row.split("|")[2:6])
        assert tried == refused + taken + failed


def test_a_hang_is_told_from_a_slow_machine(monkeypatch):
    with pytest.raises(Hung, match="waited"), bounded(cpu=30, wall=0.2):
        time.sleep(30)
    with pytest.raises(Hung, match="processor"), bounded(cpu=0.2, wall=30):
        while True:
            pass
    # What computes is let compute, however often the wall clock rings.
    monkeypatch.setattr("support.fuzzing.TURN", 1e-6)
    with bounded(cpu=30, wall=0.2):
        begun = time.thread_time()
        while time.thread_time() - begun < 0.8:
            pass
