"""A release carried out: what runs, what stands, what is remembered, and what stops it."""

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
from typing import Any

import pytest
import yaml
from support import releaser
from support.releases import write_acceptance
from support.releasing import REPO, TOKEN, carry_out, changed, write_inputs

from kconv.checkpoint.manifest import read_manifest, verify
from kconv.errors import (
    KconvError,
    OutputExists,
    OutputFailed,
    PublishRefused,
    RecipeInvalid,
    ReleaseBusy,
    ReleaseStateInvalid,
    ReportInvalid,
)
from kconv.pipeline.preview import check_disk, preview_release
from kconv.pipeline.recipe import parse_release
from kconv.pipeline.release import Selection
from kconv.pipeline.state import STATE, locked, read_state, write_state
from kconv.pipeline.steps import STEPS as STEP_FUNCTIONS

KILLS = 8
STEPS = ["vllm", "trtllm", "sglang", "report", "card", "publish"]


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    return write_inputs(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def token(hub, monkeypatch):
    hub.tokens = {TOKEN}
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.fixture
def made(recipe, root, tmp_path, token) -> dict[str, Any]:
    """Carry a release out, and return its recipe."""
    carry_out(recipe, root, only="vllm")
    write_acceptance(root / "vllm")
    (root / "vllm" / "acceptance.json").rename(tmp_path / "acceptance.json")
    carry_out(recipe, root)
    return recipe


def ran(outcomes) -> list[str]:
    return [name for name, one in outcomes.items() if one.status == "made"]


def planned(values: dict[str, Any], root: Path, **selection: Any):
    text = yaml.safe_dump(values, sort_keys=False)
    return preview_release(parse_release(text), text, root, Selection(**selection))


def test_it_is_made_from_end_to_end(made, root, hub):
    for layout in ("vllm", "trtllm", "sglang"):
        assert verify(root / layout).layout == layout
    published = hub.repos[REPO].commits[hub.repos[REPO].tags["v1"]]
    names = {"model.safetensors", "config.json", "kconv.json", "README.md", "LICENSE", "report.json", "release.yaml"}
    assert names <= published.keys()
    assert published["release.yaml"] == (root / "release.yaml").read_bytes()
    assert json.loads((root / "publish" / "published.json").read_text())["tag"] == "v1"


def test_steps_are_recorded_by_names_that_hold_elsewhere_too(made, root):
    assert read_manifest(root / "trtllm").source == "out/vllm"
    assert json.loads((root / "report" / "report.json").read_text())["subject"] == "out/vllm"
    assert (root / "card" / "README.md").read_text().count("a-release") > 0
    assert "kconv-partial" not in (root / "card" / "README.md").read_text()


def test_a_second_call_does_nothing(made, root, hub):
    before, calls = read_state(root), len(hub.served)
    outcomes = carry_out(made, root)
    assert ran(outcomes) == [] and {one.status for one in outcomes.values()} == {"unchanged"}
    assert read_state(root) == before and len(hub.served) == calls


@pytest.mark.parametrize("gone", STEPS)
def test_a_deleted_output_is_made_again_and_what_comes_out_the_same_is_left_alone(made, root, hub, gone):
    shutil.rmtree(root / gone)
    commits = len(hub.repos[REPO].commits)
    outcomes = carry_out(made, root)
    # The same bytes come out again, so nothing that reads them has to be made again.
    assert ran(outcomes) == [gone]
    assert outcomes[gone].why == "its output is gone"
    assert len(hub.repos[REPO].commits) == commits


def test_a_changed_parameter_reaches_what_depends_on_it_and_nothing_else(made, root):
    other = changed(made, "vllm", dtype="bfloat16")
    assert ran(carry_out(other, root, without=("publish", "card"))) == ["vllm", "trtllm", "sglang", "report"]
    assert ran(carry_out(changed(other, "report", engines="vllm"), root, without=("publish", "card"))) == ["report"]


def test_a_changed_source_is_seen_by_its_bytes_not_by_its_date(made, root, tmp_path):
    os.utime(tmp_path / "source" / "model.safetensors")
    assert ran(carry_out(made, root, without=("publish",))) == []
    config = tmp_path / "source" / "config.json"
    config.write_text(config.read_text() + "\n")
    assert "vllm" in ran(carry_out(made, root, without=("publish", "card")))


def test_a_recipe_may_start_from_a_hub_id_at_the_commit_that_it_is_on(recipe, root, hub, tmp_path):
    sha = hub.commit("org/source", tmp_path / "source")
    values = changed(recipe, "vllm", head="org/source")
    assert ran(carry_out(values, root, only="vllm")) == ["vllm"]
    assert read_manifest(root / "vllm").source == f"org/source@{sha}"
    assert ran(carry_out(values, root, only="vllm")) == []
    (tmp_path / "source" / "note.json").write_text("{}")
    later = hub.commit("org/source", tmp_path / "source")
    assert ran(carry_out(values, root, only="vllm")) == ["vllm"]
    assert read_manifest(root / "vllm").source == f"org/source@{later}"


def test_a_preview_of_what_was_never_made_reads_no_weights(recipe, root, monkeypatch):
    monkeypatch.setattr("kconv.pipeline.state.file_digest", lambda file: pytest.fail(f"{file} was read"))
    assert planned(recipe, root).steps[0].runs


def test_an_output_that_was_touched_is_read_again_and_one_that_was_changed_is_made_again(made, root):
    os.utime(root / "trtllm" / "config.json")
    assert ran(carry_out(made, root)) == []
    (root / "trtllm" / "config.json").write_text("{}")
    outcomes = carry_out(made, root)
    assert ran(outcomes) == ["trtllm"] and outcomes["trtllm"].why == "its output was changed"
    verify(root / "trtllm")


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
        carry_out(recipe, root, without=("publish",))  # there is no acceptance.json yet
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
    data = bytearray(weights.read_bytes())
    data[-4] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ReportInvalid, match="validation found"):
        carry_out(source, root)
    assert json.loads((root / "report" / "report.json").read_text())["findings"]
    assert carry_out(made, root)["report"].status == "made"


def test_the_gate_stands_before_the_hub(made, root, hub, tmp_path):
    calls = len(hub.served)
    higher = {**made, "min_acceptance": made["min_acceptance"] | {"at_least": 2.7}}
    with pytest.raises(PublishRefused, match="below the floor"):
        carry_out(higher, root)
    assert len(hub.served) == calls
    allowed = changed(higher, "publish", allow=[{"rule": "P109", "why": "a first try"}], tag="v2")
    carry_out(allowed, root)
    assert b"a first try" in hub.repos[REPO].commits[hub.repos[REPO].tags["v2"]]["README.md"]


def test_steps_can_be_chosen(recipe, root):
    assert ran(carry_out(recipe, root, only="vllm")) == ["vllm"]
    assert ran(carry_out(recipe, root, first="sglang", without=("card", "publish"))) == ["sglang", "report"]
    assert not (root / "trtllm").exists()
    with pytest.raises(ReleaseStateInvalid, match="not made yet"):
        carry_out(recipe, root, only="publish")
    with pytest.raises(RecipeInvalid, match="no step nothing"):
        carry_out(recipe, root, only="nothing")


def test_a_preview_writes_nothing_and_tells_sizes_disk_and_licences(recipe, root):
    del recipe["facts"]["licence"]
    plan = planned(recipe, root)
    assert not root.exists()
    by_name = {step.name: step for step in plan.steps}
    assert by_name["vllm"].runs is True and by_name["trtllm"].runs is None and by_name["trtllm"].why == "waits for vllm"
    assert not plan.whole and not plan.heavy and [finding.rule for finding in plan.findings] == ["L2"]
    carry_out(recipe, root, only="vllm")
    weights = (root / "vllm" / "model.safetensors").stat().st_size
    assert 0 < by_name["vllm"].size <= weights <= by_name["vllm"].size + 10_000
    assert next(step for step in planned(recipe, root).steps if step.name == "vllm").runs is False


def test_a_licence_whose_text_is_not_at_hand_is_said_before_anything_is_made(recipe, root, tmp_path):
    carry_out(recipe, root, only="vllm")
    carry_out(recipe, root, only="report")
    (tmp_path / "acceptance.json").write_text("{}")
    (tmp_path / "source" / "LICENSE").unlink()
    assert "L1" in [finding.rule for finding in planned(recipe, root, only="card").findings]


def test_a_disk_that_is_too_small_is_said_before_anything_is_made(recipe, root, monkeypatch):
    monkeypatch.setattr("kconv.pipeline.preview.free_bytes", lambda _: 1000)
    with pytest.raises(OutputFailed, match="are free"):
        check_disk(planned(recipe, root), root)


@pytest.mark.parametrize("limit", [200, 20_000])
def test_a_full_disk_is_named_and_the_next_call_goes_on(recipe, root, tmp_path, limit):
    """A file-size limit stands for the disk: the system refuses the write in the same way."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
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
    program = [sys.executable, releaser.__file__, str(tmp_path / "recipe.yaml"), str(root)]
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
    with pytest.raises(ReleaseStateInvalid, match="cannot be read"):
        carry_out(made, root)


def test_an_interrupted_step_is_made_again(made, root):
    state = read_state(root)
    state.steps["trtllm"].status = "running"
    write_state(root, state)
    (root / "trtllm" / "half").write_text("what a killed run left")
    outcomes = carry_out(made, root)
    assert ran(outcomes) == ["trtllm"] and outcomes["trtllm"].why == "interrupted"
    assert not (root / "trtllm" / "half").exists()


def test_the_documentation_lists_every_kind_and_key():
    page = (Path(__file__).parent.parent.parent / "docs" / "release.md").read_text()
    for kind in STEP_FUNCTIONS:
        fields = {name: field for name, field in kind.model_fields.items() if name != "do"}
        keys = ", ".join(f"**{name}**" if field.is_required() else name for name, field in fields.items())
        assert kind.model_fields["do"].annotation.__args__ == (kind.__name__.lower(),)
        assert f"| `{kind.__name__.lower()}` | {keys} |" in page


BAD = {
    "a key that does not exist": {"steps": {"a": {"do": "convert", "head": "x", "layout": "vllm", "speed": 1}}},
    "a kind that does not exist": {"steps": {"a": {"do": "deploy"}}},
    "no kind": {"steps": {"a": {"head": "x"}}},
    "a layout that does not exist": {"steps": {"a": {"do": "convert", "head": "x", "layout": "gguf"}}},
    "a step that comes later": {
        "steps": {
            "a": {"do": "convert", "head": "$b", "layout": "vllm"},
            "b": {"do": "convert", "head": "x", "layout": "vllm"},
        }
    },
    "itself": {"steps": {"a": {"do": "convert", "head": "$a", "layout": "vllm"}}},
    "a way out of the folder": {
        "steps": {
            "a": {"do": "convert", "head": "x", "layout": "vllm"},
            "b": {"do": "convert", "head": "$a/../../x", "layout": "vllm"},
        }
    },
    "a name that is a path": {"steps": {"../a": {"do": "convert", "head": "x", "layout": "vllm"}}},
    "a name that is the run's": {"steps": {"run.json": {"do": "convert", "head": "x", "layout": "vllm"}}},
    "no steps": {"steps": {}},
    "a floor without a suite": {
        "min_acceptance": {"metric": "al_incl_bonus", "at_least": 2, "max_loss": 0},
        "steps": {"a": {"do": "convert", "head": "x", "layout": "vllm"}},
    },
    "a repository that is none": {"steps": {"a": {"do": "publish", "folder": "x", "repo": "head"}}},
    "a reason that is empty": {
        "steps": {"a": {"do": "publish", "folder": "x", "repo": "o/r", "allow": [{"rule": "P109", "why": ""}]}}
    },
    "nothing to train on": {"steps": {"a": {"do": "train", "target": "x", "recipe": "eagle3-mla"}}},
    "nothing to measure with": {"steps": {"a": {"do": "bench", "head": "x", "suite": "mt-bench"}}},
    "a fact that does not exist": {"facts": {"colour": "blue"}, "steps": {"a": {"do": "tiny"}}},
}  # fmt: skip


@pytest.mark.parametrize("values", BAD.values(), ids=BAD)
def test_a_recipe_that_cannot_be_is_refused(values):
    with pytest.raises(RecipeInvalid):
        parse_release(yaml.safe_dump({"name": "x"} | values))


@pytest.mark.parametrize("text", ["", "- a", "a: [", "name: x"])
def test_what_is_no_recipe_is_refused(text):
    with pytest.raises(RecipeInvalid):
        parse_release(text)
