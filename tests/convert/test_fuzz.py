"""Heads changed at random, in header, config, index and manifest: refused by name or proven, and little memory."""

import json
import random
import shutil
import subprocess
import sys
import time

import pytest
from support import fuzz
from support.fuzzing import change


def run(root, examples):
    """Run the program with a seed of the moment, and return what it printed."""
    command = [sys.executable, "-m", "support.fuzz", str(root), str(time.time_ns()), str(examples)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=fuzz.__file__.removesuffix("support/fuzz.py"))
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout)


@pytest.mark.parametrize("examples", [120, pytest.param(2500, marks=[pytest.mark.slow, pytest.mark.release])])
def test_no_traceback_no_leftover_and_no_large_allocation(tmp_path, examples):
    found = run(tmp_path, examples)
    assert found["faults"] == []
    assert found["refused"] + found["taken"] == examples
    assert found["refused"] > examples // 2 and found["taken"] > examples // 100, "it both spoils and spares"
    assert found["grown"] < 32 << 20, "bytes of resident memory, beyond a warm start"


def test_an_example_is_repeated_by_its_seed(tmp_path):
    sources = fuzz.make_heads(tmp_path / "sources")
    runs = []
    for _ in range(2):
        head = tmp_path / "head"
        shutil.copytree(sources[0], head)
        change(head, random.Random("7-3"))
        runs.append({file.name: file.read_bytes() for file in head.iterdir()})
        shutil.rmtree(head)
    assert runs[0] == runs[1] != {file.name: file.read_bytes() for file in sources[0].iterdir()}
