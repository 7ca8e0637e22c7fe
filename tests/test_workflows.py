"""The workflows: what they may do, what they run, and that this is there; and what linters say of them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from support.commands import COMMANDS

ROOT = Path(__file__).parent.parent
PINS = ROOT / "constraints"
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTION, EXAMPLES = ROOT / "action.yml", sorted((ROOT / "examples" / "workflows").glob("*.yml"))
# Workflow and job: what it may do beside reading the repository.
MORE = {("release-head", "publish"): {"id-token": "write"}, ("release", "release"): {"id-token": "write"}}
PINNED = re.compile(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")
COMMAND = re.compile(r"(?:/\.venv/bin/)?kconv\"? ([a-z-]+)([^\n>|)]*)")


def read(file: Path) -> dict[str, Any]:
    held = yaml.safe_load(file.read_text())
    return held | {"on": held.pop(True, held.get("on"))}  # YAML reads the key `on` as true


WORKFLOWS = {file.stem: read(file) for file in FILES}
JOBS = [(name, job, held) for name, flow in WORKFLOWS.items() for job, held in flow["jobs"].items()]
# A job that calls another workflow has no steps of its own.
STEPS = [(name, job, held) for name, job, held in JOBS if "steps" in held]
RUNS = [
    *((name, job, step["run"]) for name, job, held in STEPS for step in held["steps"] if "run" in step),
    *(
        ("action", "check", step["run"])
        for step in yaml.safe_load(ACTION.read_text())["runs"]["steps"]
        if "run" in step
    ),
]
SCRIPTS = [(file.name, text) for file in (ROOT / "scripts" / "release-check",) for text in [file.read_text()]]


def test_there_are_the_four():
    assert set(WORKFLOWS) == {"ci", "wheel", "release", "release-head"}


@pytest.mark.parametrize("name, job, held", JOBS, ids=[f"{n}.{j}" for n, j, _ in JOBS])
def test_a_job_may_do_no_more_than_it_has_to(name, job, held):
    assert WORKFLOWS[name]["permissions"] == {}
    assert held["permissions"] == {"contents": "read"} | MORE.get((name, job), {})
    assert held.get("timeout-minutes", 0) > 0 or "uses" in held


@pytest.mark.parametrize("file", [file for file in FILES if file.stem != "release"] + [ACTION], ids=lambda f: f.name)
def test_each_action_is_pinned_to_a_commit_that_is_named(file):
    uses = [line.strip().removeprefix("- ") for line in file.read_text().splitlines() if "uses:" in line]
    assert uses and all(PINNED.match(line) for line in uses), uses


def test_what_a_workflow_installs_is_pinned():
    installs = [line for _, _, text in RUNS for line in text.splitlines() if re.search(r"\bpip install\b", line)]
    assert installs and all(re.search(r" -c \S*pins\.txt| --require-hashes ", line) for line in installs), installs


def test_one_action_has_one_commit():
    pins = {(m[1], m[2]) for file in FILES for m in re.finditer(r"uses: ([\w./-]+)@(\w+)", file.read_text())}
    assert len(pins) == len({action for action, _ in pins}) > 2


def test_no_checkout_leaves_a_token_behind():
    for _, _, held in STEPS:
        for step in held["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_a_release_by_hand_is_a_dry_run_unless_that_is_switched_off():
    release = WORKFLOWS["release"]
    assert release["on"].keys() == {"release", "workflow_dispatch"}
    dry_run = release["on"]["workflow_dispatch"]["inputs"]["dry_run"]
    assert (dry_run["type"], dry_run["default"]) == ("boolean", True)
    assert "inputs.dry_run" in release["jobs"]["release"]["with"]["dry_run"]
    called = WORKFLOWS["release-head"]
    assert called["on"]["workflow_call"]["inputs"]["dry_run"]["default"] is True
    assert "inputs.dry_run" in called["jobs"]["publish"]["env"]["DRY_RUN"]
    assert release["jobs"]["release"]["with"].keys() == called["on"]["workflow_call"]["inputs"].keys()


def test_only_the_job_behind_the_gate_sees_a_secret():
    for name, job, held in JOBS:
        text = yaml.safe_dump(held)
        assert ("secrets." in text) == ("HF_OIDC_RESOURCE" in text) == ((name, job) == ("release-head", "publish"))
    assert WORKFLOWS["release-head"]["jobs"]["publish"]["environment"] == "huggingface"


def test_the_runner_follows_from_the_plan():
    jobs = WORKFLOWS["release-head"]["jobs"]
    assert "needs.plan.outputs.runner" in jobs["build"]["runs-on"] and jobs["publish"]["needs"] == [
        "plan",
        "build",
        "publisher",
    ]


@pytest.mark.parametrize("name, job, text", RUNS, ids=[f"{n}.{j}.{k}" for k, (n, j, _) in enumerate(RUNS)])
def test_nothing_of_a_caller_is_put_into_a_command(name, job, text):
    assert "${{" not in text


@pytest.mark.parametrize("where, text", [*((n, t) for n, _, t in RUNS), *SCRIPTS])
def test_each_command_and_option_is_there(where, text):
    gathered = " ".join(re.findall(r"--[a-z-]+", " ".join(re.findall(r"options\+?=\(.*?\)", text))))
    for command, rest in COMMAND.findall(text.replace('"${options[@]}"', gathered)):
        if command in ("is",):
            continue
        known = COMMANDS[command]
        options = {name for p in known.params if isinstance(p, click.Option) for name in p.opts}
        asked = {word for word in shlex.split(rest.replace('"', "")) if word.startswith("--")}
        assert asked <= options, (where, command, asked - options)


def test_the_release_runs_both_commands():
    told = "\n".join(text for name, _, text in RUNS if name == "release-head")
    assert {command for command, _ in COMMAND.findall(told)} == {"run", "verify", "publish"}


@pytest.mark.parametrize("name, job, text", RUNS, ids=[f"{n}.{j}.{k}" for k, (n, j, _) in enumerate(RUNS)])
def test_each_script_and_test_is_there(name, job, text):
    for script in re.findall(r"(?:^|\s|/)(scripts/[\w-]+)", text):
        assert os.access(ROOT / script, os.X_OK), script
    for test in re.findall(r"tests/[\w/]+\.py", text):
        assert (ROOT / test).exists(), test


def test_the_local_check_runs_what_the_workflow_runs():
    told = (ROOT / "scripts" / "release-check").read_text()
    shared = {command for name, _, text in RUNS if name == "release-head" for command, _ in COMMAND.findall(text)}
    assert shared <= {command for command, _ in COMMAND.findall(told)}


def lint(program: str, *arguments: str) -> None:
    ran = subprocess.run(
        [str(Path(sys.executable).parent / program), *arguments], capture_output=True, text=True, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_they_are_of_githubs_schema():
    lint("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *map(str, (*FILES, *EXAMPLES)))
    lint("check-jsonschema", "--builtin-schema", "vendor.github-actions", str(ACTION))


def test_an_audit_finds_nothing():
    lint("zizmor", "--offline", "--quiet", "--no-progress", *map(str, (*FILES, *EXAMPLES, ACTION)))


def test_a_users_workflows_are_short_and_give_what_is_asked_for():
    assert len(EXAMPLES) == 2 and all(len(file.read_text().splitlines()) <= 30 for file in EXAMPLES)
    inputs = {"release-head.yml": WORKFLOWS["release-head"]["on"]["workflow_call"]["inputs"].keys(),
              "kconv": yaml.safe_load(ACTION.read_text())["inputs"].keys()}  # fmt: skip
    used = set()
    for file in EXAMPLES:
        for held in read(file)["jobs"].values():
            for call in (held, *held.get("steps", ())):
                name = call.get("uses", "").partition("@")[0].rpartition("/")[2]
                if name in inputs:
                    assert call["with"].keys() <= inputs[name]
                    used.add(name)
    assert used == inputs.keys()


def test_nothing_is_installed_where_a_token_can_be_asked_for():
    """An installer, or a package that one loads, could ask for the token that publishes."""
    for name, job, held in STEPS:
        if held["permissions"].get("id-token") == "write" or "secrets." in yaml.safe_dump(held):
            for step in held["steps"]:
                assert not re.search(r"\bpip\b|scripts/|npm|apt|curl|wget", step.get("run", "")), (name, job, step)


def test_a_release_takes_only_what_has_the_known_digests():
    runs = [text for name, _, text in RUNS if name in ("release-head", "action") and "scripts/setup" in text]
    setup = re.compile(r"\.kconv/scripts/setup --(hashed|publish)|\"\$GITHUB_ACTION_PATH/scripts/setup\" --hashed")
    assert len(runs) == 4 and all(setup.fullmatch(text.strip()) for text in runs)


@pytest.mark.parametrize("name", ["hashed", "publish"])
def test_each_pin_has_digests_and_is_the_one_that_was_tested(name):
    text = (PINS / f"{name}.txt").read_text()
    entries = re.findall(r"^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.M)
    lines = [line for line in text.splitlines() if line and line[0] not in "# "]
    assert len(entries) == len(lines) > 20
    tested = dict(line.split("==") for line in (PINS / "dev.txt").read_text().splitlines() if "==" in line)
    normal = {re.sub(r"[-_.]+", "-", key).lower(): version for key, version in tested.items()}
    hashed = {re.sub(r"[-_.]+", "-", key).lower(): version for key, version, _ in entries}
    assert {key: version for key, version in hashed.items() if key in normal} == {
        key: normal[key] for key in hashed if key in normal
    }
    assert {"click", "setuptools", "detect-secrets"} <= hashed.keys()


def shell(step: dict[str, Any], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a step's text as a runner does, in a folder and with the values of its contexts."""
    own = os.environ | {"GITHUB_OUTPUT": "output", "GITHUB_STEP_SUMMARY": "summary", "RUNNER_TEMP": str(folder)}
    words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    return subprocess.run(words, cwd=folder, env=own | env, capture_output=True, text=True)


def validating(folder: Path, code: int = 0, **inputs: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the action's step `validate` with a kconv that notes its words and ends with a code; return these words."""
    program = folder / ".venv" / "bin" / "kconv"
    program.parent.mkdir(parents=True)
    program.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > words\necho first\necho "UNDECIDED vLLM: needs it"\nexit {code}\n'
    )
    program.chmod(0o755)
    (step,) = [step for step in yaml.safe_load(ACTION.read_text())["runs"]["steps"] if step.get("id") == "validate"]
    given = {"head": "my head", "for": "", "source": "", "options": "", "report": "report", **inputs}
    env = {name: given[re.findall(r"inputs\.(\w+)", value)[0]] for name, value in step["env"].items()}
    ran = shell(step, folder, GITHUB_ACTION_PATH=str(folder), **env)
    return ran, (folder / "words").read_text().splitlines()


@pytest.mark.parametrize("named", ["vllm sglang trtllm", "vllm\nsglang\ntrtllm\n", " vllm\tsglang\n\n  trtllm "])
def test_the_action_checks_for_every_engine_that_is_named(tmp_path, named):
    ran, words = validating(tmp_path, **{"for": named})
    assert ran.returncode == 0, ran.stderr
    assert words == [
        "validate", "my head", "--out", "report", "--for", "vllm", "--for", "sglang", "--for", "trtllm",
    ]  # fmt: skip


def test_the_action_passes_on_what_decides_an_open_fact(tmp_path):
    ran, words = validating(tmp_path, options="--target org/name\n--rope-theta 10000", source="a b")
    assert ran.returncode == 0 and "::error" not in ran.stdout
    assert words == [
        "validate", "my head", "--target", "org/name", "--rope-theta", "10000", "--out", "report", "--source", "a b",
    ]  # fmt: skip


@pytest.mark.parametrize("code, said", [(1, False), (2, False), (3, True)])
def test_the_actions_step_fails_with_kconv_and_says_what_decides_an_open_fact(tmp_path, code, said):
    ran, _ = validating(tmp_path, code)
    assert ran.returncode == code and "first" in ran.stdout
    assert ("::error title=Pass this as options::UNDECIDED vLLM: needs it\n" in ran.stdout) is said


def test_what_publishes_is_unpacked_only_if_it_is_what_the_job_publisher_made(tmp_path):
    jobs = WORKFLOWS["release-head"]["jobs"]
    (pack,) = [step for step in jobs["publisher"]["steps"] if "tar --create" in step.get("run", "")]
    (unpack,) = [step for step in jobs["publish"]["steps"] if "tar --extract" in step.get("run", "")]
    assert jobs["publisher"]["outputs"] == {"sha256": f"${{{{ steps.{pack['id']}.outputs.sha256 }}}}"}
    assert unpack["env"] == {"SHA256": "${{ needs.publisher.outputs.sha256 }}"}
    made, taken = tmp_path / "made", tmp_path / "taken"
    (made / ".kconv" / ".venv").mkdir(parents=True)
    (made / ".kconv" / ".venv" / "kconv").write_text("the one")
    taken.mkdir()
    assert shell(pack, made).returncode == 0
    digest = (made / "output").read_text().strip().removeprefix("sha256=")
    shutil.copy(made / "publisher.tar.gz", taken)
    for wrong in ("", "0" * 64, digest[:-1]):
        assert shell(unpack, taken, SHA256=wrong).returncode != 0 and not (taken / ".kconv").exists()
    assert shell(unpack, taken, SHA256=digest).returncode == 0
    assert (taken / ".kconv" / ".venv" / "kconv").read_text() == "the one"
    # Another job's artifact of the same name.
    shutil.rmtree(taken / ".kconv")
    (made / ".kconv" / ".venv" / "kconv").write_text("another")
    assert shell(pack, made).returncode == 0
    shutil.copy(made / "publisher.tar.gz", taken)
    assert shell(unpack, taken, SHA256=digest).returncode != 0 and not (taken / ".kconv").exists()
