"""`kconv demo --real`, whole: a head for a real language model, in both engines, and the model in NVFP4."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kconv.bench.acceptance import read_acceptance

pytestmark = [pytest.mark.slow, pytest.mark.release, pytest.mark.engine]


def test_the_real_demo_trains_a_head_that_both_engines_draft_with_as_kconv_does(engine_python, sglang_python, tmp_path):
    pythons = {"KCONV_ENGINE_PYTHON": str(engine_python), "KCONV_SGLANG_PYTHON": str(sglang_python)}
    out = tmp_path / "real"

    def demo() -> str:
        words = [sys.executable, "-m", "kconv", "demo", out, "--real"]
        done = subprocess.run(words, env=os.environ | pythons, stdout=subprocess.PIPE, text=True)
        assert done.returncode == 0, done.stdout
        return done.stdout

    said = demo()
    summary = said[said.index("| drafter |") :]
    assert "In each run of a head (2) the engine's counts, in each category and at each place" in summary
    assert "Tensors that differ from ModelOpt's own export: 0 of 902." in summary
    report = json.loads((out / "gqa" / "modelopt" / "training.json").read_text())
    assert report["trained"]["acceptance"] > 1.2 > 1.05 > report["untrained"]["acceptance"]
    # Both counted the same drafts, of a head that has learned more than to repeat the commonest pairs.
    [vllm, sglang] = (read_acceptance(out / f"{engine}-gqa-k3.json").rows[-1] for engine in ("vllm", "sglang"))
    assert vllm.value == sglang.value > 1.2
    card = Path(summary.splitlines()[-1].removeprefix("the card: "))
    assert "license: apache-2.0" in card.read_text()
    # What lies there is not made again.
    times = {file: file.stat().st_mtime_ns for file in out.rglob("*") if file.is_file()}
    assert demo().endswith(summary)
    assert times == {file: file.stat().st_mtime_ns for file in out.rglob("*") if file.is_file()}
