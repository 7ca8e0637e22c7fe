"""From counts to acceptance figures.

A group is what ran between two readings of a server's counters: one prompt with all its turns, or several in parallel.
Steps of one prompt depend on each other, so intervals sample whole groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..engines.counters import Counts
from ..errors import AcceptanceInvalid, DefinitionsMixed
from .acceptance import METHOD, AcceptanceRow, Averaging, Interval, Sanity, Speed

DRAWS = 2000
LEVEL = 0.95
NGRAM = 4
TOKENS_A_WORD = 4  # more than any language takes
# Words, and every character of a script without spaces.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+|[^\w\s]")


def add_up(groups: Sequence[Counts]) -> Counts:
    """Add counts up; DefinitionsMixed if only some of them count positions."""
    kinds = {None if group.per_position is None else len(group.per_position) for group in groups}
    if len(kinds) != 1:
        raise DefinitionsMixed("groups with different positions cannot be added", fix="Measure them in one run.")
    places = None
    if None not in kinds:
        places = tuple(sum(column) for column in zip(*(g.per_position or () for g in groups), strict=True))
    return Counts(
        sum(g.drafts for g in groups), sum(g.accepted for g in groups), places, sum(g.prompts for g in groups)
    )


def micro(groups: Sequence[Counts]) -> float:
    """Return the acceptance length as a mean over verify steps, so long answers weigh more."""
    total = add_up(groups)
    return 1 + total.accepted / total.drafts


def macro(groups: Sequence[Counts]) -> float | None:
    """Return the mean over prompts of each one's own length; None if groups have more than one prompt."""
    if any(group.prompts != 1 for group in groups):
        return None
    return sum(1 + g.accepted / g.drafts for g in groups) / len(groups)


def rates(groups: Sequence[Counts]) -> tuple[float, ...] | None:
    """Return the share of verify steps in which the draft was accepted up to each position."""
    total = add_up(groups)
    return None if total.per_position is None else tuple(count / total.drafts for count in total.per_position)


def mean_of_categories(rows: Iterable[AcceptanceRow], categories: Iterable[str]) -> float:
    """Return the mean over the categories of one dataset, with equal weights; each needs one row, all of one method."""
    rows = list(rows)
    for row in rows[1:]:
        apart = [n for n in (*METHOD, "dataset", "revision") if row[n] != rows[0][n]]
        if apart:
            raise DefinitionsMixed(
                f"{rows[0].category!r} and {row.category!r} differ in {', '.join(apart)}; no mean is taken over both",
                where=row.dataset,
                fix="Take the mean over rows with one key.",
            )
    by_category = {row.category: row for row in rows}
    missing = [name for name in categories if name not in by_category]
    if missing or len(by_category) != len(rows):
        raise AcceptanceInvalid(
            f"the mean needs one row for each category, but {', '.join(missing) or 'some'} "
            f"{'has none' if missing else 'have two'}",
            where=rows[0].dataset if rows else "",
            fix="Measure the missing categories. kconv does not fill gaps.",
        )
    return sum(by_category[name].value for name in categories) / len(by_category)


def make_rows(
    counts: Sequence[Counts],
    answers: Sequence[tuple[str, int, bool]],
    shared: Mapping[str, Any],
    *,
    averaging: Averaging = "micro_steps",
    speed: Speed | None = None,
) -> Iterator[AcceptanceRow]:
    """Yield the figures of some groups: one over `averaging`, and one over requests if each group is one prompt.

    Args:
        counts: of groups in which something was drafted; at least one.
        answers: as in `sanity`.
    """
    means: dict[Averaging, float | None] = {averaging: micro(counts), "macro_request": macro(counts)}
    for way, value in means.items():
        if value is not None:
            yield AcceptanceRow.model_validate(
                dict(shared)
                | {
                    "averaging": way,
                    "value": round(value, 6),
                    "prompts": sum(group.prompts for group in counts),
                    "drafts": sum(group.drafts for group in counts),
                    "rates": rates(counts) if way == averaging else None,
                    "interval": interval(counts, way),
                    "sanity": sanity(answers),
                    "speed": speed,
                }
            )


def interval(groups: Sequence[Counts], averaging: str, seed: int = 0) -> Interval | None:
    """Return the bootstrap interval of a mean, sampling groups with replacement; None for fewer than two groups.

    Args:
        averaging: "micro_steps" or "macro_request".
    """
    if len(groups) < 2:
        return None
    drafts = np.array([g.drafts for g in groups])
    accepted = np.array([g.accepted for g in groups])
    drawn = np.random.default_rng(seed).integers(len(groups), size=(DRAWS, len(groups)))
    if averaging == "macro_request":
        means = (1 + accepted / drafts)[drawn].mean(axis=1)
    else:
        means = 1 + accepted[drawn].sum(axis=1) / drafts[drawn].sum(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    sizes = {g.prompts for g in groups}
    over = "prompts" if sizes == {1} else f"groups of up to {max(sizes)} prompts"
    return Interval(low=float(low), high=float(high), level=LEVEL, over=over, units=len(groups))


def sanity(answers: Sequence[tuple[str, int, bool]]) -> Sanity:
    """Describe answers: for each, its text, tokens, and whether it was cut at the limit."""
    return Sanity(
        distinct_4grams=sum(distinct_ngrams(text, tokens) for text, tokens, _ in answers) / len(answers),
        mean_tokens=sum(tokens for _, tokens, _ in answers) / len(answers),
        cut=sum(cut for _, _, cut in answers) / len(answers),
    )


def distinct_ngrams(text: str, tokens: int) -> float:
    """Return the share of distinct 4-grams of words in a text; 1 if it is too short for two.

    A text that loops within a word has few words for its tokens; then its characters count as words.
    """
    words = WORD.findall(text)
    words = words if TOKENS_A_WORD * len(words) >= tokens else list(text)
    ngrams = [tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0
