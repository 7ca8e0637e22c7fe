"""Escape untrusted text for the place where it is shown or run: one function per place. Imports nothing from kconv.

Names of tensors, files and datasets, keys and values of a config, answers of a server: any of them may hold terminal
control codes, Markdown headings or links, characters that end a YAML value, or shell commands.
`tests/test_escape.py` checks that nothing is printed, rendered or quoted without these functions.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

# Control characters of both sets, except the line break and the tab; characters that change the text direction; and
# unpaired surrogates, which no terminal encoding has.
OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
# A plain YAML scalar of this form is read as the text itself.
PLAIN_YAML = re.compile(r"[A-Za-z_/][A-Za-z0-9_./@+-]*")
# YAML reads these as something other than text.
YAML_WORDS = re.compile(r"(?i:y|n|yes|no|on|off|true|false|null|none)")


def terminal(text: object) -> str:
    r"""Return a text with terminal control characters written as \u001b and the like, so that terminals ignore them."""
    return OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", str(text))


class Markdown(str):
    """A text that is already escaped for Markdown."""

    __slots__ = ()


def markdown(text: object) -> Markdown:
    """Return a text as one line of Markdown that cannot become a heading, cell, link, picture or HTML."""
    if isinstance(text, Markdown):
        return text
    line = " ".join(_in_a_cell(terminal(text)).split())
    line = line.replace("](", "]\\(").replace("][", "]\\[").replace("<", "&lt;").replace("![", "!\\[")
    # At its end it would escape what follows, e.g. the bracket of a link.
    line = re.sub(r"(?<!\\)(\\+)$", r"\1\1", line)
    # What starts a block: a heading, quote, fence, rule, link reference or list item.
    line = re.sub(r"^(\d{1,9})([.)] )", r"\1\\\2", line)
    return Markdown(re.sub(r"^(#|>|```|~~~|---|===|[-+*] |(?:[*_] ?){3}|\[[^\]]*\]:)", r"\\\1", line))


def _in_a_cell(text: str) -> str:
    """Escape the bars of a table cell; a backslash before a bar would break the escape for some readers."""
    return re.sub(r"(?<!\\)(\\*)\|", lambda bar: rf"{bar[1] * 2}\|", text)


def code(text: object) -> Markdown:
    """Return a text as one line of Markdown code, in more backticks than it contains."""
    line = " ".join(_in_a_cell(terminal(text)).split())
    fence = "`" * (_backticks(line) + 1)
    pad = " " if len(fence) > 1 else ""
    return Markdown(f"{fence}{pad}{line}{pad}{fence}")


def block(text: object, language: str) -> Markdown:
    """Return a text as a block of Markdown code, fenced by more backticks than it contains in a row."""
    held = terminal(text).strip("\n")
    fence = "`" * max(3, _backticks(held) + 1)
    return Markdown(f"{fence}{language}\n{held}\n{fence}")


def _backticks(text: str) -> int:
    """Return the length of the longest run of backticks in a text."""
    return max((len(run) for run in re.findall(r"`+", text)), default=0)


def link(text: object, url: str) -> Markdown:
    """Return a Markdown link to an address that kconv itself provides, e.g. a rule's source."""
    return Markdown(f"[{markdown(text)}]({url})")


def yaml(text: str) -> str:
    """Return a text as a value that YAML reads back as exactly this text."""
    if PLAIN_YAML.fullmatch(text) and not YAML_WORDS.fullmatch(text):
        return text
    # JSON's quoting would not do: YAML does not join surrogate pairs.
    from yaml import safe_dump

    return safe_dump(text, default_style='"', width=1 << 30).rstrip("\n")


Word = str | Mapping[str, Any]
"""A word of a command; a mapping is one word, its JSON."""


def command(words: Iterable[Word]) -> str:
    """Return words quoted as one shell command."""
    return shlex.join(word if isinstance(word, str) else json.dumps(word) for word in words)


def command_lines(words: Iterable[Word]) -> str:
    """Return words quoted as one shell command, with each option on a line of its own."""
    lines: list[list[Word]] = [[]]
    for word in words:
        if isinstance(word, str) and word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return " \\\n    ".join(map(command, lines))
