"""The example release from end to end, as a user runs it, from training to the repository and its tag."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.hub import Hub

from kconv.cards.publish.gate import judge
from kconv.cards.publish.release import open_candidate
from kconv.checkpoint.manifest import verify
from kconv.pipeline.recipe import read_release

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "tiny-release.yaml"
DFLASH = ROOT / "examples" / "tiny-dflash-release.yaml"
TOKEN = "hf_aVerySecretTokenOfNobody"


def kconv(root: Path, example: Path = EXAMPLE) -> dict[str, str]:
    """Run an example from the repository's root, and return the status of each step."""
    program = [sys.executable, "-c", "from kconv.cli import main; main()", "run", str(example), "--out", str(root)]
    env = os.environ | {"HF_TOKEN": TOKEN}
    ran = subprocess.run([*program, "--json"], capture_output=True, text=True, cwd=ROOT, env=env)
    assert ran.returncode == 0, ran.stderr
    assert TOKEN not in ran.stdout + ran.stderr
    told: dict[str, Any] = json.loads(ran.stdout)
    return {step["name"]: step["status"] for step in told["steps"]}


def files_under_the_tag(hub: Hub, repo: str, tag: str) -> dict[str, bytes]:
    held = hub.repos[repo]
    return {name: data for name, data in held.commits[held.tags[tag]].items() if name != ".gitattributes"}


@pytest.mark.slow
def test_the_example_goes_from_nothing_to_the_hub_in_one_command(hub, tmp_path):
    hub.tokens = {TOKEN}
    root, recipe = tmp_path / "tiny-release", read_release(EXAMPLE)[0]
    publish = recipe.steps["publish"].plain()

    assert set(kconv(root).values()) == {"made"}
    for layout in ("vllm", "trtllm", "sglang"):
        assert verify(root / layout).layout == layout
    verify(root / "nvfp4")
    candidate = open_candidate(root / "card", None, (), recipe.min_acceptance, recipe.facts)
    assert [finding for finding in judge(candidate) if finding.severity == "error"] == []
    tagged = files_under_the_tag(hub, publish["repo"], publish["tag"])
    assert tagged == {path.name: path.read_bytes() for path in (root / "card").iterdir()}
    assert hub.repos[publish["repo"]].private
    assert not [path for path in root.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]

    calls = len(hub.served)
    assert set(kconv(root).values()) == {"unchanged"}
    assert len(hub.served) == calls

    shutil.rmtree(root / "trtllm")
    again = kconv(root)
    assert [name for name, status in again.items() if status == "made"] == ["trtllm"]
    shutil.rmtree(root / "report")
    again = kconv(root)
    # Measured on the same day the report comes out the same, and with it the card; else both are new.
    assert {name for name, status in again.items() if status == "made"} <= {"report", "card", "publish"}
    assert again["head"] == again["vllm"] == again["acceptance"] == "unchanged"


@pytest.mark.slow
def test_a_dflash_drafter_goes_the_same_way(hub, tmp_path):
    hub.tokens = {TOKEN}
    root, recipe = tmp_path / "tiny-dflash-release", read_release(DFLASH)[0]
    publish = recipe.steps["publish"].plain()

    assert set(kconv(root, DFLASH).values()) == {"made"}
    assert [verify(root / layout).layout for layout in ("vllm", "sglang")] == ["dflash-vllm", "dflash-sglang"]
    tagged = files_under_the_tag(hub, publish["repo"], publish["tag"])
    assert tagged == {path.name: path.read_bytes() for path in (root / "card").iterdir()}
    assert b"A DFlash drafter" in tagged["README.md"] and b'"method": "dflash"' in tagged["README.md"]
