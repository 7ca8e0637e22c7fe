"""Every regular expression of the product takes linear time, whatever text a stranger gives it.

Each is collected from the source, and given texts made of its own parts: a part repeated, behind a beginning that it
accepts, and before an end that it does not.
"""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from re import _constants as op  # pyright: ignore
from re import _parser as parser  # pyright: ignore
from typing import Any

import pytest
from support.fuzzing import LINEAR, growth
from support.listing import PRODUCT, ROOT

from kconv.bench import forged, golden
from kconv.cards import license_checks, licenses, quickstart
from kconv.cards.publish import secrets
from kconv.engines.registry import engines
from kconv.validate import report
from kconv.validate.rules import target

# Characters in the smaller of two texts; in each text a part is repeated until it has as many.
SIZE = 1000
# To go on behind a match costs as much as to find every one.
METHODS: dict[str, Callable[[re.Pattern[Any], Any], object]] = {
    "match": re.Pattern.match,
    "fullmatch": re.Pattern.fullmatch,
    **dict.fromkeys(
        ("search", "findall", "finditer", "sub", "subn", "split"),
        lambda pattern, text: deque(pattern.finditer(text), 0),
    ),
}
# By file: the patterns that a function puts together, by the method that they are used with.
PUT_TOGETHER: dict[str, Iterable[tuple[str, str]]] = {
    "bench/forged.py": [
        ("search", name + forged._VALUE) for one in engines() if one.sampling for name in one.sampling.forging
    ],
    "bench/golden.py": [
        ("search", rf"(?m)^# .*\b{golden.METHODS[0]}=(\w+)"),
        ("search", rf"(?m)^# thinking_on ?:.*?{golden.TEMPERATURE}"),
        ("search", rf"(?m)^# dataset:.*?{golden.TEMPERATURE}"),
        ("search", "(?m)" + golden.MEASURED_ON.format(titles="vLLM|SGLang|TensorRT-LLM")),
    ],
    "cards/license_checks.py": [("search", f"(?i){one}") for one in license_checks.ENDORSED],
    "cards/licenses.py": [("search", mark) for license_ in licenses._ALL for mark in license_.marks],
    "cards/publish/secrets.py": [],  # see `test_a_secret_is_looked_for_in_linear_time`
    "cards/quickstart.py": [
        ("findall", quickstart.name_after(before))
        for before in ("vllm serve ", f'vllm serve {quickstart.MARKS[1]} --speculative-config \'{{"model": "')
    ],
    "validate/report.py": [("sub", report._paths(("/home/a/", "/home/a/b", "../c/d")).pattern)],
    "validate/rules/target.py": [
        found
        for entries in (("*a*a*b",), ("model.layers.*", "re:.*mlp.*"), ("lm_head", "*.mlp.gate"))
        for excludes in (target.Excludes(entries),)
        for found in (("search", excludes._any.pattern), ("fullmatch", excludes._whole.pattern))
    ],
}
# Patterns that are handed on, with the method that they are used with there: to `Starter.cause`, in a loop, to PyYAML.
HANDED_ON = {
    "engines/vllm.py": "match",
    "engines/sglang.py": "match",
    "bench/golden.py": "search",
    "checkpoint/schema.py": "match",
}


@dataclass(frozen=True)
class Use:
    """A pattern, where it stands, and how it is used."""

    file: str
    line: int
    pattern: re.Pattern[Any]
    method: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.method}"


SOURCES = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in PRODUCT}
# Those that may hold a pattern, or use one that they import.
TREES = {
    file: ast.parse(text) for file, text in SOURCES.items() if re.search(rf"\.({'|'.join(METHODS)})\(|re\.c", text)
}


class Names(dict):
    """The constants of a module, each worked out from the source when it is asked for: imports would take a minute."""

    def __init__(self, file: str) -> None:
        self.file, self.assigned, self.imported = file, {}, {}
        for node in (TREES.get(file) or ast.parse(SOURCES[file])).body:
            if isinstance(node, ast.Assign):
                self.assigned |= {ast.unparse(target): node.value for target in node.targets}
            elif isinstance(node, ast.ImportFrom) and node.level:
                folder = Path(file).parents[node.level - 1] / (node.module or "").replace(".", "/")
                self.imported |= {alias.asname or alias.name: (f"{folder}.py", alias.name) for alias in node.names}
        for names in [one for one in self.assigned if "," in one]:
            values = getattr(self.assigned[names], "elts", ())
            self.assigned |= dict(zip(names.strip("()").split(", "), values, strict=False))

    def __missing__(self, name: str) -> Any:
        if name in self.assigned:
            return self.value(self.assigned[name])
        if name in self.imported and self.imported[name][0] in SOURCES:
            file, other = self.imported[name]
            return names_of(file)[other]
        raise KeyError(name)

    def value(self, node: ast.expr) -> Any:
        return eval(ast.unparse(node), {"re": re}, self)


names_of = cache(Names)


def calls_of_re(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re."):
            method = ast.unparse(node.func).removeprefix("re.")
            if method in ("compile", *METHODS):
                yield method, node


def methods_of(file: str, name: str) -> set[str]:
    """Return how a constant of a module is used, there and where it is imported."""
    found = set()
    for other, tree in TREES.items():
        imported = {known for known, source in names_of(other).imported.items() if source == (file, name)}
        known = imported | ({name} if other == file else set())
        parts = (node for node in (ast.walk(tree) if known else ()) if isinstance(node, ast.Attribute))
        found |= {one.attr for one in parts if ast.unparse(one.value) in known}
    return found & METHODS.keys()


def uses() -> Iterator[Use | str]:
    """Yield every use of a pattern, and the files with one that is put together in a function."""
    for file, tree in TREES.items():
        names = names_of(file)
        for method, call in calls_of_re(tree):
            given = [*call.args[1:], *(word.value for word in call.keywords)]
            flags = [names.value(one) for one in given if ast.unparse(one).startswith("re.")]
            try:
                pattern = re.compile(names.value(call.args[0]), *flags)
            except NameError:
                yield file
                continue
            constants = [name for name, value in names.assigned.items() if value is call]
            own = set().union(*(methods_of(file, name) for name in constants)) if method == "compile" else {method}
            for one in sorted(own) or [HANDED_ON[file]]:
                yield Use(file, call.lineno, pattern, one)


FOUND = list(uses())
USES = [one for one in FOUND if isinstance(one, Use)]
USES += [Use(file, 0, re.compile(one), method) for file, put in PUT_TOGETHER.items() for method, one in put]


def member(items: list[tuple[Any, Any]]) -> str:
    """Return a character of a class."""
    for char in (*"a0 _-.:/", *map(chr, range(256)), "\u3040", "\u200e", "\udc80"):
        if any(_in(char, item) for item in items) != (items[0][0] is op.NEGATE):
            return char
    raise AssertionError(items)


CATEGORIES = {
    op.CATEGORY_DIGIT: str.isdigit,
    op.CATEGORY_NOT_DIGIT: lambda char: not char.isdigit(),
    op.CATEGORY_SPACE: str.isspace,
    op.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
    op.CATEGORY_WORD: lambda char: char.isalnum() or char == "_",
    op.CATEGORY_NOT_WORD: lambda char: not (char.isalnum() or char == "_"),
}


def _in(char: str, item: tuple[Any, Any]) -> bool:
    kind, value = item
    if kind is op.LITERAL:
        return ord(char) == value
    if kind is op.RANGE:
        return value[0] <= ord(char) <= value[1]
    return kind is op.CATEGORY and CATEGORIES[value](char)


def inside(kind: Any, value: Any) -> list[Any]:
    """Return the patterns inside a part of a pattern."""
    if kind in (*REPEATS, op.SUBPATTERN):
        return [value[-1]]
    return [value] if kind is op.ATOMIC_GROUP else value[1] if kind is op.BRANCH else []


REPEATS = (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT)


def shortest(tree: Any) -> str:
    """Return a short text that a part of a pattern accepts."""
    return "".join(_shortest(kind, value) for kind, value in tree)


def _shortest(kind: Any, value: Any) -> str:
    if kind is op.LITERAL:
        return chr(value)
    if kind is op.NOT_LITERAL:
        return "a" if value != ord("a") else "b"
    if kind is op.ANY:
        return "a"
    if kind is op.IN:
        return member(value)
    if kind in REPEATS:
        return value[0] * shortest(value[2])
    if kind is op.SUBPATTERN:
        return shortest(value[3])
    if kind is op.ATOMIC_GROUP:
        return shortest(value)
    if kind is op.BRANCH:
        return min((shortest(one) for one in value[1]), key=len)
    return ""


def beginnings(tree: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """Yield what leads to each repeat in a pattern, and what it repeats; and, behind nothing, what leads anywhere."""
    for kind, value in tree:
        if before:
            yield "", before
        if kind in REPEATS and value[1] > 16:
            yield before, shortest(value[2]) or "a"
        for one in inside(kind, value):
            yield from beginnings(one, before)
        before += _shortest(kind, value)
    if before:
        yield "", before


def letters(tree: Any) -> Iterator[str]:
    """Yield a character of each class and each literal of a pattern."""
    for kind, value in tree:
        if kind in (op.LITERAL, op.NOT_LITERAL, op.IN, op.ANY):
            yield _shortest(kind, value)
            if kind is op.IN and value[0][0] is not op.NEGATE:
                yield from (chr(one) for sort, one in value if sort is op.LITERAL)
        for one in inside(kind, value):
            yield from letters(one)


def texts(pattern: re.Pattern[Any]) -> list[tuple[Any, Any, Any]]:
    """Return what a pattern may take long for: a beginning, a part to be repeated, and an end."""
    given = pattern.pattern
    tree = parser.parse(given if isinstance(given, str) else given.decode("latin-1"), pattern.flags & ~re.UNICODE)
    led = dict.fromkeys(beginnings(tree))
    repeated = dict.fromkeys(letters(tree))
    led |= dict.fromkeys(product(dict.fromkeys(begin for begin, _ in led), repeated))
    made = [(begin, part, end) for begin, part in led for end in ("\0", "\n")]
    return made if isinstance(given, str) else [tuple(one.encode("latin-1") for one in text) for text in made]


def repeat(begin: Any, part: Any, end: Any, size: int) -> Any:
    return begin + part * (size // len(part)) + end


def slowest(run: Callable[[Any], object], pattern: re.Pattern[Any]) -> tuple[float, Any]:
    """Return the largest growth over the texts of a pattern, and its text."""
    worst = 0.0, None
    for begin, part, end in texts(pattern):
        found = growth(run, partial(repeat, begin, part, end), SIZE)
        worst = max(worst, (found, (begin, part, end)), key=lambda one: one[0])
        if worst[0] >= LINEAR:
            break
    return worst


def test_each_pattern_is_looked_at():
    assert len(USES) > 90
    assert {file for file in FOUND if isinstance(file, str)} == PUT_TOGETHER.keys()


@pytest.mark.parametrize("use", USES, ids=str)
def test_a_pattern_takes_linear_time(use):
    found, text = slowest(lambda text: METHODS[use.method](use.pattern, text), use.pattern)
    assert found < LINEAR, (use.pattern.pattern, text)


def looks_for(pattern: re.Pattern[str], data: str) -> None:
    for text in secrets._texts(data.encode("latin-1")):
        deque(pattern.finditer(text), 0)


@pytest.mark.parametrize("pattern", [pattern for _, pattern in secrets._patterns()], ids=lambda one: one.pattern[:40])
def test_a_secret_is_looked_for_in_linear_time(pattern):
    found, text = slowest(partial(looks_for, pattern), pattern)
    assert found < LINEAR, (pattern.pattern, text)


@pytest.mark.parametrize("pattern", [r"!\[[^\]]*\]\(", r"key *=? *x", r"(a|aa)+b"])
def test_a_pattern_that_is_slow_would_be_found(pattern):
    # A busy machine may make a short run look as long as a longer one, so what is not found is looked for again.
    found = (slowest(lambda text: deque(re.finditer(pattern, text), 0), re.compile(pattern))[0] for _ in range(3))
    assert any(one > LINEAR for one in found)
