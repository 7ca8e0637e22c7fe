"""Text of strangers, made fit for where it is shown or run: one function for each place. Imports nothing of kconv's.

Names of tensors, files and data sets, keys and values of a config, answers of a server: any of them may hold what a
terminal obeys, what Markdown takes for a heading or a link, what ends a YAML value, or what a shell runs.
`tests/test_escape.py` holds that nothing is printed, rendered or quoted around these.
"""

from __future__ import annotations

import re
import shlex

# Control characters but for the line break and the tab, of both sets; what turns the direction of a line; and half a
# surrogate pair, which no terminal's encoding has.
OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
# What YAML reads as the text itself, where it stands alone.
PLAIN_YAML = re.compile(r"[A-Za-z_/][A-Za-z0-9_./@+-]*")
# What YAML reads as something else than a text.
YAML_WORDS = re.compile(r"(?i:y|n|yes|no|on|off|true|false|null|none)")


def terminal(text: object) -> str:
    r"""Return a text that a terminal shows and does not obey: what it would obey is written as \u001b."""
    return OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", str(text))


class Markdown(str):
    """A text that is fit for Markdown already."""

    __slots__ = ()


def markdown(text: object) -> Markdown:
    """Return a text as one line of Markdown that is no heading, cell, link, picture or HTML of its own."""
    if isinstance(text, Markdown):
        return text
    line = " ".join(_in_a_cell(terminal(text)).split())
    line = line.replace("](", "]\\(").replace("][", "]\\[").replace("<", "&lt;").replace("![", "!\\[")
    # What begins a block: a heading, quote, fence, rule, reference's definition, or list, whose item may be one.
    line = re.sub(r"^(\d{1,9})([.)] )", r"\1\\\2", line)
    return Markdown(re.sub(r"^(#|>|```|~~~|---|===|[-+*] |(?:[*_] ?){3}|\[[^\]]*\]:)", r"\\\1", line))


def _in_a_cell(text: str) -> str:
    """Return a text whose bars end no cell: to some readers a backslash before one would escape its escape."""
    return re.sub(r"(\\*)\|", lambda bar: rf"{bar[1] * 2}\|", text)


def code(text: object) -> Markdown:
    """Return a text as one line of code in Markdown, between more backticks than it holds."""
    line = " ".join(_in_a_cell(terminal(text)).split())
    longest = max((len(run) for run in re.findall(r"`+", line)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if longest else ""
    return Markdown(f"{fence}{pad}{line}{pad}{fence}")


def link(text: object, url: str) -> Markdown:
    """Return a text that links to a page whose address is kconv's own, e.g. a rule's source."""
    return Markdown(f"[{markdown(text)}]({url})")


def yaml(text: str) -> str:
    """Return a text as a value that YAML reads as this very text."""
    if PLAIN_YAML.fullmatch(text) and not YAML_WORDS.fullmatch(text):
        return text
    # JSON's own quotes would not do: YAML joins no surrogate pairs.
    from yaml import safe_dump

    return safe_dump(text, default_style='"', width=1 << 30).rstrip("\n")


def shell(text: str) -> str:
    """Return a text as one word of a shell."""
    return shlex.quote(text)


def command(words: list[str] | tuple[str, ...]) -> str:
    """Return words as a command of a shell."""
    return shlex.join(words)
