"""What a folder holds, for tests that say that nothing was left or touched; and the files of the package itself."""

import ast
from pathlib import Path

import kconv

ROOT = Path(kconv.__file__).parent
# By package, since environments beside them may be in the making; sorted, so that all workers collect the same.
_PACKAGES = [one.parent for one in ROOT.glob("*/__init__.py")]
PRODUCT = sorted([*ROOT.glob("*.py"), *(file for package in _PACKAGES for file in package.rglob("*.py"))])


def calls(file: Path) -> list[str]:
    """Return what a file's code calls, as it is written there."""
    return [ast.unparse(node.func) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]


def names(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; hidden ones too."""
    return sorted(path.name for path in folder.iterdir())
