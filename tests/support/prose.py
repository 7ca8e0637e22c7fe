"""A page's own words, and the numbers in them."""

from __future__ import annotations

import re

# What is not prose, in this order: sections that a script writes, comments, blocks, code, headings' and lists' numbers.
NOT_PROSE = (
    re.compile(r"<!-- (\S+): begin -->.*?<!-- \1: end -->", re.DOTALL),
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE),
    re.compile(r"^ {4}\S.*$", re.MULTILINE),
    re.compile(r"`[^`]*`"),
    re.compile(r"^(#+ )?\d+\. ", re.MULTILINE),
)
# A link's address at the foot of the page, by its name.
ADDRESS = re.compile(r"^\[([^\]]+)\]: (\S+)$\n?", re.MULTILINE)
LINK = re.compile(r"\]\([^)]*\)")
# A line of a file on GitHub at a tag or a commit: it says the same tomorrow.
PINNED = re.compile(r"\]\(https://github\.com/[\w.-]+/[\w.-]+/blob/(?:v?\d[\w.]*|[0-9a-f]{40})/[^)#]+#L\d+[^)]*\)")
SENTENCE = re.compile(r"(?<=[.:;?!])\s+|\n\s*\n|\|\n")
# Neither in a word (K2, sha256) nor behind a hyphen (EAGLE-3).
NUMBER = re.compile(r"(?<![\w-])(?<![\w-]\.)\d(?:[\d.,]*\d)?")


def prose_of(page: str) -> str:
    """Return a page without what a script made, code, and numbers that only count; with addresses in their places."""
    for part in NOT_PROSE:
        page = part.sub("", page)
    addresses = dict(ADDRESS.findall(page))
    page = ADDRESS.sub("", page)
    for name, address in addresses.items():
        page = page.replace(f"][{name}]", f"]({address})")
    return page


def pattern_of(text: str) -> re.Pattern[str]:
    """Return what finds a text however its lines are broken."""
    return re.compile(r"\s+".join(map(re.escape, text.split())))


def bare_numbers(prose: str) -> list[str]:
    """Return the sentences and table rows that have a number, and no link to the line that says it."""
    sentences = (s for s in SENTENCE.split(prose) if not PINNED.search(s))
    return [" ".join(s.split()) for s in sentences if NUMBER.search(LINK.sub("]", s))]
