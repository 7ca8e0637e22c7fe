"""The release workflow's own steps, run in a shell as a runner would, up to the stand-in of the Hub."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.hub import Hub
from support.releases import LICENSE, REPO, TOKEN, carry_out, write_acceptance, write_inputs

ROOT = Path(__file__).parent.parent.parent
FLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "release-head.yml").read_text())
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
EXPRESSION = re.compile(r"\$\{\{ (.*?) \}\}")


def filled(text: object, known: dict[str, str]) -> str:
    """Put in the values of contexts, as a runner does; one that is not known is a fault of the test."""
    said = {True: "true", False: "false"}.get(text, text) if isinstance(text, bool) else text
    return EXPRESSION.sub(lambda found: known[found[1]], str(said))


class Runner:
    """One job's machine: its workspace, what its steps put out, and the artifacts of the run."""

    def __init__(self, workspace: Path, artifacts: Path, known: dict[str, str], own: Path) -> None:
        self.workspace, self.artifacts, self.known, self.own = workspace, artifacts, known, own

    def run(self, steps: list[dict[str, Any]], env: dict[str, str]) -> None:
        for number, step in enumerate(steps):
            uses, given = step.get("uses", ""), step.get("with", {})
            if uses.startswith("actions/checkout@") and given.get("path") == ".kconv":
                (self.workspace / ".kconv").symlink_to(self.own)
            elif uses.startswith("actions/upload-artifact@"):
                found = self.workspace / filled(given["path"], self.known)
                target = self.artifacts / given["name"] / ("" if found.is_dir() else found.name)
                assert found.exists(), given["path"]
                shutil.copytree(found, target) if found.is_dir() else shutil.copy(found, self._made(target.parent))
            elif uses.startswith("actions/download-artifact@"):
                into = self.workspace / filled(given.get("path", "."), self.known)
                shutil.copytree(self.artifacts / given["name"], into, dirs_exist_ok=True)
            elif "run" in step:
                self._shell(step, env, self.workspace / f".output-{number}")

    def _shell(self, step: dict[str, Any], env: dict[str, str], output: Path) -> None:
        own = {name: filled(value, self.known) for name, value in step.get("env", {}).items()}
        told = {"GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(self.workspace / "summary.md")}
        told["RUNNER_TEMP"] = str(self._made(self.workspace.with_name(f"{self.workspace.name}-temp")))
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", filled(step["run"], self.known)],
            cwd=self.workspace, env=os.environ | env | own | told, capture_output=True, text=True,
        )  # fmt: skip
        assert ran.returncode == 0, (step["run"], ran.stdout + ran.stderr)
        assert TOKEN not in ran.stdout + ran.stderr
        for line in output.read_text().splitlines() if output.exists() else ():
            name, _, value = line.partition("=")
            self.known[f"steps.{step['id']}.outputs.{name}"] = value

    @staticmethod
    def _made(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@pytest.fixture
def own(tmp_path) -> Path:
    """Return kconv's own checkout: its program in .venv, and a setup that has nothing left to do."""
    folder = tmp_path / "kconv-checkout"
    program, setup = folder / ".venv" / "bin" / "kconv", folder / "scripts" / "setup"
    for file, text in {
        program: f'#!{sys.executable}\nimport sys\nfrom kconv.cli import main\nmain(prog_name="kconv")\n',
        setup: "#!/usr/bin/env bash\n[[ $1 == --hashed || $1 == --publish ]]\n",
        # A hosted runner has it; here it may be missing.
        folder / "jq" / "jq": f"#!{sys.executable}\n{JQ}",
    }.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    return folder


# The two questions that the workflow asks of a plan.
JQ = """import json, sys
plan = json.load(open(sys.argv[-1]))
if ".heavy" in sys.argv[-2]:
    print(json.dumps(["self-hosted", "kconv"] if plan["heavy"] else "ubuntu-24.04"))
else:
    print(plan["out"] + "/" + [step for step in plan["steps"] if step["do"] == "card"][-1]["name"])
"""


@pytest.fixture
def repository(tmp_path) -> Path:
    """Return a repository with a recipe, its head, and the figures that were measured of it."""
    folder = tmp_path / "repository"
    folder.mkdir()
    values = write_inputs(folder)
    carry_out(values, tmp_path / "measured", only="vllm")
    write_acceptance(tmp_path / "measured" / "vllm")
    shutil.move(tmp_path / "measured" / "vllm" / "acceptance.json", folder / "acceptance.json")
    (folder / "release.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("dry_run", [True, False])
def test_the_release_workflows_steps_publish_a_head(hub: Hub, tmp_path, own, repository, monkeypatch, dry_run):
    hub.tokens = {TOKEN}
    monkeypatch.setenv("PATH", f"{own / 'jq'}:{os.environ['PATH']}")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    known = {
        "inputs.recipe": "release.yaml", "inputs.tag": "v1", "inputs.dry_run": str(dry_run).lower(),
        "inputs.public": "false", "vars.HF_REPO": "", "vars.HF_OIDC_RESOURCE": "", "secrets.HF_TOKEN": TOKEN,
    }  # fmt: skip
    shared = {name: filled(value, known) for name, value in FLOW["env"].items()}
    for name in ("plan", "build", "publisher", "publish"):
        job, workspace = FLOW["jobs"][name], tmp_path / name
        # A job has the caller's files where it checks them out, and nothing of another job but artifacts.
        checks_out = any("checkout" in step.get("uses", "") and "path" not in step["with"] for step in job["steps"])
        shutil.copytree(repository, workspace) if checks_out else workspace.mkdir()
        env = shared | {key: filled(value, known) for key, value in job.get("env", {}).items()}
        Runner(workspace, tmp_path / "artifacts", known, own).run(job["steps"], env)
        for output, value in job.get("outputs", {}).items():
            known[f"needs.{name}.outputs.{output}"] = filled(value, known)
    assert known["needs.plan.outputs.runner"] == '"ubuntu-24.04"'
    if dry_run:
        assert not any(held.tags for held in hub.repos.values())
        return
    held = hub.repos[REPO]
    files = {file.name: file.read_bytes() for file in (tmp_path / "build" / "a-release" / "card").iterdir()}
    tagged = {name: data for name, data in held.commits[held.tags["v1"]].items() if name != ".gitattributes"}
    # The source's path stays in the job.
    made = json.loads(files["kconv.json"])["source"]
    files["kconv.json"] = files["kconv.json"].replace(json.dumps(made).encode(), json.dumps(Path(made).name).encode())
    assert tagged == files and "README.md" in files and held.private


@pytest.mark.slow
def test_the_actions_steps_validate_a_head_and_render_its_card(tmp_path, own):
    values = write_inputs(tmp_path)
    carry_out(values, tmp_path / "made", only="vllm")
    workspace = tmp_path / "workspace"
    shutil.copytree(tmp_path / "made" / "vllm", workspace / "head")
    inputs = {name: str(said.get("default", "")) for name, said in ACTION["inputs"].items()}
    (workspace / "facts.yaml").write_text("base_model: org/target\nlicense: {id: mit}\n")
    (workspace / "head" / "LICENSE").write_text(LICENSE)
    inputs |= {"head": "head", "for": "vllm", "facts": "facts.yaml"}
    runner = Runner(workspace, tmp_path / "artifacts", {f"inputs.{name}": value for name, value in inputs.items()}, own)
    runner.run(ACTION["runs"]["steps"], {"GITHUB_ACTION_PATH": str(own)})
    assert {name: filled(said["value"], runner.known) for name, said in ACTION["outputs"].items()} == {
        "report": "kconv-report/report.json", "card": "head/README.md",
    }  # fmt: skip
    assert "vLLM" in (workspace / "summary.md").read_text()
    assert (workspace / "head" / "README.md").read_text().startswith("---\n")
