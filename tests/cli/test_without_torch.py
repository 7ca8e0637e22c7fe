"""What works on files works where torch, ModelOpt and transformers cannot be imported, and writes the same bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.heads import GQA, MLA, random_slots, write_head

from kconv.engines import BY_NAME

# None in sys.modules makes an import fail (https://docs.python.org/3/library/sys.html#sys.modules).
PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(sys.argv.pop(1).split()))
from kconv.cli import main
main()
"""


def run(refused: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM, refused, *arguments], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [GQA, MLA], ids=["gqa", "mla"])
def test_a_head_is_inspected_checked_converted_and_verified_without_torch(tmp_path, spec):
    source = write_head(tmp_path / "source", BY_NAME["vllm"], spec, random_slots(spec))
    bare, full = tmp_path / "bare", tmp_path / "full"
    for refused, out in (("torch modelopt transformers", bare), ("", full)):
        ran = run(refused, "to-sglang", source, out)
        assert ran.returncode == 0, ran.stderr
    assert (bare / "model.safetensors").read_bytes() == (full / "model.safetensors").read_bytes()
    for step in (("inspect", source), ("validate", source, "--for", "vllm"), ("verify", bare), ("diff", source, bare)):
        without, with_all = run("torch modelopt transformers", *step), run("", *step)
        assert without.returncode == with_all.returncode and "Traceback" not in without.stderr
        assert without.stdout == with_all.stdout
