"""`kconv env`: what a bug report needs, and nothing of the user's."""

import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner

import kconv
from kconv.cli import main
from kconv.operations import env

SECRET = "hf_" + "not-to-be-shown" * 2


def say(*words: str, **variables: str):
    return CliRunner().invoke(main, ["env", *words], env=variables)


def test_it_names_versions_and_the_machine():
    done = say("--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and found["kconv"].startswith(version("kconv"))
    assert found["python"].startswith(platform.python_version())
    assert found["libraries"]["torch"] == version("torch")
    # The kernel's own count, of which `getconf` tells too.
    pages = os.popen("getconf _PHYS_PAGES").read()
    assert found["machine"]["memory_gib"] == pytest.approx(int(pages) * 4096 / 2**30, rel=0.1)
    assert found["machine"]["cores"].endswith(str(os.cpu_count()))
    shown = say().stdout
    assert version("torch") in shown and "none found" in shown


def test_it_shows_no_path_no_name_and_no_value():
    done = say(HF_TOKEN=SECRET, HF_ENDPOINT="https://hub.internal", KCONV_CACHE="/home/somebody/cache")
    for private in (SECRET, "hub.internal", "somebody", str(Path.home()), str(Path.cwd()), platform.node()):
        assert private not in done.output
    assert "HF_TOKEN" in done.stdout and "KCONV_CACHE" in done.stdout


def test_engines_are_found_in_an_environment_of_their_own(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'vllm=0.32.0 tensorrt-llm=1.2.0 torch=9'\n")
    python.chmod(0o755)
    found = kconv.env(engine_python=(str(python),))
    assert found.engines == {"vllm": "0.32.0", "tensorrt_llm": "1.2.0"}
    assert "torch" in env._packages(sys.executable)


def test_what_is_no_python_is_named(tmp_path):
    done = say("--engine-python", str(tmp_path / "gone"))
    assert done.exit_code == 2 and "gone does not run as Python" in done.output
