"""The architecture: which room may import which, what the command line may load, and what it may cost."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.house import MAY_IMPORT, breaches, product_files

ROOT = Path(__file__).parent.parent
HELP = "from kconv.cli import main; main(['--help'], standalone_mode=False)"


def test_the_house_holds():
    assert breaches(ROOT) == []


def test_the_check_sees_the_whole_house():
    seen = {str(file.relative_to(ROOT)) for file in product_files(ROOT)}
    assert {"__init__.py", "errors.py", "checkpoint/header.py", "engines/vllm.py", "cli/convert.py"} <= seen
    assert not {name for name in seen if name.startswith(("tests/", "scripts/", "."))}


@pytest.fixture
def house(tmp_path):
    """A small house that holds: each room a package, and one import of every allowed kind."""
    files = {
        "__init__.py": '"""The package."""\n',
        "errors.py": "class Fault(Exception): ...\n",
        "checkpoint/header.py": "import json\nfrom ..errors import Fault\n",
        "checkpoint/hub.py": "import huggingface_hub\n",
        "head/spec.py": "from ..checkpoint.header import json\n",
        "targets/states.py": "import torch\nfrom ..checkpoint import header\n",
        "targets/model.py": "from .states import torch\n",
        "convert/plan.py": "from ..head.spec import Fault\nfrom ..target.states import torch\n",
        "engines/launch.py": "",
        "engines/vllm.py": "from ...errors import Fault\nfrom ..plan import torch\n",
        "train/trainer.py": "def go():\n    import modelopt.torch\n    from ..convert.plan import torch\n",
        "validate/report.py": "from ..target.model import torch\n",
        "cards/card.py": "from ..convert.launch import x\nfrom ..validate import report\n",
        "cards/publish.py": "from huggingface_hub import HfApi\n",
        "tiny/target.py": "from ..target.model import torch\n",
        "quantize/formats.py": "from modelopt.torch import x\n",
        "pipeline/release.py": "from ..cards.card import x\nfrom ..tiny import target\n",
        "cli/convert.py": "def go():\n    from ..pipeline.release import x\n",
        "tests/test_it.py": "import modelopt\nimport kconv.convert.plan\n",
        ".venv/lib/other.py": "from kconv import x\n",
    }
    packages = {"kconv"}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for folder in path.relative_to(tmp_path).parents:
            if folder.parts and folder.parts[0] not in ("tests", ".venv"):
                (tmp_path / folder / "__init__.py").touch()
                packages.add(".".join(("kconv", *folder.parts)))
    (tmp_path / "pyproject.toml").write_text(f"[tool.setuptools]\npackages = {json.dumps(sorted(packages))}\n")
    return tmp_path


def test_a_sound_house_has_no_breaches(house):
    assert breaches(house) == []


ARROWS = {
    "errors imports a room": ("errors.py", "from .checkpoint.header import json", "checkpoint.header"),
    "checkpoint looks up": ("checkpoint/header.py", "from ..head.spec import x", "head.spec"),
    "head imports target": ("head/spec.py", "from ..target.states import torch", "target.states"),
    "target imports head": ("targets/model.py", "from ..head import spec", "head.spec"),
    "convert imports more of target": ("convert/plan.py", "from ..target.model import torch", "target.model"),
    "convert imports a room's package": ("convert/plan.py", "from .. import target", "target"),
    "a deeper folder counts its dots": ("engines/vllm.py", "from ...train.trainer import go", "train.trainer"),
    "train imports validate": ("train/trainer.py", "from ..validate.report import x", "validate.report"),
    "validate imports the packer": ("validate/report.py", "from ..quantize import nvfp4", "quantize"),
    "cards import the plan": ("cards/card.py", "from ..convert.plan import x", "convert.plan"),
    "tiny imports convert": ("tiny/target.py", "from ..convert import plan", "convert.plan"),
    "quantize imports train": ("quantize/formats.py", "from ..train.trainer import go", "train.trainer"),
    "pipeline imports cli": ("pipeline/release.py", "from ..cli.convert import go", "cli.convert"),
    "inside a function": ("head/spec.py", "def f():\n    from ..convert.plan import x", "convert.plan"),
    "for types only": ("head/spec.py", "if TYPE_CHECKING:\n    from ..cli import convert", "cli.convert"),
    "the root itself": ("head/spec.py", "from .. import __doc__", "the root"),
}


@pytest.mark.parametrize("file, code, name", ARROWS.values(), ids=ARROWS)
def test_a_broken_arrow_is_found(house, file, code, name):
    path = house / file
    path.write_text(path.read_text() + code + "\n")
    (found,) = breaches(house)
    assert found.startswith(f"{file}:") and found.endswith(f"may not import {name}")


OTHERS = {
    "modelopt in convert": ("convert/plan.py", "import modelopt.torch.export as e", "modelopt belongs in"),
    "modelopt in cli": ("cli/convert.py", "from modelopt import torch", "modelopt belongs in"),
    "modelopt by name": ("convert/plan.py", "importlib.import_module('modelopt.torch')", "modelopt belongs in"),
    "the hub in the card": ("cards/card.py", "import huggingface_hub", "huggingface_hub belongs in"),
    "the hub in cli": ("cli/convert.py", "from huggingface_hub import x", "huggingface_hub belongs in"),
    "kconv by its name": ("convert/plan.py", "from kconv.head import spec", "relatively"),
    "kconv as a module": ("cli/convert.py", "import kconv", "relatively"),
    "code in the root": ("__init__.py", "VERSION = 1", "more than a docstring"),
    "an import in the root": ("__init__.py", "import json", "more than a docstring"),
}


@pytest.mark.parametrize("file, code, phrase", OTHERS.values(), ids=OTHERS)
def test_a_misplaced_library_or_root_is_found(house, file, code, phrase):
    path = house / file
    path.write_text(path.read_text() + code + "\n")
    (found,) = breaches(house)
    assert found.startswith(file) and phrase in found


def test_a_root_module_with_a_standard_name_is_found(house):
    (house / "json.py").write_text("")
    assert "json: bears a name of the standard library" in breaches(house)


def test_an_unknown_room_is_found(house):
    (house / "helpers").mkdir()
    (house / "helpers" / "__init__.py").write_text("from ..convert import plan\n")
    assert "helpers/__init__.py: helpers is no room of the house" in breaches(house)


def test_packages_that_differ_from_the_folders_are_found(house):
    (house / "head" / "new").mkdir()
    (house / "head" / "new" / "part.py").write_text("")
    pyproject = house / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('"kconv.tiny"', '"kconv.gone"'))
    assert breaches(house) == [
        "pyproject.toml: packages lacks kconv.head.new",
        "pyproject.toml: packages lacks kconv.tiny",
        "pyproject.toml: packages lists kconv.gone, which is not there",
        "kconv.head.new: has no __init__.py",
    ]


def test_every_room_has_its_arrows():
    rooms = {file.relative_to(ROOT).parts[0] for file in product_files(ROOT) if file.parent != ROOT}
    assert rooms <= MAY_IMPORT.keys()


def test_help_loads_nothing_heavy():
    code = f"{HELP}; import sys; print(*sorted(sys.modules), file=sys.stderr)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in shown.stderr.split()}
    assert "click" in loaded and "Usage:" in shown.stdout
    assert not loaded & {"torch", "transformers", "modelopt", "safetensors", "numpy", "huggingface_hub", "pydantic"}


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
