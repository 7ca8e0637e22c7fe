"""`kconv demo` where nobody sees a bar."""

import sys
from types import SimpleNamespace

from click.testing import CliRunner

from kconv.cli import main, others
from kconv.pipeline import demo


def test_a_log_names_each_stage_when_it_begins(tmp_path, monkeypatch):
    def run_demo(out, cache, stage):
        with stage("target: training"):
            print("at work", file=sys.stderr)
        return []

    monkeypatch.setattr(demo, "run_demo", run_demo)
    monkeypatch.setattr(others, "_show_demo", lambda *_, **__: None)
    done = CliRunner().invoke(main, ["demo", str(tmp_path / "out")])
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.startswith("target: training\nat work\n")


def test_the_real_one_is_the_script_of_a_clone(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(others.subprocess, "run", lambda words: asked.append(words) or SimpleNamespace(returncode=3))
    done = CliRunner().invoke(main, ["demo", str(tmp_path), "--real"])
    assert done.exit_code == 3
    # --work may be there: the script goes on in it.
    assert asked == [[sys.executable, others.REAL, "--quick", "--work", tmp_path]]
    assert others.REAL.exists()


def test_an_installed_package_has_no_real_one_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(others, "REAL", tmp_path / "real")
    done = CliRunner().invoke(main, ["demo", str(tmp_path), "--real"])
    assert done.exit_code == 1
    assert "in a clone" in done.stderr


def test_the_real_one_prints_no_json(tmp_path):
    assert CliRunner().invoke(main, ["demo", str(tmp_path), "--real", "--json"]).exit_code == 2
