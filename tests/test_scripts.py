"""The scripts that measure: that they start, say what they cannot do here, and keep to their place in the page."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from bench_parts import page
from bench_parts.quantize_head import report
from gpu_check_parts.bench import Bench
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"
PAGE = ROOT / "docs" / "evidence" / "benchmarks.md"
MARKER = re.compile(r"^<!-- bench-([a-z-]+): (begin|end) -->$", re.MULTILINE)


def load(name: str) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(name.replace("-", "_"), str(SCRIPTS / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module


bench, gpu_check = load("bench"), load("gpu-check")


def run(name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPTS / name), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
    )


@pytest.mark.parametrize("program", ["bench", "gpu-check", *sorted(bench.PARTS)])
def test_it_says_what_it_does(program, monkeypatch, capsys):
    known = {"bench": bench, "gpu-check": gpu_check}
    part = known.get(program) or importlib.import_module(f"bench_parts.{program}")
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    with pytest.raises(SystemExit) as ended:
        part.main()
    name = program if program in known else f"bench {program}"
    assert ended.value.code == 0 and f"scripts/{name.replace('_', '-')}" in capsys.readouterr().out


def test_a_part_is_run_by_its_name():
    ran = run("bench", "before", "--help")
    assert ran.returncode == 0 and "scripts/bench before" in ran.stdout


@pytest.mark.parametrize("name", ["bench", "gpu-check"])
def test_it_can_be_started(name):
    assert os.access(SCRIPTS / name, os.X_OK)


def test_each_benchmark_of_its_own_is_run_by_the_one_command():
    # Other pages have what these others find; of another checkout only whoever has one knows.
    others = {"attention", "before", "decoder", "faults", "readings"}
    assert {name.replace("-", "_") for name in bench.PROGRAMS} == bench.PARTS - others
    assert set(page.ORDER) == set(bench.PROGRAMS) | set(bench.OWN)


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    out = tmp_path / "found.json"
    # Hidden, so that this says the same on a machine that has one.
    ran = run("gpu-check", "--out", str(out), CUDA_VISIBLE_DEVICES="")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("no GPU") and not out.exists()


@pytest.mark.slow
def test_each_check_runs_at_tiny_dims():
    ran = run("gpu-check", "--rehearse")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [line.split()[0] for line in ran.stdout.splitlines()[1:-1] if " {" in line] == list(gpu_check.CHECKS)


def test_a_fault_is_recorded_and_the_other_checks_go_on(monkeypatch, tmp_path, capsys):
    def broken(_: object) -> dict:
        raise ValueError("two devices")

    out = tmp_path / "found.json"
    checks = {
        "first": broken,
        "second": lambda _: {"inner": gpu_check.part(lambda: broken(None))},
        "third": lambda _: {},
    }
    monkeypatch.setattr(gpu_check, "CHECKS", checks)
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "clear", lambda: None)
    monkeypatch.setattr(gpu_check, "describe", lambda _: {"processors": 2, "libraries": {}})
    size = gpu_check.SIZES["cpu"]
    monkeypatch.setattr(gpu_check, "measure_ceilings", lambda *_: Bench(torch.device("cpu"), size, 1e12, 1e9))
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        gpu_check.main()
    assert ended.value.code == 1
    found = json.loads(out.read_text())["checks"]
    assert list(found) == ["first", "second", "third"]
    assert found["first"]["fault"] == found["second"]["inner"]["fault"] == "ValueError: two devices"
    assert "fault" not in found["third"]
    assert capsys.readouterr().out.count("fault: ") == 2


def test_wrong_bits_on_the_card_are_a_fault(monkeypatch):
    """A packer that rounds one value otherwise must not pass as equal."""
    from kconv.quantize import pack as packing

    exact, calls = packing.pack, []

    def other(weight: torch.Tensor, scale: float) -> packing.Packed:
        found = exact(weight, scale)
        calls.append(found)
        if len(calls) == 1:
            found.weight[0, 0] ^= 1
        return found

    monkeypatch.setattr(packing, "pack", other)
    ran = gpu_check.check_packing
    small = Bench(torch.device("cpu"), gpu_check.SIZES["cpu"], 1e12, 1e9)
    with pytest.raises(AssertionError, match="not those of the CPU"):
        ran(small)


def test_what_the_card_found_stands_in_the_page(monkeypatch, tmp_path):
    found = {
        "made": "2026-01-02T03:04:05+00:00",
        "machine": {
            "name": "NVIDIA X",
            "memory_gib": 9.5,
            "processors": 3,
            "libraries": {"torch": "2.0", "numpy": None},
        },
        "ceilings": {"bf16_tflop_per_second": 780.5, "copy_gb_per_second": 4300},
        "checks": {
            "packing": {"seconds": 1.5, "bfloat16": {"share_of_bandwidth": 0.25}, "peak_gib": None},
            "training": {"tokens_per_second": 12345, "look": {"fault": "RuntimeError: two devices"}},
        },
    }
    monkeypatch.setattr(bench, "GPU", tmp_path / "gpu-check.json")
    assert "Not measured yet" in bench.include_gpu(False)[2]
    bench.GPU.write_text(json.dumps(found))
    text = "\n".join(bench.include_gpu(False))
    assert "NVIDIA X, 9.5 GiB" in text and "780.5 TFLOP/s" in text and "numpy" not in text
    assert "| packing: bfloat16, share of bandwidth | 0.25 |" in text
    assert "| training: tokens per second | 12,345 |" in text
    assert "| training: look, fault | RuntimeError: two devices |" in text and "None" not in text


def test_what_quantized_heads_keep_is_laid_out_and_what_is_refused_of_it_named():
    def figures(kept: float) -> dict[str, float]:
        about = {"hidden": 128, "parameters": 279040, "rows": 44160, "steps": 3, "context": 96}
        return about | {"positions": 8832, "sequences": 96, "before": 2.8164, "kept": kept, "kept_error": 0.0009}

    found = {"GQA, demo": {"fp8": figures(0.99651), "nvfp4": figures(0.94542)}}
    text = "\n".join(report(found))
    assert "\n| GQA, demo | 128 | 279,040 | 2.816 | 99.65 ± 0.09 | 94.54 ± 0.09 |\n" in text
    assert "44,160 rows" in text and "8,832 positions of 96 held-out texts of 96 tokens" in text
    assert "less than 97% (`--min-retention`); of these: GQA, demo in NVFP4." in text
    found["GQA, demo"]["nvfp4"] = figures(0.98)
    assert "of these: none." in "\n".join(report(found))


def check_markers(text: str) -> list[str]:
    """Return the sections in order; each begins and ends once, and none stands within another."""
    marks = MARKER.findall(text)
    names = [name for name, kind in marks if kind == "begin"]
    assert marks == [(name, kind) for name in names for kind in ("begin", "end")]
    assert len(set(names)) == len(names)
    assert text.count("<!-- bench-") == len(marks)
    return names


def test_the_pages_sections_are_well_formed():
    names = check_markers(PAGE.read_text())
    assert names and set(names) <= set(page.ORDER)


@given(st.lists(st.sampled_from(page.ORDER), max_size=12))
def test_a_section_is_put_in_its_place_and_leaves_the_others_alone(names):
    text = "# Benchmarks\n\nWords.\n"
    latest = {}
    for turn, name in enumerate(names):
        latest[name] = [f"## {name} {turn}", "", "| a |"]
        text = page.put(text, name, latest[name])
    assert check_markers(text) == [name for name in page.ORDER if name in latest]
    assert text.startswith("# Benchmarks\n\nWords.\n")
    assert all("\n".join(lines) in text for lines in latest.values())
    assert text.count("\n## ") == len(latest)
