"""Text that every machine already has: the standard library's docstrings and Python's reference topics."""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import TrainingFailed

# Some Python distributions put these into separate packages, so not every machine has them.
OPTIONAL_MODULES = frozenset({"distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtle", "turtledemo"})
SHORTEST = 40  # characters; below it a docstring is a label, not a text
FEWEST = 1000  # documents; a Python 3.11 has about 4,000
HELD_OUT = 0.05  # share of the documents

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Corpus:
    """The documents, split; no document occurs twice, and no paragraph of a held-out one occurs in a trained one.

    Somewhat less than `HELD_OUT` of all documents are held out.
    """

    train: tuple[str, ...]
    held_out: tuple[str, ...]


@functools.cache
def read_corpus() -> Corpus:
    """Read this Python's own documentation; the result is the same for each run of one Python version.

    No module is imported: the sources are only parsed. Each document's sha256 decides the order and the split. Help
    topics contain one another, and docstrings are copied from class to class, so a document is not held out if one of
    its paragraphs is also trained on.

    Raises:
        TrainingFailed: this Python has no sources of its standard library.
    """
    documents = {text.strip() for text in _read_texts()}
    ranked = sorted((hashlib.sha256(d.encode()).digest(), d) for d in documents if len(d) >= SHORTEST)
    if len(ranked) < FEWEST:
        raise TrainingFailed(
            f"only {len(ranked)} docstrings of the standard library were found, but {FEWEST} are needed",
            where=sysconfig.get_path("stdlib"),
            fix="Use a Python that was installed with the sources (*.py) of its standard library.",
        )
    threshold = int(HELD_OUT * 2**32).to_bytes(4, "big")
    train = tuple(d for rank, d in ranked if rank[:4] >= threshold)
    trained = {paragraph for d in train for paragraph in _paragraphs(d)}
    held_out = tuple(d for rank, d in ranked if rank[:4] < threshold and trained.isdisjoint(_paragraphs(d)))
    return Corpus(train, held_out)


def _paragraphs(document: str) -> set[str]:
    """Return a document's paragraphs that are long enough to identify it, each on one line."""
    parts = (" ".join(part.split()) for part in document.split("\n\n"))
    return {part for part in parts if len(part) >= SHORTEST}


def _read_texts() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    for module in sorted(sys.stdlib_module_names - OPTIONAL_MODULES):
        for file in [library / f"{module}.py", *sorted((library / module).rglob("*.py"))]:
            if file.exists() and not {"test", "tests"} & set(file.relative_to(library).parts):
                yield from _read_docstrings(file)
    topics = library / "pydoc_data" / "topics.py"
    if topics.exists():
        yield from _read_topics(topics)


def _parse(file: Path) -> ast.Module:
    with warnings.catch_warnings():
        # Some sources hold invalid escapes, which do not matter for reading docstrings.
        warnings.simplefilter("ignore")
        return ast.parse(file.read_bytes())


def _read_docstrings(file: Path) -> Iterator[str]:
    for node in ast.walk(_parse(file)):
        if isinstance(node, _DOCUMENTED):
            yield ast.get_docstring(node) or ""


def _read_topics(file: Path) -> Iterator[str]:
    """Yield the texts of `help("topics")`: the file assigns one dict of them."""
    for node in ast.walk(_parse(file)):
        if isinstance(node, ast.Dict):
            yield from ast.literal_eval(node).values()
