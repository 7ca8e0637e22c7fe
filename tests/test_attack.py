"""Cases of an attack on an earlier kconv, rebuilt from its report: what strangers' files, a Hub or a disk did.

Each case was seen to fail at commit b7451f2. They use no more of kconv than its commands and what support/ writes, so
that they run there too: with that commit's support/ in place of this one. Other cases of the same report stand beside
what they are about, and name it as this file does.
"""

from __future__ import annotations

import hashlib
import json
import os
import pty
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from support.hub import Hub, hub
from support.hub import head as published
from support.hub_routes import Reply
from support.releases import write_release

import kconv as kconv_itself
from kconv.cli import main

__all__ = ["hub"]

TOKEN = "hf_" + "aVerySecretTokenOfNobody"
SECRET = "what nobody else shall see"
APACHE = "Apache License Version 2.0, January 2004\n"
FORGED = "innocent\n\n## Forged\n\n| [x](http://evil) | <img src=x> |\n|---|---|\n| MT-Bench | 4.00 |\n\n"
WITH_LICENSE = ("--base-model", "org/target", "--license", "mit")
EVIL = '#include <stdio.h>\n__attribute__((constructor)) void run(void) { fclose(fopen("%s", "w")); }\n'
BRIEFLY = [
    part for value in ("captured=[1,3,5]", "steps=4", "batch=4", "seq=32", "warmup=1") for part in ("--set", value)
]


def kconv(*words: object) -> Result:
    """Run a command; it ends in a result or a named error, and in no traceback."""
    ran = CliRunner().invoke(main, [str(word) for word in words])
    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exc_info
    assert ran.exit_code in (0, 1, 2, 3) and ran.output.strip()
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


def add_record(folder: Path, name: str, data: bytes) -> None:
    """Have a folder's manifest list a file."""
    held = json.loads((folder / "kconv.json").read_text())
    held["files"].append({"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    (folder / "kconv.json").write_text(json.dumps(held))


def write_recipe(folder: Path, head: Path, name: str = "r") -> Path:
    """Write a release of one step, a card."""
    recipe = {"name": name, "steps": {"card": {"do": "card", "head": str(head), "chart": False}}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


def found_in(head: Path, engine: str = "all", *words: object) -> set[str]:
    """Return the rules of what `kconv validate` finds, but notes."""
    ran = CliRunner().invoke(main, ["validate", str(head), "--for", engine, *map(str, words), "--json"])
    said = json.loads(ran.stdout)["findings"]
    return {one["rule"] for one in said if one["severity"] != "note"}


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (None where it had to be stopped), what it said, and its peak of memory."""

    code: int | None
    said: str
    bytes: int

    @property
    def named(self) -> bool:
        """Whether it ended in a result or a named error."""
        return self.code in (0, 1, 2, 3) and "Traceback" not in self.said and bool(self.said.strip())


# Linux counts into a process's peak memory what its parent had when it started it, and a test's own process has a
# gigabyte: so a small process starts the command, and measures it.
WATCH = """
import json, os, resource, subprocess, sys, time
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
seconds, said, *command = sys.argv[1:]
running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=int(said), stderr=int(said))
until, ended = time.monotonic() + float(seconds), (0, 0, None)
while not ended[0] and time.monotonic() < until:
    ended = os.wait4(running.pid, os.WNOHANG)
    time.sleep(0.02)
if stopped := not ended[0]:
    running.kill()
    ended = os.wait4(running.pid, 0)
print(json.dumps([None if stopped else os.waitstatus_to_exitcode(ended[1]), ended[2].ru_maxrss << 10]))
os._exit(0)
"""


def alone(*words: object, seconds: float = 90.0, **environment: str) -> Ended:
    """Run a command in a process of its own, with 12 GB at most; stop it after some seconds."""
    command = [sys.executable, "-c", "from kconv.cli import main; main()", *map(os.fsencode, map(str, words))]
    with tempfile.TemporaryFile() as said:
        watch = [sys.executable, "-c", WATCH, str(seconds), str(said.fileno()), *command]
        ran = subprocess.run(
            watch, stdout=subprocess.PIPE, pass_fds=[said.fileno()], env=os.environ | environment, check=True
        )
        code, most = json.loads(ran.stdout)
        said.seek(0)
        text = said.read().decode(errors="replace")
    return Ended(code, text, most)


def on_a_terminal(command: list[str]) -> str:
    """Return what a command prints on a terminal."""
    ours, other = pty.openpty()
    running = subprocess.Popen(command, stdin=other, stdout=other, stderr=other)
    os.close(other)
    said = b""
    with suppress(OSError):  # once the other end is closed
        while part := os.read(ours, 65536):
            said += part
    os.close(ours)
    running.wait()
    return said.decode(errors="replace")


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


# Defect 1: a recorded name that leads out of the folder overwrote a user's file.


@pytest.mark.parametrize("name", ["../victim", "../../victim"])
def test_a_strangers_manifest_overwrites_no_file_of_the_users(tmp_path, name):
    stranger, out = write_release(tmp_path / "stranger" / "a" / "head"), tmp_path / "out"
    for evidence in ("README.md", "LICENSE", "report.json", "release.yaml"):
        (stranger / evidence).unlink()
    (stranger / name).resolve().write_text("theirs")
    add_record(stranger, name, b"theirs")
    (out / "card").mkdir(parents=True)
    victim = (out / "card" / name).resolve()
    (out / "card").rmdir()
    victim.write_text("mine")
    (out / "release.yaml").write_text("")
    kconv("run", write_recipe(tmp_path, stranger), "--out", out)
    assert victim.read_text() == "mine"


# Defect 2: layers captured one too early passed every proof.


def test_a_hint_that_differs_from_how_the_source_reads_is_found(folder, tmp_path):
    source, hinted = tmp_path / "head-source", tmp_path / "hinted"
    held = json.loads((source / "config.json").read_text())
    # Without this word the list is taken for outputs by default.
    del held["eagle_config"]["aux_hidden_state_layer_ids_are"]
    (source / "config.json").write_text(json.dumps(held))
    assert kconv("to-vllm", source, tmp_path / "plain").exit_code == 0
    assert kconv("to-vllm", source, hinted, "--captured-are", "inputs").exit_code == 0
    plain, doubted = (found_in(head, "vllm", "--source", source) for head in (tmp_path / "plain", hinted))
    assert doubted - plain


# Defect 3: a release's name was searched and not matched, and a compiled packer came from anywhere.


@pytest.mark.parametrize("name", ["../escaped", "a\nrunner=evil", "a\nfolder=evil"])
def test_a_releases_name_escapes_neither_its_folder_nor_a_line(folder, tmp_path, name):
    ran = kconv("run", write_recipe(tmp_path, folder, name=name), "--dry-run", "--out", tmp_path / "out")
    assert ran.exit_code != 0, ran.output


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_library_in_a_folder_that_others_may_write_is_not_run(tiny_target, tmp_path):
    cache, marker = tmp_path / "cache", tmp_path / "ran"
    words = ["quantize", tiny_target, tmp_path / "a", "--recipe", "nvfp4-experts", "--input-scale", "data-free"]
    assert alone(*words, KCONV_CACHE=str(cache)).code == 0
    [library] = cache.rglob("pack-*.so")
    library.unlink()
    (tmp_path / "evil.c").write_text(EVIL % marker)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "evil.c"], check=True)
    for place in (cache, library.parent):
        place.chmod(0o777)
    words[2] = tmp_path / "b"
    alone(*words, KCONV_CACHE=str(cache))
    assert not marker.exists()


# Defects 5, 6a and 23: what the gate let into a release. Each secret is put together here, for no scanner to find.

LETTERS = "aB3" * 12
SECRETS = (
    "X_" + TOKEN, "api_" + "org_" + LETTERS, "AKIA" + "ABCDEFGHIJKLMNOP", "nvapi" + "-" + LETTERS, "sk" + "-" + LETTERS,
    "xoxb" + "-123456789012-" + LETTERS[:24], "glpat" + "-" + LETTERS[:20], "AIza" + LETTERS[:35],
    "-----BEGIN RSA PRIVATE " + "KEY-----\nMII", "-----BEGIN OPENSSH PRIVATE " + "KEY-----\nb3B",
    "https://" + "me:secret" + "@host.org/x",
)  # fmt: skip
BESIDE = {f"NOTICE, secret {n}": ("NOTICE", secret.encode(), False) for n, secret in enumerate(SECRETS)}
BESIDE |= {
    f"{name}, a token": (name, TOKEN.encode(), False)
    for name in ("NOTICE.env", "LICENSE.key", "NOTICE.MD", "NOTICE.rst", "NOTICE.jsonl", "THIRD_PARTY.html", "x.png")
}
BESIDE |= {"NOTICE in UTF-16": ("NOTICE", TOKEN.encode("utf-16"), False)}
BESIDE |= {
    f"{name} lies beside": (name, b"whatever", False) for name in (".x.png", "LICENSE.pkl", "NOTICE.exe", "COPYING.sh")
}
BESIDE |= {"NOTICE_id_rsa lies beside": ("NOTICE_id_rsa", SECRETS[-2].encode(), False)}
BESIDE |= {
    f"{name} is recorded": (name, b"whatever", True)
    for name in ("pytorch_model.bin", "evil.pkl", "modeling_evil.py", ".env", ".gitattributes", "secret.cfg")
}
BESIDE |= {"a password in the recipe": ("release.yaml", b"\n# http://me:" + b"s3cret@host:80/v1\n", False)}


@pytest.mark.parametrize(("name", "data", "recorded"), BESIDE.values(), ids=BESIDE)
def test_what_no_release_may_contain_is_not_published(hub: Hub, folder, monkeypatch, name, data, recorded):
    hub.tokens = {TOKEN}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    words = ("publish", folder, "org/head", "--tag", "v1", "--dry-run")
    assert kconv(*words).exit_code == 0
    (folder / name).write_bytes((folder / name).read_bytes() + data if (folder / name).exists() else data)
    if recorded:
        add_record(folder, name, data)
    assert kconv(*words).exit_code == 1


# Defect 8: YAML that is no YAMLError ended in a traceback, in each reader.

BAD_YAML = ("x: 2026-13-45", "x: !!int x", "x: !!bool maybe", "x: " + 5000 * "9", f"x: {3000 * '['}{3000 * ']'}")
FRONT = (*BAD_YAML, "model-index: text", "base_model: 5")
READERS = {
    "run": ("run", "FILE", "--dry-run"),
    "facts": ("card", "HEAD", "--facts", "FILE", "--no-chart"),
    "a recipe of quantizing": ("quantize", "HEAD", "OUT", "--recipe", "FILE"),
    "a recipe of training": ("train", "HEAD", "OUT", "--recipe", "FILE", "--data", "FILE"),
    "the floor": ("publish", "HEAD", "org/head", "--dry-run"),
    "front matter, checked": ("card", "HEAD", "--check"),
    "front matter, published": ("publish", "HEAD", "org/head", "--dry-run"),
}


@pytest.mark.parametrize("reader", READERS)
def test_yaml_with_a_wrong_value_is_named(hub: Hub, folder, tmp_path, reader):
    places, card = {"HEAD": folder, "FILE": tmp_path / "x.yaml", "OUT": tmp_path / "out"}, folder / "README.md"
    rest = card.read_text().partition("---\n")[2].partition("---\n")[2]
    if reader == "facts":
        without_card(folder)
    ended = []
    for text in FRONT if "front" in reader else BAD_YAML:
        if "front" in reader:
            card.write_text(f"---\n{text}\n---\n{rest}")
        else:
            (folder / "release.yaml" if reader == "the floor" else places["FILE"]).write_text(text)
        ran = CliRunner().invoke(main, [str(places.get(word, word)) for word in READERS[reader]])
        ended.append((text[:20], repr(ran.exception)[:200]))
    assert [one for one in ended if "SystemExit" not in one[1]] == []


# Defects 9 and 10: pipes and devices hung, large files took all memory.


NO_FILES = {
    "a pipe": ("config.json", "kconv.json", "model.safetensors.index.json"),
    "a device": ("kconv.json", "model.safetensors.index.json"), "a sparse file": ("kconv.json", "README.md", "NOTICE"),
}  # fmt: skip
READ_BY = {"kconv.json": ("verify",), "config.json": ("inspect",), "model.safetensors.index.json": ("inspect",)}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NO_FILES.items() for name in names])
def test_what_is_no_file_in_a_folder_is_neither_waited_for_nor_read_whole(folder, kind, name):
    (folder / name).unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(folder / name)
    elif kind == "a device":
        (folder / name).symlink_to("/dev/zero")
    else:
        with (folder / name).open("wb") as file:
            file.truncate(10 << 40)
    command, *more = READ_BY.get(name, ("card", "--check"))
    ended = alone(command, folder, *more, seconds=30)
    assert ended.named and ended.bytes < 1 << 30, ended


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "kconv.json", "model.safetensors"])
def test_99_mb_of_json_take_no_gigabytes(folder, name):
    text = b'{"x": [' + 33_000_000 * b"[]," + b"[]]}"
    if name == "model.safetensors":
        text = len(text).to_bytes(8, "little") + text
    (folder / name).write_bytes(text)
    ended = alone("verify" if name == "kconv.json" else "inspect", folder)
    assert ended.named and ended.bytes < 1 << 30, ended


# Defect 11: what a disk refuses, and two at once.


@pytest.mark.slow
def test_where_no_output_can_be_written_is_named(tiny_target, tmp_path):
    (tmp_path / "file").write_text("")
    text = "".join(json.dumps({"text": f"{number} " * 40}) + "\n" for number in range(60))
    (tmp_path / "text.jsonl").write_text(text)
    (tmp_path / "p.jsonl").write_text('{"prompt": "When opening a file, the"}\n')
    train = ("train", tiny_target, "OUT", "--recipe", "eagle3-gqa", "--data", tmp_path / "text.jsonl", *BRIEFLY)
    assert kconv(*(tmp_path / "head" if word == "OUT" else word for word in train)).exit_code == 0
    bench = ("bench", "--head", tmp_path / "head", "--target", tiny_target, "--suite", tmp_path / "p.jsonl",
             "--max-tokens", "8", "--out", "OUT")  # fmt: skip
    ended = {}
    for words, out in ((train, "file/out"), (bench, "file/out.json"), (train, 250 * "x")):
        ran = CliRunner().invoke(main, [str(tmp_path / out if word == "OUT" else word) for word in words])
        ended[words[0], out[:9]] = repr(ran.exception)
    # A long name may be written too.
    assert [one for one in ended.items() if "SystemExit(1)" not in one[1] and one[1] != "None"] == []


@pytest.mark.slow
def test_of_two_trainings_of_one_output_one_is_named_and_one_is_right(tiny_target, tmp_path):
    text = "".join(json.dumps({"text": f"{number} " * 40}) + "\n" for number in range(60))
    (tmp_path / "text.jsonl").write_text(text)
    code = "from kconv.cli import main; main()"
    words = [
        "train",
        tiny_target,
        tmp_path / "out",
        "--recipe",
        "eagle3-gqa",
        "--data",
        tmp_path / "text.jsonl",
        *BRIEFLY,
    ]
    words += ["--set", "steps=40", "--save-every", "1"]
    both = [
        subprocess.Popen([sys.executable, "-c", code, *map(str, words)], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [one.communicate()[1] for one in both]
    assert "Traceback" not in "".join(said), said
    assert sorted(one.returncode for one in both) == [0, 1]
    assert kconv("verify", tmp_path / "out").exit_code == 0


@pytest.mark.slow
def test_a_disk_that_fills_during_a_checkpoint_is_named(tiny_target, tmp_path):
    text = "".join(json.dumps({"text": f"{number} " * 40}) + "\n" for number in range(60))
    (tmp_path / "text.jsonl").write_text(text)
    words = [
        "train",
        tiny_target,
        tmp_path / "out",
        "--recipe",
        "eagle3-gqa",
        "--data",
        tmp_path / "text.jsonl",
        *BRIEFLY,
    ]
    ended = limited([*words, "--save-every", "1"], 900_000)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr, ended.stderr[-2000:]


# Defect 12: templates that raise, and names that speak to a terminal.

TEMPLATES = (
    "{{ raise_exception('roles must alternate') }}", "{{ messages[7].content.x }}", "{% if %}", "{{ x.y.z }}",
    "{{ 1 / 0 }}", pytest.param("{{ 'a' * 10 ** 10 }}", marks=pytest.mark.slow),
)  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_that_fails_or_grows_is_named(tiny_target, tmp_path, template):
    target = shutil.copytree(tiny_target, tmp_path / "target")
    for file in target.glob("chat_template*"):
        file.unlink()
    edit(target / "tokenizer_config.json", chat_template=template)
    (tmp_path / "p.jsonl").write_text('{"prompt": "When opening"}\n')
    words = ("states", target, tmp_path / "out", "--prompts", tmp_path / "p.jsonl", "--chat", "--captured", "1,3,5")
    if "10 **" in template:
        ended = alone(*words)
        assert ended.named and ended.bytes < 4 << 30, ended
    else:
        kconv(*words)


def test_names_of_a_strangers_speak_to_no_terminal(folder, tmp_path):
    evil = "\x1b]0;owned\x07\x1b[2J\x9b1m\u202e"
    head = tmp_path / "head-source"
    edit(head / "config.json", **{evil: evil})
    tensors = load_file(head / "model.safetensors")
    save_file(tensors | {evil: tensors["norm.weight"].clone()}, head / "model.safetensors")
    edit(folder / "kconv.json", **{evil: evil})
    for words in (("inspect", head), ("validate", head, "--for", "all"), ("verify", folder)):
        said = on_a_terminal([sys.executable, "-c", "from kconv.cli import main; main()", *map(str, words)])
        assert [one for one in ("\x1b]0;", "\x1b[2J", "\x9b", "\u202e", "\x07") if one in said] == [], words


# Defect 13a: values of another type in a target's files.


def test_a_target_whose_files_hold_other_types_is_named(tiny_target, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "When opening"}\n')
    ended = {}
    for number, (name, changes) in enumerate(
        [("config.json", {key: value})
         for key in ("hidden_size", "num_hidden_layers", "max_position_embeddings", "rope_scaling", "vocab_size",
                     "rms_norm_eps", "tie_word_embeddings", "eos_token_id", "num_attention_heads")
         for value in ("text", [], 1.5)]
        + [("tokenizer_config.json", {"model_max_length": "text"}), ("tokenizer_config.json", {"eos_token": 5}),
           ("tokenizer.json", {"model": None}), ("tokenizer.json", {"added_tokens": 5}),
           ("tokenizer.json", {"model": {}})]
    ):  # fmt: skip
        target = tmp_path / f"target-{number}"
        target.mkdir()
        for file in tiny_target.iterdir():
            (target / file.name).symlink_to(file)
        (target / name).unlink()
        (target / name).write_text(json.dumps(json.loads((tiny_target / name).read_text()) | changes))
        words = ("states", target, tmp_path / f"out-{number}", "--prompts", tmp_path / "p.jsonl", "--captured", "1,3,5")
        ended[name, str(changes)] = repr(CliRunner().invoke(main, [str(word) for word in words]).exception)
    assert [one for one in ended.items() if "SystemExit" not in one[1] and one[1] != "None"] == []


# Defect 15: what a server answers.


class Hostile(BaseHTTPRequestHandler):
    """A server with two counters; one of its answers is another than it should be."""

    answers: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        usual = {"/version": b'{"version": "0.32.0"}', "/v1/models": b'{"data": [{"id": "m"}]}', "/metrics": COUNTERS}
        body = (usual | self.answers).get(self.path, b"{}")
        self.send_response(200)
        if body != ENDLESS:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(OSError):
            for _ in range(3000 if body == ENDLESS else 1):
                self.wfile.write((1 << 20) * b" " if body == ENDLESS else body)

    def log_message(self, format, *args) -> None:
        pass


ENDLESS, COUNTER = b"endless", b'vllm:spec_decode_num_%s_total{engine="0",model_name="m"} %s\n'
COUNTERS = b"".join(COUNTER % (name, b"1") for name in (b"drafts", b"draft_tokens", b"accepted_tokens"))
ANSWERS = {
    "no UTF-8": ("/v1/models", b"\xff\xfe\x80"),
    "deep": ("/v1/models", 100_000 * b"["),
    "no number": ("/metrics", COUNTERS.replace(b" 1", b" abc")),
    "not a number": ("/metrics", COUNTERS.replace(b" 1", b" NaN")),
    "infinite": ("/metrics", COUNTERS.replace(b" 1", b" Inf")),
    "endless": ("/v1/models", ENDLESS),
}


@pytest.mark.parametrize(("path", "body"), ANSWERS.values(), ids=ANSWERS)
def test_a_server_that_answers_otherwise_is_named(folder, tmp_path, path, body):
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answers", (Hostile,), {"answers": {path: body}}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    words = ("bench", "--url", f"http://127.0.0.1:{server.server_port}", "--head", folder, "--suite",
             tmp_path / "p.jsonl", "--out", tmp_path / "o.json")  # fmt: skip
    try:
        if body == ENDLESS:
            ended = alone(*words)
            assert ended.named and ended.code == 1 and ended.bytes < 1 << 30, ended
        else:
            assert kconv(*words).exit_code == 1
    finally:
        server.shutdown()


@pytest.mark.parametrize("url", ["foo", "http://[::1", "http://me:s3cret@127.0.0.1:9"])
def test_an_address_that_is_none_is_named_and_no_password_shown(folder, tmp_path, url):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    ran = kconv("bench", "--url", url, "--head", folder, "--suite", tmp_path / "p.jsonl", "--out", tmp_path / "o.json")
    assert ran.exit_code != 0 and "s3cret" not in ran.output


def test_a_hubs_address_shows_no_password():
    ended = alone("inspect", "org/head", HF_ENDPOINT="http://me:s3cret@127.0.0.1:9", HF_HUB_OFFLINE="0")
    assert ended.named and ended.code == 1 and "s3cret" not in ended.said, ended


# Defect 16: of what a manifest says most was held against nothing.

CLAIMS = {
    "spec": lambda held: held["spec"].update(captured=[9, 9, 9]),
    "hints": lambda held: held["hints"].update(captured_are="inputs"),
    "captured_by": lambda held: held.update(captured_by="it is known"),
    "parameters": lambda held: held.update(parameters=5),
    "exact": lambda held: held.update(exact=False),
    "a source's shape": lambda held: held["tensors"][0]["sources"][0].update(shape=[1, 2]),
    "a tensor twice": lambda held: held["tensors"].append(held["tensors"][0]),
}


@pytest.mark.parametrize("change", CLAIMS.values(), ids=CLAIMS)
def test_what_a_manifest_says_is_held_against_the_head(folder, tmp_path, change):
    # How the source was read is known from the source alone.
    words = (
        "verify",
        folder,
        *([tmp_path / "head-source"] if change in (CLAIMS["hints"], CLAIMS["captured_by"]) else []),
    )
    assert kconv(*words).exit_code == 0
    held = json.loads((folder / "kconv.json").read_text())
    change(held)
    (folder / "kconv.json").write_text(json.dumps(held))
    assert kconv(*words).exit_code == 1


# Defect 17: what came meanwhile was overwritten.


def test_a_report_that_is_there_is_kept(folder, tmp_path):
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.md").write_text("mine")
    kconv("validate", folder, "--for", "all", "--out", tmp_path / "report")
    assert (tmp_path / "report" / "report.md").read_text() == "mine"


def test_what_another_run_wrote_meanwhile_is_kept(tiny_target, tmp_path, monkeypatch):
    (tmp_path / "p.jsonl").write_text('{"prompt": "When opening a file, the"}\n')
    out, root = tmp_path / "out.json", torch.rsqrt

    def meanwhile(*args, **words):
        out.write_text("theirs")
        return root(*args, **words)

    monkeypatch.setattr("torch.rsqrt", meanwhile)  # of each norm
    ran = kconv("calibrate", tiny_target, out, "--prompts", tmp_path / "p.jsonl")
    assert out.read_text() == "theirs" and ran.exit_code == 1


# Defect 18: what a killed run left stayed for ever.

KILLED = "import os; os.fsync = lambda _: os.kill(os.getpid(), {}); from kconv.cli import main; main()"


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_conversion_left_is_gone_after_the_next(folder, tmp_path, sent):
    out = tmp_path / "outs" / "out"
    words = ["to-vllm", str(tmp_path / "head-source"), str(out)]
    code = KILLED.format(int(sent))
    assert subprocess.run([sys.executable, "-c", code, *words], capture_output=True).returncode != 0
    if sent == signal.SIGKILL:
        assert list(out.parent.iterdir())
        kconv(*words)
    assert [file.name for file in out.parent.iterdir() if file != out] == []


# Defect 20: values that no model has.

VALUES = {
    "eos -2": {"eos_token_id": -2}, "bos 2^64": {"bos_token_id": 2**64}, "pad -2": {"pad_token_id": -2},
    "eps 0.9": {"rms_norm_eps": 0.9}, "theta 7": {"rope_theta": 7.0}, "3 positions": {"max_position_embeddings": 3},
    "factor 1e308": {"factor": 1e308}, "mscale 1.8e19": {"mscale": 1.8e19},
    "beta_slow > beta_fast": {"beta_slow": 64.0, "beta_fast": 1.0},
}  # fmt: skip
ROPE = ("rope_theta", "factor", "mscale", "beta_slow", "beta_fast")


@pytest.mark.parametrize("change", VALUES.values(), ids=VALUES)
def test_a_value_that_no_model_has_is_not_passed_as_clean(folder, tmp_path, change):
    source, out = tmp_path / "head-source", tmp_path / "out"
    held = json.loads((source / "config.json").read_text())
    for place in (held, held["rope_scaling"], held["rope_parameters"]):
        # In each place that states it.
        place |= {key: value for key, value in change.items() if place is held or key in ROPE}
    (source / "config.json").write_text(json.dumps(held))
    ran = kconv("to-vllm", source, out)
    assert ran.exit_code == 1 or found_in(out) - found_in(folder), ran.output


# Defect 21: names and terminals of other encodings.


@pytest.mark.parametrize("command", ["inspect", "validate"])
def test_a_name_is_shown_where_stdout_has_no_utf8(folder, tmp_path, command):
    folder.rename(tmp_path / "ö€")
    ended = alone(command, tmp_path / "ö€", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert ended.code == 0 and ended.named, ended


def test_a_card_of_a_folder_whose_name_is_no_utf8_is_written_or_named(folder, tmp_path):
    other = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")
    without_card(folder).rename(other)
    assert alone("card", other, *WITH_LICENSE, "--no-chart").named


def test_a_nul_in_a_path_is_named(tmp_path):
    assert kconv("run", write_recipe(tmp_path, "a\0b"), "--out", tmp_path / "out").exit_code == 1


# Defect 22: memory by a stranger's numbers.


@pytest.mark.slow
def test_of_a_prompt_of_100_mb_no_more_is_held_than_is_read(tiny_target, tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": 50_000_000 * "a "}) + "\n")
    words = ("states", tiny_target, tmp_path / "out", "--prompts", tmp_path / "p.jsonl", "--captured", "1,3,5")
    ended = alone(*words, "--text-tokens", "8", seconds=120)
    assert ended.named and ended.bytes < 2 << 30, ended


@pytest.mark.slow
@pytest.mark.parametrize("what", ["--expand", "--rebuild-t2d"])
def test_a_vocabulary_is_not_made_by_a_strangers_number(folder, tmp_path, what):
    source = tmp_path / "head-source"
    tensors = load_file(source / "model.safetensors")
    reduced = {"d2t": torch.arange(32), "lm_head.weight": tensors["lm_head.weight"][:32].clone()}
    tensors = {name: tensor for name, tensor in tensors.items() if "embed_tokens" not in name} | reduced
    save_file(tensors, source / "model.safetensors")
    edit(source / "config.json", vocab_size=2**31 - 1, draft_vocab_size=32)
    ended = alone("vocab", source, tmp_path / "out", what)
    assert ended.named and ended.bytes < 1 << 30, ended
