"""`kconv quantize` as it is typed: what it prints, what it refuses, and the ranks of torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.quantized_targets import make_form

from kconv.cli import main

KCONV = Path(sys.executable).parent / "kconv"


@pytest.fixture(scope="module")
def target(tiny_target, tmp_path_factory):
    return make_form(tiny_target, tmp_path_factory.mktemp("int4") / "target", "int4", shards=2)


def run(*words):
    return CliRunner().invoke(main, ["quantize", *map(str, words)])


def test_it_quantizes_and_what_it_says_next_holds(target, tmp_path):
    out = tmp_path / "out"
    done = run(target, out, "--recipe", "nvfp4-experts", "--input-scale", "data-free", "--jobs", 1)
    assert done.exit_code == 0, done.output
    assert "72 modules in NVFP4 (nvfp4-experts)" in done.stdout
    assert "input_scale: data-free: every input_scale is 1.0" in done.stdout
    checked = CliRunner().invoke(main, ["verify", str(out), str(target)])
    assert checked.exit_code == 0 and "match the manifest (source and output)" in checked.stdout
    shown = CliRunner().invoke(main, ["validate", str(out), "--for", "sglang"]).stdout
    assert "checked as a target, not as a draft head, for sglang (as requested)" in shown
    validated = CliRunner().invoke(main, ["validate", str(out), "--source", str(target), "--json"])
    report = json.loads(validated.stdout)
    assert not [f for f in report["findings"] if f["severity"] == "error"], validated.stdout
    assert validated.exit_code == 0 and report["figures"]["noise"]["tensors"] == 72


def test_a_dry_run_says_what_becomes_what_and_writes_nothing(target, tmp_path):
    said = run(target, tmp_path / "out", "--recipe", "nvfp4-mlp", "--input-scale", "data-free", "--dry-run")
    assert said.exit_code == 0, said.output
    for phrase in ("routed experts", "NVFP4 from int4", "unchanged", "needed", "free", "time: about"):
        assert phrase in said.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_as_json_adds_up(target, tmp_path):
    words = ("--recipe", "nvfp4-mlp", "--input-scale", "data-free", "--dry-run", "--json")
    said = json.loads(run(target, tmp_path / "out", *words).stdout)
    assert said["form"] == "int4"
    assert sum(row["bytes_in"] for row in said["becomes"]) == said["bytes_in"]
    assert sum(row["bytes_out"] for row in said["becomes"]) == said["bytes_out"]
    assert sum(row["tensors"] for row in said["becomes"] if "NVFP4" in row["action"]) == said["modules"] == 93
    assert said["disk"]["needed"] > said["bytes_out"] and said["estimate"]["seconds"] > 0


def test_the_input_scales_origin_must_be_said(target, tmp_path):
    refused = run(target, tmp_path / "out", "--recipe", "nvfp4")
    assert refused.exit_code == 2 and "--input-scale is required" in refused.output
    without_use = run(target, tmp_path / "out", "--recipe", "nvfp4-weight-only", "--input-scale", "data-free")
    assert without_use.exit_code == 2 and "has no effect" in without_use.output


def test_an_output_that_is_there_is_refused(target, tmp_path):
    refused = run(target, tmp_path, "--recipe", "nvfp4", "--input-scale", "data-free")
    assert refused.exit_code == 1 and "already exists" in refused.output


@pytest.mark.slow
def test_torchrun_shares_the_work(target, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    words = [
        str(KCONV),
        "quantize",
        str(target),
        str(tmp_path / "out"),
        "--recipe",
        "nvfp4",
        "--input-scale",
        "data-free",
    ]
    done = subprocess.run(launcher + words, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert CliRunner().invoke(main, ["verify", str(tmp_path / "out"), str(target)]).exit_code == 0
