"""How kconv was installed: the command that brings an extra, and the digest of the code."""

import json
import shlex
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kconv import installed

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Recorded(Distribution):
    """An installation of which only pip's record matters."""

    def __init__(self, record: str | None) -> None:
        self.record = record

    def read_text(self, filename: str) -> str | None:
        return self.record if filename == "direct_url.json" else None

    def locate_file(self, path: object) -> Path:
        raise NotImplementedError


def command(monkeypatch: pytest.MonkeyPatch, record: object) -> str:
    text = record if record is None or isinstance(record, str) else json.dumps(record)
    monkeypatch.setattr(installed, "distribution", lambda _: Recorded(text))
    return installed.install_command("optimize")


def test_from_an_index(monkeypatch):
    assert command(monkeypatch, None) == "pip install 'kconv[optimize]'"


@pytest.mark.parametrize("editable", [True, False])
def test_from_a_clone_whose_path_has_a_space(monkeypatch, tmp_path, editable):
    clone = tmp_path / "my clone"
    clone.mkdir()
    record = {"url": clone.as_uri(), "dir_info": {"editable": True} if editable else {}}
    words = shlex.split(command(monkeypatch, record))
    assert words == ["pip", "install", *(["-e"] if editable else []), f"{clone}[optimize]"]


def test_from_a_wheel_and_from_a_commit(monkeypatch, tmp_path):
    wheel = tmp_path / "kconv-0.1.0-py3-none-any.whl"
    wheel.touch()
    record = {"url": wheel.as_uri(), "archive_info": {}}
    vcs = {"url": "https://example.org/k.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}}
    for one, url in ((record, wheel.as_uri()), (vcs, f"git+https://example.org/k.git@{COMMIT}")):
        # As pip itself reads it.
        wanted = Requirement(shlex.split(command(monkeypatch, one))[-1])
        assert (wanted.name, wanted.extras, wanted.url) == ("kconv", {"optimize"}, url)


def test_a_clone_that_is_gone_and_no_installation(monkeypatch, tmp_path):
    assert command(monkeypatch, {"url": (tmp_path / "gone").as_uri(), "dir_info": {}}).endswith("in a clone of kconv")

    def missing(_: str) -> Distribution:
        raise PackageNotFoundError("kconv")

    monkeypatch.setattr(installed, "distribution", missing)
    assert installed.install_command("plots") == "pip install '.[plots]' in a clone of kconv"


def test_a_record_that_cannot_be_read_counts_as_none(monkeypatch):
    assert command(monkeypatch, "{") == command(monkeypatch, "[]") == "pip install 'kconv[optimize]'"


def test_the_digest_of_the_code_changes_with_the_code_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(installed, "__file__", str(tmp_path / "installed.py"))
    for name in ("installed.py", "tiny/__init__.py", "tiny/parts/target.py", "train/__init__.py", "tests/test_it.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")

    def digests():
        return [installed.sources_digest.__wrapped__(*names) for names in ((), ("tiny",), ("train", "installed.py"))]

    before = digests()
    assert len(set(before)) == 3
    (tmp_path / "tests" / "test_it.py").write_text("x = 2\n")
    assert digests() == before
    (tmp_path / "tiny" / "parts" / "target.py").write_text("x = 2\n")
    assert [a == b for a, b in zip(digests(), before, strict=True)] == [False, False, True]
