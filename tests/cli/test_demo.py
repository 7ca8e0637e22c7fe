"""`kconv demo` where nobody sees a bar."""

import sys

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
