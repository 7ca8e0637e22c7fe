"""Licenses and notices beside weights.

Publishers write them in any case, as GitHub's own finder takes them:
https://github.com/licensee/licensee/blob/v10.1.0/lib/licensee/project_files/license_file.rb#L23-L27
"""

from __future__ import annotations

from collections.abc import Iterable

# What may hold a license's text.
LICENSE_TEXTS = ("LICENSE*", "LICENCE*", "COPYING*")
# What a card must repeat, or a release must carry on.
LICENSE_FILES = (*LICENSE_TEXTS, "NOTICE*", "THIRD_PARTY*")


def in_any_case(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return glob patterns that take letters of either case, e.g. "[Mm][Ii][Tt]*" for "MIT*".

    huggingface_hub and, before Python 3.12, `Path.glob` match by case and cannot be told otherwise.
    """
    return tuple(
        "".join(f"[{letter.upper()}{letter.lower()}]" if letter.isalpha() else letter for letter in pattern)
        for pattern in patterns
    )
