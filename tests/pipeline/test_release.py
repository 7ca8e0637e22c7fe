"""A release carried out: what runs, what stands, and what is remembered."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from support.releases import REPO, carry_out, changed, ran

from kconv.checkpoint.manifest import read_manifest, verify
from kconv.errors import (
    RecipeInvalid,
    ReleaseStateInvalid,
)
from kconv.pipeline.record import read_state

STEPS = ["vllm", "trtllm", "sglang", "report", "card", "publish"]


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
    # Whoever downloads the release serves the repository, not a folder.
    card = (root / "card" / "README.md").read_text()
    assert f"# {REPO}\n" in card and f'"model": "{REPO}"' in card
    assert "kconv-partial" not in (root / "card" / "README.md").read_text()


def test_a_report_may_be_named_by_the_step_that_made_it(made, root):
    values = changed(changed(made, "card", report="$report"), "publish", tag="v2")
    assert ran(carry_out(values, root)) == ["card", "publish"]
    assert (root / "card" / "report.json").read_bytes() == (root / "report" / "report.json").read_bytes()


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
    assert ran(carry_out(changed(other, "report", **{"for": "vllm"}), root, without=("publish", "card"))) == ["report"]


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


def test_an_output_that_was_touched_is_read_again_and_one_that_was_changed_is_made_again(made, root):
    os.utime(root / "trtllm" / "config.json")
    assert ran(carry_out(made, root)) == []
    (root / "trtllm" / "config.json").write_text("{}")
    outcomes = carry_out(made, root)
    assert ran(outcomes) == ["trtllm"] and outcomes["trtllm"].why == "its output was changed"
    verify(root / "trtllm")


def test_steps_can_be_chosen(recipe, root):
    assert ran(carry_out(recipe, root, only="vllm")) == ["vllm"]
    assert ran(carry_out(recipe, root, first="sglang", without=("card", "publish"))) == ["sglang", "report"]
    assert not (root / "trtllm").exists()
    with pytest.raises(ReleaseStateInvalid, match=r"\$card, which does not exist yet"):
        carry_out(recipe, root, only="publish")
    with pytest.raises(ReleaseStateInvalid, match=r"\$card, which does not exist yet") as fault:
        carry_out(recipe, root.with_name("fresh"), only="publish")
    # The earliest step of those that lead there.
    assert "--start-at vllm;" in fault.value.fix
    with pytest.raises(RecipeInvalid, match="no step nothing"):
        carry_out(recipe, root, only="nothing")
    with pytest.raises(RecipeInvalid, match="no step pubish"):
        carry_out(recipe, root, without=("pubish",))
    with pytest.raises(RecipeInvalid, match="no step quantize"):
        carry_out(recipe, root, only="quantize")


def test_a_kind_may_be_left_out_of_a_recipe_that_has_none_of_it(recipe, root):
    del recipe["steps"]["publish"], recipe["steps"]["card"]
    assert ran(carry_out(recipe, root, without=("publish", "train"))) == ["vllm", "trtllm", "sglang", "report"]
