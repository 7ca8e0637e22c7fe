"""The package as a whole: its folders, the names in its root, and what starting it loads and costs."""

import json
import pydoc
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kconv
from kconv.operations import load

ROOT = Path(__file__).parent.parent
NOT_PRODUCT = {"tests", "scripts", "docs", "examples", "build", "dist", "demo", "__pycache__"}
HELP = "from kconv.cli import main; main(['--help'], standalone_mode=False)"
HEAVY = {"torch", "transformers", "modelopt", "safetensors", "numpy", "huggingface_hub", "pydantic"}


def folders() -> list[Path]:
    """Return the folders of the root that may hold product code."""
    there = [folder for folder in ROOT.iterdir() if folder.is_dir() and folder.name not in NOT_PRODUCT]
    return sorted(folder for folder in there if not folder.name.startswith(".") and folder.suffix != ".egg-info")


def test_every_folder_of_sources_is_a_package_and_is_installed():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    sources = {file.parent for folder in folders() for file in folder.rglob("*.py")}
    assert {".".join(["kconv", *folder.relative_to(ROOT).parts]) for folder in sources} | {"kconv"} == listed
    assert not [folder for folder in sources if not (folder / "__init__.py").exists()]


def test_every_model_is_strict():
    """Only the base derives from pydantic's own, so no model accepts unknown keys or changes once it was read."""
    sources = [file for folder in folders() for file in folder.rglob("*.py")]
    assert len(sources) > 200
    assert [file for file in sources if "(BaseModel" in file.read_text()] == []


def test_nothing_in_the_root_bears_a_name_of_the_standard_library():
    # Python puts the folder of a script on the path, and the root holds scripts' working directory.
    names = {file.stem for file in ROOT.glob("*.py")} | {folder.name for folder in folders()}
    assert {"errors", "checkpoint", "cli"} <= names and not names & sys.stdlib_module_names


def _loads(code: str) -> set[str]:
    """Return the packages that running code in a fresh interpreter loads."""
    code = f"{code}; import sys; print(*sorted(sys.modules), file=sys.stderr)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in ran.stderr.split()}


@pytest.mark.parametrize("code, loads", [(HELP, "click"), ("import kconv", "kconv")], ids=["help", "import"])
def test_a_start_loads_nothing_heavy(code, loads):
    loaded = _loads(code)
    assert loads in loaded and not loaded & HEAVY


def _cost(code: str) -> float:
    """Return the CPU seconds of running code in a fresh interpreter: the best of five, as machines are shared."""
    costs = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        costs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(costs)


def test_help_costs_no_more_than_five_times_the_import_of_click():
    assert _cost(HELP) <= 5 * _cost("import click")


def test_measuring_a_server_needs_no_transformers():
    # A plain installation has none (pip install without the extra), and its server does the tokenizing.
    assert "transformers" not in _loads("import kconv.bench.measure, kconv.operations.bench")


CALLS = """\
import kconv

kconv.validate("head", source="other", for_="vllm")
kconv.convert("head", "out", to="vllm", captured=[1, 29, 57])
reveal_type(kconv.inspect("head"))
kconv.validate("head", sourc="other")
kconv.convert("head", "out", to="vllm", target_layers="61")
"""


def test_a_type_checker_knows_each_function(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "kconv").symlink_to(ROOT)
    (tmp_path / "calls.py").write_text(CALLS)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard", "extraPaths": ["site"]}')
    checker = [Path(sys.executable).parent / "basedpyright", "--pythonpath", sys.executable, "--outputjson"]
    ran = subprocess.run([*checker, "calls.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    found = json.loads(ran.stdout)["generalDiagnostics"]
    said = {one["range"]["start"]["line"] + 1: one["message"] for one in found if one["severity"] != "warning"}
    assert list(said) == [5, 6, 7]
    assert 'is "Inspected"' in said[5] and '"sourc"' in said[6] and '"target_layers"' in said[7]


def test_help_shows_the_function_and_each_option():
    """Also of an operation that shares its name with a package."""
    for name in ("convert", "verify"):
        text = pydoc.render_doc(getattr(kconv, name), renderer=pydoc.plaintext)
        assert re.search(rf"\b{name}\(head: \S+, .*\) -> \w+$", text, re.MULTILINE)
        assert all(re.search(rf"^ +{option}: \S.*\.$", text, re.MULTILINE) for option in load(name).model_fields)


def test_a_function_that_is_a_command_alone_names_the_one_to_call():
    with pytest.raises(AttributeError, match=r"write kconv\.convert\(HEAD, OUT, to='vllm'\)"):
        _ = kconv.to_vllm
