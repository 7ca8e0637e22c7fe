"""`kconv run` as a user runs it: what it prints, its exit codes, and that no token is ever shown or written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from support.hub_routes import Reply
from support.releases import REPO, TOKEN, write_acceptance, write_inputs

from kconv.cli import main


@pytest.fixture
def recipe(tmp_path: Path, hub, monkeypatch) -> Path:
    hub.tokens = {TOKEN}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "release.yaml"
    file.write_text(yaml.safe_dump(write_inputs(tmp_path), sort_keys=False))
    return file


def kconv(*arguments):
    ran = CliRunner().invoke(main, ["run", *map(str, arguments)], catch_exceptions=False)
    assert TOKEN not in ran.output + ran.stderr
    return ran


def finish(recipe: Path) -> None:
    """Measure what the recipe asks for, by hand."""
    assert kconv(recipe, "--only", "vllm").exit_code == 0
    write_acceptance(Path("a-release/vllm"))
    Path("a-release/vllm/acceptance.json").rename("acceptance.json")


def test_it_carries_a_release_out_and_tells_each_step(recipe, hub):
    finish(recipe)
    ran = kconv(recipe, "--json")
    assert ran.exit_code == 0, ran.stderr
    told = {step["name"]: step["status"] for step in json.loads(ran.stdout)["steps"]}
    assert told.pop("vllm") == "unchanged" and set(told.values()) == {"made"}
    assert hub.repos[REPO].tags
    again = kconv(recipe)
    assert again.exit_code == 0 and "6 unchanged" in again.stdout


def test_a_dry_run_writes_nothing(recipe, hub):
    ran = kconv(recipe, "--dry-run")
    assert ran.exit_code == 0 and "waits for vllm" in ran.stdout and "free" in ran.stdout
    assert not Path("a-release").exists() and hub.served == []
    told = json.loads(kconv(recipe, "--dry-run", "--json").stdout)
    assert told["out"] == "a-release" and told["heavy"] is False
    assert [step["do"] for step in told["steps"]] == ["convert"] * 3 + ["validate", "card", "publish"]


def test_a_fault_is_told_with_what_stands_and_the_next_call_goes_on(recipe, hub):
    ran = kconv(recipe)
    assert ran.exit_code == 1 and "error:" in ran.stderr and "4 made, 1 failed, 1 not reached" in ran.stdout
    finish(recipe)
    assert "2 made" in kconv(recipe).stdout and hub.repos[REPO].tags


def test_no_token_is_in_anything_that_is_written(recipe, hub):
    finish(recipe)
    hub.fail("POST .*/tag/", Reply(403))
    assert kconv(recipe).exit_code == 1
    hub.faults.clear()
    assert kconv(recipe).exit_code == 0
    assert not [path for path in Path().rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]


def test_another_folder_and_left_out_steps(recipe, hub):
    ran = kconv(recipe, "--out", "elsewhere", "--without", "card", "--without", "publish")
    assert ran.exit_code == 0 and Path("elsewhere/report/report.json").exists() and hub.served == []


def test_a_recipes_paths_start_at_its_folder_wherever_it_is_run(recipe, hub, monkeypatch):
    finish(recipe)
    values = yaml.safe_load(recipe.read_text())
    values["steps"] |= {
        "vllm": {"do": "convert", "head": "../source", "to": "vllm"},
        "report": {"do": "validate", "head": "$vllm", "source": "../source"},
    }
    values["steps"]["card"] |= {"source": "../source", "acceptance": ["../acceptance.json"]}
    (own := recipe.parent / "recipes").mkdir()
    (own / "release.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    ran = kconv("recipes/release.yaml")
    assert ran.exit_code == 0, ran.stderr
    # What a step was told does not depend on where that was.
    monkeypatch.chdir(own)
    again = kconv("release.yaml", "--out", "../a-release")
    assert again.exit_code == 0 and "6 unchanged" in again.stdout, again.stdout
    (own / "release.yaml").write_text(yaml.safe_dump(values, sort_keys=False).replace("../source", "source"))
    monkeypatch.chdir(recipe.parent)
    ran = kconv("recipes/release.yaml", "--dry-run")
    assert ran.exit_code == 1 and "recipes/source does not exist" in ran.stderr
    assert f"Paths in a recipe start at its folder, {own}; the output of a step is $STEP." in ran.stderr


def test_a_folder_of_the_working_folder_is_no_hub_id_of_a_recipe_elsewhere(recipe, hub):
    values = yaml.safe_load(recipe.read_text())
    values["steps"]["vllm"]["head"] = "models/source"
    shutil.copytree("source", "models/source")
    (own := recipe.parent / "recipes").mkdir()
    (own / "release.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    ran = kconv("recipes/release.yaml", "--dry-run")
    assert ran.exit_code == 1 and "vllm.head: models/source is in the working folder, not in the recipe's" in ran.stderr
    assert f"start at its folder, {own};" in ran.stderr and hub.served == []


def test_a_recipe_that_is_not_there_is_named(tmp_path):
    ran = CliRunner().invoke(main, ["run", str(tmp_path / "nowhere.yaml")])
    assert ran.exit_code == 1 and f"there is no file {tmp_path / 'nowhere.yaml'}" in ran.stderr


def test_the_example_is_a_recipe_whose_plan_can_be_told(tmp_path):
    example = Path(__file__).parent.parent.parent / "examples" / "tiny-release.yaml"
    told = json.loads(kconv(example, "--out", tmp_path / "out", "--dry-run", "--json").stdout)
    kinds = {step["do"] for step in told["steps"]}
    assert kinds == {"tiny", "train", "quantize", "convert", "validate", "bench", "card", "publish"}
    assert told["heavy"] is True


def test_a_runs_own_copy_of_its_recipe_is_not_run_anew(recipe, hub, monkeypatch):
    assert kconv(recipe, "--only", "vllm").exit_code == 0
    monkeypatch.chdir("a-release")
    ran = kconv("release.yaml", "--only", "vllm")
    assert ran.exit_code == 1 and "the copy that a run keeps of its recipe" in ran.stderr
    assert not Path("a-release").exists()
    assert "1 unchanged" in kconv("release.yaml", "--only", "vllm", "--out", ".").stdout
