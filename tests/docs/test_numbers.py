"""Numbers in the pages' own words: each is computed, or has a link to the line of somebody else's code that says it.

What stands between markers is written by a script, and held in test_current.py.
"""

import re
from pathlib import Path

import pytest
from support.held import HELD
from support.prose import bare_numbers, pattern_of, prose_of

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
# Written as a whole by a script, from the code or from what it measured.
MADE = {DOCS / "train.md", *(DOCS / "reference").glob("*.md"), *(DOCS / "cards").glob("*/README.md")}
PAGES = sorted({ROOT / "README.md", *DOCS.rglob("*.md")} - MADE)
# Numbers of a name or a definition, which nobody measured.
NAMES = re.compile(r"HTTP 200|4-grams|0-based|[Tt]emperature [01]|dim 0|transformers 5|1 : 4 is|100 %")


def said(page: str) -> list[str]:
    """Return what a page has to say."""
    return [sentence.format(*numbers()) for sentence, numbers in HELD.get(page, {}).items()]


@pytest.mark.parametrize("page", HELD)
def test_a_page_says_what_is_so(page):
    text = (ROOT / page).read_text()
    assert not [sentence for sentence in said(page) if not pattern_of(sentence).search(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_number_stands_alone(page):
    text = page.read_text()
    for sentence in said(page.relative_to(ROOT).as_posix()):
        text = pattern_of(sentence).sub("", text)
    assert bare_numbers(NAMES.sub("", prose_of(text))) == []


BARE = {
    "a figure": ("It takes 7.5 GB.", ["It takes 7.5 GB."]),
    "in a table": ("| a | b |\n|---|---|\n| x | 3 |\n", ["| x | 3"]),
    "a link that is not pinned": (
        "It is [5](https://github.com/a/b/blob/main/c.py#L5).",
        ["It is [5](https://github.com/a/b/blob/main/c.py#L5)."],
    ),
    "behind a sentence with a link": (
        "It is [5](https://github.com/a/b/blob/v1.2/c.py#L5). So 6 fail.",
        ["So 6 fail."],
    ),
    "a pinned link": ("It is [5](https://github.com/a/b/blob/v1.2/c.py#L5-L7).", []),
    "a pinned link at the foot": ("It is [5][file]. 6.\n\n[file]: https://github.com/a/b/blob/v1.2/c.py#L5\n", ["6."]),
    "a name": ("Kimi-K2.6 in INT4, sha256, EAGLE-3", []),
    "what a script writes": ("<!-- size: begin -->\n7 GB\n<!-- size: end -->", []),
    "code": ("`1 + x`\n\n```sh\nhead -9\n```\n", []),
    "a count": ("## 2. Then\n\n1. one\n2. two\n", []),
}


@pytest.mark.parametrize("text, bare", BARE.values(), ids=BARE)
def test_a_bare_number_is_seen(text, bare):
    assert bare_numbers(prose_of(text)) == bare
