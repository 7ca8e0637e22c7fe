"""`kconv publish` as a user runs it: what it prints, its exit codes, and that no token is ever shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from support.hub_routes import Reply, refusal
from support.releases import FLOOR, SUITE, write_acceptance, write_release, write_report

from kconv.cli import main

TOKEN, REPO = "hf_aVerySecretTokenOfNobody", "org/head"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_release(tmp_path / "head")


@pytest.fixture(autouse=True)
def _(hub, monkeypatch):
    hub.tokens = {TOKEN}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("time.sleep", lambda _: None)


def kconv(*arguments):
    ran = CliRunner().invoke(main, ["publish", *map(str, arguments)], catch_exceptions=False)
    assert TOKEN not in ran.output + ran.stderr
    return ran


def test_it_publishes_and_says_so(hub, folder):
    ran = kconv(folder, REPO, "--tag", "v1", "--json")
    assert ran.exit_code == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["commit"] == hub.repos[REPO].tags["v1"] and told["done"][-1] == "tagged v1"
    again = kconv(folder, REPO, "--tag", "v1")
    assert again.exit_code == 0 and "nothing to do" in again.stdout


def test_a_dry_run_shows_the_files(hub, folder):
    ran = kconv(folder, REPO, "--tag", "v1", "--dry-run")
    assert ran.exit_code == 0 and hub.repos == {}
    assert all(path.name in ran.stdout for path in folder.iterdir())
    assert "nothing was changed" in ran.stdout


def test_a_dry_run_says_what_passed_before_it_asks_a_hub_that_does_not_answer(hub, folder):
    hub.fail("GET /api/models/", Reply(503))
    ran = kconv(folder, REPO, "--dry-run")
    assert (ran.exit_code, ran.stdout) == (1, "")
    passed, _, refused = ran.stderr.partition("error:")
    assert "passed P101: Every byte matches the manifest." in passed and "passed L1, L2" in passed
    assert " release checks passed" in passed and REPO in refused


def test_offline_ends_after_the_release_checks(hub, folder):
    ran = kconv(folder, REPO, "--dry-run", "--offline")
    assert ran.exit_code == 0 and " release checks passed; the Hub was not asked" in ran.stdout
    assert "passed P101" in ran.stderr and hub.served == []
    told = json.loads(kconv(folder, REPO, "--offline", "--json").stdout)
    assert told["dry_run"] and {"P101", "P115", "L1", "L10"} <= set(told["passed"]) and hub.served == []
    (folder / "README.md").unlink()
    assert kconv(folder, REPO, "--offline").exit_code == 1
    kept = kconv(folder, REPO, "--offline", "--out", folder.parent / "record")
    assert kept.exit_code == 2 and "without --offline" in kept.stderr


def test_what_an_offline_run_lets_pass_did_not_pass(hub, folder):
    (folder / "release.yaml").write_text(yaml.safe_dump({"min_acceptance": FLOOR | {"at_least": 2.6}}))
    ran = kconv(folder, REPO, "--offline", "--allow", "P109=a first try", "--json")
    told = json.loads(ran.stdout)
    assert ran.exit_code == 0 and "P109" not in told["passed"] and told["allowed"][0]["rule"] == "P109"


def test_what_speaks_against_it_is_listed_with_what_to_do(hub, folder):
    write_report(folder, identical=None)
    (folder / "README.md").unlink()
    ran = kconv(folder, REPO)
    assert (ran.exit_code, ran.stdout) == (1, "")
    assert "P107" in ran.stderr and "P113" in ran.stderr and "--allow " in ran.stderr
    assert hub.served == []


@pytest.mark.parametrize("repo", ["bad name", "head", "org/head/more", "org/head@v1", "org/a--b", "org/head."])
@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_name_that_no_repository_can_have_is_refused_before_the_folder_is_judged(hub, folder, repo, more):
    (folder / "README.md").unlink()
    ran = kconv(folder, repo, *more)
    usage = "--" not in repo and not repo.endswith(".")  # not of the form org/name
    assert (ran.exit_code, ran.stdout) == (2 if usage else 1, "")
    said = f"REPO {repo!r} is not of the form" if usage else f"{repo!r} is not a valid repository name"
    assert said in ran.stderr and "P113" not in ran.stderr
    assert hub.served == []


def test_a_folder_and_a_repository_that_are_exchanged_are_told(folder):
    said = kconv(REPO, folder).stderr
    assert f"did you mean kconv publish {folder} {REPO}?" in " ".join(said.replace("│", "").split())


def test_a_card_without_license_and_base_model_is_told_how_a_release_begins(folder):
    """As kconv demo writes it."""
    assert CliRunner().invoke(main, ["card", str(folder), "--force", "--no-chart"]).exit_code == 1
    assert "license: unknown" in (folder / "README.md").read_text()
    said = kconv(folder, REPO).stderr
    assert "neither license nor base model, as kconv demo writes it" in said and "--out RELEASE" in said
    assert "does not match its evidence" not in said


def test_a_wish_that_contradicts_itself_is_refused_before_the_folder_is_judged(folder):
    (folder / "README.md").unlink()
    ran = kconv(folder, REPO, "--private", "--public")
    assert "cannot be both private and public" in ran.stderr and "P113" not in ran.stderr


def test_what_is_allowed_stands_on_the_published_card(hub, folder):
    (folder / "release.yaml").write_text(yaml.safe_dump({"min_acceptance": FLOOR | {"at_least": 2.6}}))
    ran = kconv(folder, REPO, "--allow", "P109=a first try", "--json")
    assert ran.exit_code == 0, ran.stderr
    assert json.loads(ran.stdout)["allowed"][0]["why"] == "a first try"
    card = hub.repos[REPO].commits[hub.repos[REPO].branches["main"]]["README.md"].decode()
    assert "a first try" in card


def test_a_floor_can_be_named_where_the_folder_states_none(hub, folder):
    (folder / "release.yaml").unlink()
    about = ["--suite", "sampled", "--draft-tokens", "3", "--min-prompts", "4", "--max-loss", "0.01"]
    assert "P108" in kconv(folder, REPO).stderr
    assert kconv(folder, REPO, "--min-acceptance", "2.4", *about, "--dry-run").exit_code == 0
    assert "below the floor" in kconv(folder, REPO, "--min-acceptance", "2.9", *about).stderr


@pytest.mark.parametrize(
    ("given", "needs"),
    [
        (["--suite", "sampled"], "--draft-tokens, --min-prompts, --max-loss"),
        (["--suite", "MT-Bench"], "--draft-tokens, --min-prompts, --max-loss, --target-name, --temperature"),
        (
            ["--max-loss", "0", "--temperature", "0"],
            "--suite, --draft-tokens, --min-prompts, and for a suite of prompts --target-name",
        ),
    ],
)
def test_all_that_a_floor_lacks_is_named_at_once(folder, given, needs):
    refused = kconv(folder, REPO, "--min-acceptance", "2.4", *given)
    assert refused.exit_code == 2
    assert " ".join(refused.stderr.replace("│", "").split()).endswith(f"--min-acceptance also needs {needs}")


def test_a_floor_on_a_suite_says_target_and_temperature(hub, folder):
    (folder / "release.yaml").unlink()
    write_acceptance(folder)
    about = ["--suite", "MT-Bench", "--draft-tokens", "3", "--min-prompts", "4", "--max-loss", "0.01"]
    target, temperature = ["--target-name", SUITE["target"]], ["--temperature", "0"]
    ran = kconv(folder, REPO, "--min-acceptance", "2.6", *about, *target, *temperature, "--dry-run")
    assert ran.exit_code == 0, ran.stderr
    for one, lacking in ((target, "--temperature"), (temperature, "--target-name")):
        refused = kconv(folder, REPO, "--min-acceptance", "2.6", *about, *one)
        assert refused.exit_code == 2 and f"also needs {lacking}" in refused.stderr
    warmer = kconv(folder, REPO, "--min-acceptance", "2.6", *about, *target, "--temperature", "1")
    assert warmer.exit_code == 1 and "P109" in warmer.stderr


def write_recipe(folder: Path, *steps: dict) -> None:
    named = {f"step{number}": {"do": "publish", "folder": "$card"} | step for number, step in enumerate(steps)}
    floor = FLOOR | {"at_least": 2.6}
    (folder / "release.yaml").write_text(yaml.safe_dump({"min_acceptance": floor, "steps": named}))


ALLOWED = {"repo": REPO, "tag": "v7", "revision": "next", "allow": {"P109": "a first try"}}


@pytest.mark.parametrize("named", [(), (REPO,)], ids=["no repository named", "the recipe's named"])
def test_the_recipes_own_step_says_where_and_what_is_let_pass(hub, folder, named):
    write_recipe(folder, ALLOWED)
    ran = kconv(folder, *named, "--json")
    assert ran.exit_code == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert (told["repo"], told["tag"], told["revision"]) == (REPO, "v7", "next")
    assert hub.repos[REPO].tags["v7"] == hub.repos[REPO].branches["next"] and told["allowed"][0]["why"] == "a first try"
    assert json.loads(kconv(folder, *named, "--tag", "v8", "--json").stdout)["tag"] == "v8"


def test_the_recipes_step_is_not_that_of_another_repository(hub, folder):
    write_recipe(folder, ALLOWED)
    ran = kconv(folder, "org/other")
    assert ran.exit_code == 1 and "P109" in ran.stderr and hub.served == []


def test_a_pull_request_leaves_the_steps_tag_branch_and_visibility_for_its_merge(hub, folder):
    hub.commit(REPO, {".gitattributes": b""})
    hub.repos[REPO].private = True
    write_recipe(folder, ALLOWED | {"public": True})
    ran = kconv(folder, "--create-pr", "--json")
    assert ran.exit_code == 0, ran.stderr
    held = hub.repos[REPO]
    assert held.tags == {} and "next" not in held.branches and held.private
    refused = kconv(folder, "--create-pr", "--tag", "v8")
    assert refused.exit_code == 1 and "Remove the tag" in refused.stderr


OPEN = {
    "no step": ((), "has a publish step"),
    "two steps": ((ALLOWED, ALLOWED | {"repo": "org/other"}), "2 steps of"),
}


@pytest.mark.parametrize(("steps", "message"), OPEN.values(), ids=OPEN)
def test_a_repository_has_to_be_named_where_the_recipe_leaves_it_open(hub, folder, steps, message):
    write_recipe(folder, *steps)
    ran = kconv(folder)
    said = " ".join(ran.stderr.replace("│", "").split())
    assert ran.exit_code == 2 and "REPO" in said and message in said and hub.served == []


def test_steps_that_publish_to_one_repository_are_told_apart_by_their_names(hub, folder):
    write_recipe(folder, ALLOWED, ALLOWED | {"tag": "v8"})
    ran = kconv(folder, REPO)
    said = " ".join(ran.stderr.replace("│", "").split())
    assert ran.exit_code == 2 and "kconv run --only STEP" in said and "name REPO" not in said and hub.served == []


def test_a_folder_that_is_not_there_is_named(hub, tmp_path):
    ran = kconv(tmp_path / "nosuch", "--dry-run")
    assert ran.exit_code == 1 and "there is no folder" in ran.stderr and hub.served == []


def test_a_recipes_step_that_cannot_be_is_named(hub, folder):
    write_recipe(folder, {"repo": "no organisation"})
    ran = kconv(folder)
    assert ran.exit_code == 1 and "release.yaml cannot be read" in ran.stderr and hub.served == []


ABOUT = ["--suite", "sampled", "--draft-tokens", "3", "--min-prompts", "1", "--max-loss", "0"]
MISUSE = {
    "a reason is missing": ["--allow", "P109"],
    "a reason is empty": ["--allow", "P109="],
    "no such rule": ["--allow", "P999=because"],
    "a floor without a suite": ["--min-acceptance", "2"],
    "a suite without a floor": ["--suite", "MT-Bench"],
    "a number of prompts without a floor": ["--min-prompts", "80"],
    "no such metric": ["--min-acceptance", "2", *ABOUT, "--metric", "speed"],
    "a target without a floor": ["--target-name", "org/target"],
    "a floor of nothing": ["--min-acceptance", "0", *ABOUT],
    "a rate as a floor of lengths": ["--min-acceptance", "0.6", *ABOUT],
    "a tag that git refuses": ["--tag", "v 1"],
    "a branch that git refuses": ["--revision", "a..b"],
    "a branch as the parent": ["--expect-parent", "main"],
    "a second floor": ["--min-acceptance", "2", *ABOUT],
}


@pytest.mark.parametrize("options", MISUSE.values(), ids=MISUSE)
def test_misuse_is_exit_2(hub, folder, options):
    ran = kconv(folder, REPO, *options)
    assert ran.exit_code == 2 and "Usage:" in ran.stderr and hub.served == []


def test_no_token_is_shown_by_a_program_of_its_own_whatever_the_hub_answers(hub, folder, tmp_path):
    """With the library's own logs at their loudest, and an upload whose address is signed."""
    env = os.environ | {"HF_TOKEN": TOKEN, "HF_HUB_VERBOSITY": "info"}
    program = [sys.executable, "-c", "from kconv.cli import main; main()", "publish", str(folder), REPO, "--tag", "v1"]

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*program, *options], capture_output=True, text=True, env=env, cwd=tmp_path)

    hub.fail("POST .*/tag/", refusal(401, message="Invalid credentials in Authorization header"))
    hub.fail("PUT /lfs/", Reply(503), times=1)
    refused = run()
    hub.faults.clear()
    published = run("--json")
    assert (refused.returncode, published.returncode) == (1, 0), refused.stderr + published.stderr
    assert "may have expired" in refused.stderr and "Traceback" not in refused.stderr
    shown = refused.stdout + refused.stderr + published.stdout + published.stderr
    assert TOKEN not in shown and "Signature" not in shown
    files = hub.repos[REPO].commits[hub.repos[REPO].tags["v1"]]
    assert not [name for name, data in files.items() if TOKEN.encode() in data]


def test_a_trusted_publisher_needs_no_token(hub, folder, tmp_path):
    """The exchange that a CI job makes: its own identity for a token of one repository, which has to exist."""
    hub.publisher, hub.tokens = ("a-job's-identity", "hf_jwt_OfTheJob"), set()
    env = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    env |= {"HF_OIDC_RESOURCE": REPO, "HF_OIDC_ID_TOKEN": "a-job's-identity"}
    program = [sys.executable, "-c", "from kconv.cli import main; main()", "publish", str(folder), REPO, "--tag", "v1"]
    run = lambda: subprocess.run(program, capture_output=True, text=True, env=env, cwd=tmp_path)  # noqa: E731
    absent = run()
    assert absent.returncode == 1 and "cannot create a repository" in absent.stderr, absent.stderr
    hub.commit(REPO, {".gitattributes": b""})
    published = run()
    assert published.returncode == 0, published.stderr
    assert hub.repos[REPO].tags
    for ran in (absent, published):
        assert "hf_jwt_OfTheJob" not in ran.stdout + ran.stderr
