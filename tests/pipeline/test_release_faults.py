"""What stops a release, and what the next call makes of what is left."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from support import again
from support.published import EAGLE3
from support.releases import REPO, carry_out, changed, planned, ran, write_acceptance, write_inputs

from kconv.checkpoint.manifest import verify
from kconv.errors import (
    KconvError,
    OutputExists,
    PublishRefused,
    RecipeInvalid,
    ReleaseBusy,
    ReleaseStateInvalid,
    ReportInvalid,
)
from kconv.pipeline.recipe import parse_release
from kconv.pipeline.record import STATE, locked, read_state, write_state

KILLS = 8


def flip(weights: Path) -> None:
    data = bytearray(weights.read_bytes())
    data[-4] ^= 1
    weights.write_bytes(data)


def test_what_a_user_put_there_is_never_deleted(made, root):
    (root / "trtllm" / "notes.txt").write_text("mine")
    with pytest.raises(OutputExists, match=r"notes\.txt"):
        carry_out(made, root)
    assert (root / "trtllm" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("place", ["vllm", "."])
def test_what_no_run_made_is_refused(recipe, root, place):
    (root / place).mkdir(parents=True)
    (root / place / "mine").write_text("mine")
    if place != ".":
        (root / "release.yaml").write_text("")
    with pytest.raises(OutputExists):
        carry_out(recipe, root)
    assert (root / place / "mine").read_text() == "mine"


def test_a_failed_step_stops_the_run_and_the_next_call_goes_on(recipe, root, tmp_path):
    with pytest.raises(KconvError):
        carry_out(recipe, root, without=("publish",))  # nothing is measured yet
    state = read_state(root)
    assert {name: done.status for name, done in state.steps.items()} == {
        "vllm": "done", "trtllm": "done", "sglang": "done", "report": "done", "card": "failed",
    }  # fmt: skip
    write_acceptance(root / "vllm")
    (root / "vllm" / "acceptance.json").rename(tmp_path / "acceptance.json")
    assert ran(carry_out(recipe, root, without=("publish",))) == ["card"]
    events = [json.loads(line)["event"] for line in (root / "run.jsonl").read_text().splitlines()]
    assert events[-4:] == ["begin", "failed", "begin", "made"]


def test_a_report_with_an_error_stops_the_run_and_is_kept(made, root, tmp_path):
    other = write_inputs(tmp_path / "other")
    source = changed(made, "report", source=other["steps"]["vllm"]["head"])
    weights = tmp_path / "other" / "source" / "model.safetensors"
    flip(weights)
    with pytest.raises(ReportInvalid, match="validation found"):
        carry_out(source, root)
    assert json.loads((root / "report" / "report.json").read_text())["findings"]
    assert carry_out(made, root)["report"].status == "made"


def test_a_report_that_leaves_a_fact_open_stops_the_run_and_names_what_decides_it(root, tmp_path):
    head = EAGLE3["SafeAILab, a pickle"].write(tmp_path / "head")
    step = {"do": "validate", "head": str(head), "for": "vllm", "headers_only": True}
    recipe = {"name": "a-check", "steps": {"report": step}}
    with pytest.raises(ReportInvalid, match="1 undecided") as refused:
        carry_out(recipe, root)
    assert "`target` meta-llama/Llama-3.1-8B-Instruct" in str(refused.value)
    assert json.loads((root / "report" / "report.json").read_text())["verdicts"][0]["outcome"] == "undecided"
    with pytest.raises(ReportInvalid, match="found 1 warning"):
        carry_out(changed(recipe, "report", target_layers=32, strict=True), root)
    assert carry_out(changed(recipe, "report", target_layers=32), root)["report"].status == "made"


def test_what_a_user_put_beside_a_failed_steps_report_is_never_deleted(made, root, tmp_path):
    flip(tmp_path / "source" / "model.safetensors")
    with pytest.raises(ReportInvalid, match="validation found"):
        carry_out(made, root, only="report")
    (root / "report" / "NOTES.txt").write_text("mine")
    with pytest.raises(OutputExists, match=r"NOTES\.txt"):
        carry_out(made, root, only="report")
    assert (root / "report" / "NOTES.txt").read_text() == "mine"
    (root / "report" / "NOTES.txt").unlink()
    with pytest.raises(ReportInvalid, match="validation found"):
        carry_out(made, root, only="report")


@pytest.mark.parametrize("selection", [{"only": "card"}, {"first": "card"}, {"only": "publish"}], ids=str)
def test_a_recipe_is_not_published_with_what_another_one_made(made, root, hub, selection):
    other, calls = changed(made, "vllm", dtype="bfloat16"), len(hub.served)
    card = (root / "card" / "release.yaml").read_bytes()
    [first, *_] = planned(other, root, **selection).steps
    assert first.runs is None and "vllm" in first.why and "another recipe made it" in first.why
    with pytest.raises(ReleaseStateInvalid, match="but another recipe made it"):
        carry_out(other, root, **selection)
    assert (root / "card" / "release.yaml").read_bytes() == card and len(hub.served) == calls
    # Neither does a step pass whose own parameters stand, and whose input was made anew meanwhile.
    carry_out(other, root, only="vllm")
    with pytest.raises(ReleaseStateInvalid, match="report as made by this recipe, but another"):
        carry_out(other, root, only="card")
    assert carry_out(other, root, without=("publish", "card"))["report"].status == "made"


def test_the_gate_stands_before_the_hub(made, root, hub, tmp_path):
    calls = len(hub.served)
    higher = {**made, "min_acceptance": made["min_acceptance"] | {"at_least": 2.7}}
    with pytest.raises(PublishRefused, match="below the floor"):
        carry_out(higher, root)
    assert len(hub.served) == calls
    allowed = changed(higher, "publish", allow={"P109": "a first try"}, tag="v2")
    carry_out(allowed, root)
    assert b"a first try" in hub.repos[REPO].commits[hub.repos[REPO].tags["v2"]]["README.md"]


@pytest.mark.parametrize("limit", [200, 20_000])
def test_a_full_disk_is_named_and_the_next_call_goes_on(recipe, root, tmp_path, limit):
    """A file-size limit stands for the disk: the system refuses the write in the same way.

    Python would cut compiled modules off at it too, and later fail to load them.
    """
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    code = (
        "import resource, signal, sys; sys.dont_write_bytecode = True; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}));"
        "from kconv.cli import main; main()"
    )
    program = [sys.executable, "-c", code, "run", str(tmp_path / "recipe.yaml"), "--out", str(root), "--only", "vllm"]
    stopped = subprocess.run(program, capture_output=True, text=True)
    assert stopped.returncode == 1 and "could not be written" in stopped.stderr, stopped.stderr
    assert "Traceback" not in stopped.stderr and not (root / "vllm").exists()
    assert ran(carry_out(recipe, root, only="vllm")) == ["vllm"]


def test_kills_at_random_moments_leave_what_the_next_call_goes_on_from(made, root, tmp_path):
    whole = {path: path.read_bytes() for path in (root / "trtllm").iterdir()}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(made, sort_keys=False))
    program = [sys.executable, again.__file__, "release", str(tmp_path / "recipe.yaml"), str(root)]
    process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    moments, statuses = random.Random(0), []

    def run(after: float | None) -> int:
        process.stdin.write("go\n")
        process.stdin.flush()
        child = int(process.stdout.readline())
        if after is not None:
            time.sleep(after)
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        return int(process.stdout.readline())

    assert run(None) == 0  # the first one loads what the later ones find loaded
    for _ in range(KILLS):
        for step in ("vllm", "trtllm", "sglang", "report"):
            shutil.rmtree(root / step, ignore_errors=True)
        statuses.append(run(moments.uniform(0, 0.25)))
        for step in ("vllm", "trtllm", "sglang"):
            if (root / step).exists():
                verify(root / step)
    assert -signal.SIGKILL in statuses
    assert run(None) == 0
    process.stdin.close()
    assert process.wait(30) == 0
    assert {path: path.read_bytes() for path in (root / "trtllm").iterdir()} == whole
    assert not list(root.glob(".kconv-partial-*"))
    assert ran(carry_out(made, root)) == []


def test_two_runs_do_not_meet(recipe, root):
    with locked(root), pytest.raises(ReleaseBusy):
        (root / "release.yaml").write_text("")
        carry_out(recipe, root)


def test_a_record_that_cannot_be_read_is_named(made, root):
    (root / STATE).write_text("{")
    with pytest.raises(ReleaseStateInvalid, match=r"run\.json is not a valid run record"):
        carry_out(made, root)


def test_an_interrupted_step_is_made_again(made, root):
    state = read_state(root)
    state.steps["trtllm"] = state.steps["trtllm"].model_copy(update={"status": "running"})
    write_state(root, state)
    (root / "trtllm" / "half").write_text("what a killed run left")
    outcomes = carry_out(made, root)
    assert ran(outcomes) == ["trtllm"] and outcomes["trtllm"].why == "interrupted"
    assert not (root / "trtllm" / "half").exists()


@pytest.mark.parametrize("name", ["../escaped", "a\nrunner=evil", "a/b", "A", "x" * 41])
def test_a_release_is_called_what_a_folder_and_a_workflow_can_take(name):
    with pytest.raises(RecipeInvalid, match="name"):
        parse_release(yaml.safe_dump({"name": name, "steps": {"t": {"do": "tiny"}}}))
