"""The architecture as a checker: which room may import which, read from the sources without importing them."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Room: what it may import beside itself and errors. A dotted entry is that module alone.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "charts": set(),
    "checkpoint": set(),
    "head": {"checkpoint"},
    "target": {"checkpoint"},
    "convert": {"checkpoint", "head", "target.states"},
    "quantize": {"checkpoint", "target", "head", "convert"},
    "train": {"charts", "checkpoint", "head", "target", "convert"},
    "validate": {"charts", "checkpoint", "head", "target", "convert", "quantize.formats"},
    "cards": {"charts", "checkpoint", "convert.launch", "validate.acceptance", "validate.figures", "validate.report"},
    "tiny": {"checkpoint", "target"},
}
MAY_IMPORT["pipeline"] = MAY_IMPORT.keys() | set()
MAY_IMPORT["cli"] = MAY_IMPORT.keys() | set()
# Third party: the only rooms or modules that may import it.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "modelopt": ("quantize", "train"),
    "huggingface_hub": ("checkpoint", "cards.publish", "cards.front_matter"),
}
NOT_PRODUCT = {"tests", "scripts", "docs", "build", "dist", "demo", "__pycache__"}


@dataclass(frozen=True)
class Import:
    """An import statement: where it stands, and what it names, dotted; relative ones resolved from the root."""

    file: str
    line: int
    name: str
    relative: bool


def product_files(root: Path) -> list[Path]:
    """Return the sources of the package, which is the root itself without tests, scripts and hidden folders."""
    rooms = [p for p in root.iterdir() if p.is_dir() and p.name not in NOT_PRODUCT and not p.name.startswith(".")]
    return sorted([*root.glob("*.py"), *(file for room in rooms for file in room.rglob("*.py"))])


def module_name(root: Path, file: Path) -> str:
    """Return a source's dotted name below the root, e.g. "convert.plan"; a package's is its folder's."""
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(root: Path, file: Path) -> Iterator[Import]:
    """Yield every import of a source, at whatever depth it stands."""
    where = str(file.relative_to(root))
    package = file.relative_to(root).parts[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(where, node.lineno, alias.name, False)
            case ast.ImportFrom(level=0, module=module):
                yield Import(where, node.lineno, module or "", False)
            case ast.ImportFrom(level=level, module=module, names=names):
                base = [*package[: len(package) + 1 - level], *(module.split(".") if module else [])]
                for alias in names:
                    inner = root.joinpath(*base, alias.name)
                    is_module = inner.is_dir() or inner.with_suffix(".py").exists()
                    yield Import(where, node.lineno, ".".join([*base, alias.name] if is_module else base), True)
            case ast.Call(
                func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=str(module)), *_]
            ):
                if name in ("import_module", "__import__"):
                    yield Import(where, node.lineno, module, False)


def _within(name: str, places: set[str] | tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def broken_arrows(root: Path) -> list[str]:
    """Return each relative import that its room's arrows do not allow, and each room that has no arrows."""
    breaches = []
    for file in product_files(root):
        room = module_name(root, file).split(".")[0]
        if room and room not in MAY_IMPORT:
            breaches.append(f"{file.relative_to(root)}: {room} is no room of the house")
            continue
        allowed = {"errors", room} | MAY_IMPORT[room] if room else set()
        if room == "errors":
            allowed = {"errors"}
        breaches += [
            f"{found.file}:{found.line}: {room} may not import {found.name or 'the root'}"
            for found in imports(root, file)
            if found.relative and not _within(found.name, allowed)
        ]
    return breaches


def broken_third_party(root: Path) -> list[str]:
    """Return each import of a library outside the rooms that are there for it, and each absolute one of kconv."""
    breaches = []
    for file in product_files(root):
        for found in imports(root, file):
            library = found.name.split(".")[0]
            if found.relative:
                continue
            if library == "kconv":
                breaches.append(f"{found.file}:{found.line}: {found.name} should be imported relatively")
            elif library in ONLY_IN and not _within(module_name(root, file), ONLY_IN[library]):
                breaches.append(f"{found.file}:{found.line}: {library} belongs in {', '.join(ONLY_IN[library])}")
    return breaches


def broken_root(root: Path) -> list[str]:
    """Return what is wrong with the root: code beside its docstring, or a name of the standard library."""
    breaches = []
    body = ast.parse((root / "__init__.py").read_text()).body
    if len(body) != 1 or not isinstance(body[0], ast.Expr) or not isinstance(body[0].value, ast.Constant):
        breaches.append("__init__.py: holds more than a docstring")
    top = {file.relative_to(root).parts[0].removesuffix(".py") for file in product_files(root)}
    return breaches + [
        f"{name}: bears a name of the standard library" for name in sorted(top & sys.stdlib_module_names)
    ]


def broken_packages(root: Path) -> list[str]:
    """Return each folder of sources that pyproject's `packages` lacks, or lists in vain, or that is no package."""
    listed = set(tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {file.parent for file in product_files(root)}
    names = {".".join(["kconv", *folder.relative_to(root).parts]): folder for folder in folders}
    return [
        *(f"pyproject.toml: packages lacks {name}" for name in sorted(names.keys() - listed)),
        *(f"pyproject.toml: packages lists {name}, which is not there" for name in sorted(listed - names.keys())),
        *(
            f"{name}: has no __init__.py"
            for name, folder in sorted(names.items())
            if not (folder / "__init__.py").exists()
        ),
    ]


def breaches(root: Path) -> list[str]:
    """Return every breach of the architecture below a root."""
    return [*broken_arrows(root), *broken_third_party(root), *broken_root(root), *broken_packages(root)]
