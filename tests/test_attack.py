"""Cases of an attack on an earlier kconv, rebuilt from its report: what strangers' files, a Hub or a disk did.

Each case was seen to fail at commit b7451f2. They use no more of kconv than its commands and what support/ writes, so
that they run there too: with that commit's support/ in place of this one. Other cases of the same report stand beside
what they are about, and name it as this file does.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.hub import Hub, hub
from support.hub_head import head as published
from support.hub_repos import Reply
from support.releases import write_release

import kconv as kconv_itself
from kconv.cli import main

__all__ = ["hub"]

TOKEN = "hf_" + "aVerySecretTokenOfNobody"
SECRET = "what nobody else shall see"
APACHE = "Apache License Version 2.0, January 2004\n"
FORGED = "innocent\n\n## Forged\n\n| [x](http://evil) | <img src=x> |\n|---|---|\n| MT-Bench | 4.00 |\n\n"
WITH_LICENSE = ("--base-model", "org/target", "--license", "mit")


def kconv(*words: object) -> Result:
    """Run a command; it ends in a result or a named error, and in no traceback."""
    ran = CliRunner().invoke(main, [str(word) for word in words])
    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exc_info
    assert ran.exit_code in (0, 1, 2) and ran.output.strip()
    return ran


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a head that is ready to be published, with its evidence."""
    return write_release(tmp_path / "head")


def edit(file: Path, **values: object) -> None:
    """Change keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def without_card(folder: Path) -> Path:
    """Take a head's card away, so that another may be written."""
    for name in ("README.md", "LICENSE"):
        (folder / name).unlink()
    return folder


def lines_of(file: Path) -> list[str]:
    return [line.strip() for line in file.read_text().splitlines()]


# Defect 4: downloads were not held against the Hub's digest.


@pytest.mark.parametrize("at", [-1, -2, -1000, -1024, -500_000, -1_000_000])
def test_a_weight_that_was_flipped_on_the_way_is_not_converted(hub: Hub, tmp_path, at):
    files, data = published(), write_release(tmp_path / "model")
    files = {name: (data / name).read_bytes() for name in ("config.json", "model.safetensors")}
    hub.commit("org/head", files)
    weights = files["model.safetensors"]
    flipped = bytearray(weights)
    flipped[max(at, 4000 - len(weights))] ^= 1
    hub.garble = lambda sent: bytes(flipped) if sent == weights else sent
    ran = kconv("to-trtllm", "org/head", tmp_path / "out")
    assert ran.exit_code == 1 and not (tmp_path / "out").exists(), ran.output


# Defect 6b: a license's text came from anywhere.


def test_a_link_in_the_source_brings_no_file_of_the_users_into_a_release(folder, tmp_path):
    (tmp_path / "id_rsa").write_text(APACHE + SECRET)
    source = tmp_path / "head-source"
    (source / "LICENSE").symlink_to(tmp_path / "id_rsa")
    kconv("card", without_card(folder), "--source", source, *WITH_LICENSE, "--no-chart")
    assert not [file.name for file in folder.iterdir() if SECRET in file.read_text(errors="replace")]


def test_a_manifest_brings_no_file_of_the_users_into_a_release(folder, tmp_path):
    private = tmp_path / "private"
    private.mkdir()
    (private / "COPYING").write_text(APACHE + SECRET)
    edit(folder / "kconv.json", source=str(private))
    kconv("card", without_card(folder), *WITH_LICENSE, "--no-chart")
    assert not [file.name for file in folder.iterdir() if SECRET in file.read_text(errors="replace")]


# Defect 7: uploads read the disk again after the gate.


@pytest.mark.parametrize("name", ["config.json", "kconv.json", "report.json", "model.safetensors"])
def test_what_changes_while_it_is_published_reaches_no_branch(hub: Hub, folder, monkeypatch, name):
    hub.tokens = {TOKEN}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    before, changed = (folder / name).read_bytes(), []

    def change(call) -> None:
        if call.method != "GET" and not changed:
            changed.append(call.path)
            (folder / name).write_bytes(TOKEN.encode() + before)

    hub.before = change
    ran = kconv("publish", folder, "org/head", "--tag", "v1")
    assert changed, ran.output
    for commit in hub.repos["org/head"].commits.values():
        assert commit.get(name, before) == before


# Defect 13b: what evidence says stood in cards and reports as it was.


def test_an_upstreams_manifest_forges_no_section_of_a_card(folder):
    edit(folder / "kconv.json", source=FORGED, source_layout=FORGED)
    ran = kconv("card", without_card(folder), *WITH_LICENSE, "--no-chart")
    card = folder / "README.md"
    # Either there is no card of it, or one without the section.
    assert not card.exists() or "## Forged" not in lines_of(card), ran.output


def test_a_suites_category_forges_no_section_of_a_card(folder, tmp_path):
    row = {"metric": "al_incl_bonus", "value": 2.5, "draft_tokens": 3, "averaging": "micro_steps", "engine": "vllm",
           "engine_version": "0.32", "target": FORGED, "precision": FORGED, "temperature": 0.0, "dataset": "d" + FORGED,
           "category": FORGED, "prompts": 80, "date": "2026-11-20", "measured_by": "quoted", "drafts": 100.0,
           "url": "https://x.org", "published_as": FORGED, "note": FORGED}  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps({"schema": 1, "head": folder.name, "rows": [row]}))
    kconv("card", without_card(folder), "--acceptance", tmp_path / "a.json", *WITH_LICENSE, "--no-chart")
    held = lines_of(folder / "README.md")
    assert any("Forged" in line for line in held), "it is shown"
    assert "## Forged" not in held and "| MT-Bench | 4.00 |" not in held


def test_a_folders_name_forges_no_section_of_a_report(folder, tmp_path):
    evil = tmp_path / "innocent\n## Forged\n![x](x)"
    folder.rename(evil)
    kconv("validate", evil, "--for", "all", "--out", tmp_path / "report")
    assert "## Forged" not in lines_of(tmp_path / "report" / "report.md")


# Defect 14: the Hub's answers of another shape.

SHAPES = [b"null", b"{}", b"[]", b"[1]", b'"text"', b"1", b'{"sha": 1}', b'[{"type": "file"}]', b"[[]]"]


def test_an_answer_of_another_shape_is_named_while_reading(hub: Hub, monkeypatch, tmp_path):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.commit("org/head", published())
    ended = []
    for shape in SHAPES:
        hub.faults.clear()
        hub.fail(r"GET /api/models/org/head/tree/", Reply(200, shape, {"Content-Type": "application/json"}))
        for words in (("inspect", "org/head"), ("to-vllm", "org/head", tmp_path / "out")):
            ran = CliRunner().invoke(main, [str(word) for word in words])
            ended.append((shape, words[0], repr(ran.exception)))
    assert [one for one in ended if "SystemExit" not in one[2] and one[2] != "None"] == []


def test_an_answer_of_another_shape_is_named_while_publishing(hub: Hub, folder, monkeypatch):
    hub.tokens = {TOKEN}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    ended = []
    for route in (
        r"GET /api/models/org/head$",
        r"GET /api/models/org/head/(refs|tree)",
        r"POST .*/(preupload|commit)/",
    ):
        for shape in SHAPES:
            hub.repos.clear(), hub.faults.clear()
            hub.fail(route, Reply(200, shape, {"Content-Type": "application/json"}), times=2)
            ran = CliRunner().invoke(main, ["publish", str(folder), "org/head", "--tag", "v1"])
            ended.append((route, shape, repr(ran.exception)))
    assert [one for one in ended if "SystemExit" not in one[2] and one[2] != "None"] == []


# Defect 11: what a disk refuses.


def limited(words: list[object], most: int) -> subprocess.CompletedProcess[str]:
    """Run a command in a process whose files may be of `most` bytes, which stands for a disk that is full."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    code = "from kconv.cli import main; main()"
    command = [sys.executable, "-c", code, *map(str, words)]
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, env=env)


def test_a_card_on_a_full_disk_leaves_no_half_a_license_and_can_be_written_later(folder, tmp_path):
    text = (Path(kconv_itself.__file__).parent / "LICENSE").read_text()
    (tmp_path / "LICENSE").write_text(text)
    without_card(folder)
    words = ["card", folder, "--base-model", "org/target", "--license", "apache-2.0", "--license-file",
             tmp_path / "LICENSE", "--no-chart"]  # fmt: skip
    ended = limited(words, 8192)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr, ended.stderr
    assert not (folder / "LICENSE").exists() or (folder / "LICENSE").read_text() == text
    kconv(*words)
    assert (folder / "LICENSE").read_text() == text


@pytest.mark.parametrize("words", [("card", "HEAD", "--check"), ("publish", "HEAD", "org/head", "--dry-run")])
def test_a_card_that_cannot_be_read_is_named(folder, words):
    (folder / "README.md").unlink()
    # A regular file which nobody may read from its beginning, root neither.
    (folder / "README.md").symlink_to("/proc/self/mem")
    assert kconv(*(str(folder) if word == "HEAD" else word for word in words)).exit_code == 1
