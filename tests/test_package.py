"""The package as a whole: its folders, the names in its root, and what starting it loads and costs."""

import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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
