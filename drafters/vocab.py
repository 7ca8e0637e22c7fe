"""Draft vocabularies: maps, masks, the choice of tokens, coverage.

A reduced head has one row of `lm_head` for each token that it may draft. `d2t[i]` is an *offset*: row i stands for
the target's token `i + d2t[i]`, and `t2d` marks these tokens in the target's vocabulary
(https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/llama_eagle3.py#L385).
Some files store the ids themselves in `d2t`; often both readings are possible, and only one is right.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ..errors import ConfigInvalid

FULL = "full vocabulary, no map"
MISSING = "reduced vocabulary without a map"
IDENTITY = "identity prefix"
OFFSETS = "offsets"
ABSOLUTE = "absolute ids"
EITHER = "offsets or absolute ids"
NEITHER = "neither offsets nor absolute ids"


def target_ids(d2t: np.ndarray) -> np.ndarray:
    """Return the target id of each draft id, `[draft_vocab]` int64, from a map of offsets."""
    return d2t.astype(np.int64) + np.arange(d2t.size)


def offsets(ids: np.ndarray) -> np.ndarray:
    """Return the map, `[draft_vocab]` int64 offsets, that gives these target ids; inverse of `target_ids`."""
    return ids.astype(np.int64) - np.arange(ids.size)


def mask(ids: np.ndarray, vocab: int) -> np.ndarray:
    """Return `t2d`, `[vocab]` bool: whether any draft id maps to the token."""
    marks = np.zeros(vocab, np.bool_)
    marks[ids] = True
    return marks


@dataclass(frozen=True)
class Reading:
    """The result of reading a map in one way.

    Attributes:
        ids: `[draft_vocab]` int64, the target id of each draft id.
        outside: how many ids are outside the target's vocabulary.
        duplicates: how many draft ids map to an id that an earlier one maps to.
        marked_otherwise: how many tokens are only in `t2d` or only in `ids`; None if there is no `t2d`, or if `ids` is
            not a valid map at all.
    """

    ids: np.ndarray
    outside: int
    duplicates: int
    marked_otherwise: int | None

    @property
    def possible(self) -> bool:
        """Whether this reading is possible: each id in range, and none twice."""
        return self.outside == 0 and self.duplicates == 0

    @property
    def order(self) -> str:
        """`"ascending"`, or `"unsorted"` as in maps ordered by token frequency (ModelOpt's among them)."""
        return "ascending" if bool((np.diff(self.ids) > 0).all()) else "unsorted"


def read_ids(ids: np.ndarray, vocab: int, t2d: np.ndarray | None = None) -> Reading:
    """Describe a map that gives these target ids.

    Args:
        ids: `[draft_vocab]` integers.
        vocab: rows of the target's vocabulary.
        t2d: `[vocab]` bool, the file's own mask.
    """
    ids = ids.astype(np.int64)
    outside = int(((ids < 0) | (ids >= vocab)).sum())
    duplicates = ids.size - np.unique(ids).size
    usable = t2d is not None and outside == 0
    return Reading(ids, outside, duplicates, int((mask(ids, vocab) != t2d).sum()) if usable else None)


def kind_of(as_offsets: Reading, as_absolute: Reading, rows: tuple[int, int] | None = None) -> str:
    """Decide what a map holds: one of IDENTITY, OFFSETS, ABSOLUTE, EITHER, NEITHER.

    A reading with an id out of range or twice is ruled out. Between two that remain, `t2d` decides if it agrees with
    only one of them; otherwise the rows of `lm_head` that are copies of the target's decide. Engines do not read
    absolute ids, so that reading never overrules a `t2d` unless the rows support it.

    Args:
        as_offsets, as_absolute: the two readings of one `d2t`.
        rows: how many rows of `lm_head` equal the target's, at the ids of each reading.
    """
    if not as_offsets.possible:
        spoken_for = not as_absolute.marked_otherwise or (rows is not None and rows[1] > rows[0])
        return ABSOLUTE if as_absolute.possible and spoken_for else NEITHER
    if np.array_equal(as_offsets.ids, np.arange(as_offsets.ids.size)):
        return IDENTITY
    if not as_absolute.possible:
        return OFFSETS
    agreeing = as_offsets.marked_otherwise == 0, as_absolute.marked_otherwise == 0
    for evidence in (agreeing, rows):
        if evidence is not None and evidence[0] != evidence[1]:
            return OFFSETS if evidence[0] > evidence[1] else ABSOLUTE
    return EITHER


def keep_most_frequent(counts: np.ndarray, size: int, always: Collection[int]) -> np.ndarray:
    """Choose the tokens of a draft vocabulary.

    Args:
        counts: `[vocab]` int64, how often each token occurs in a text.
        size: how many tokens to keep.
        always: ids to keep whatever their frequency, i.e. the special tokens.

    Returns:
        `[size]` int64 target ids, ascending: those of `always`, then the most frequent. Among equally frequent tokens
        the lower id wins, which in a BPE vocabulary is the earlier merge.

    Raises:
        ConfigInvalid: `size` is too small for `always`, or not below the vocabulary size.
    """
    if not len(always) <= size < counts.size or size < 1:
        kept = f"{len(always)} special tokens are always kept"
        raise ConfigInvalid(
            f"a draft vocabulary of {size} tokens cannot be chosen from {counts.size}: "
            + (f"it is not less than the whole vocabulary of {counts.size}" if size >= counts.size else kept),
            fix=f"Choose a size from {max(len(always), 1)} to {counts.size - 1}.",
        )
    ranked = counts.astype(np.int64)
    ranked[np.array(sorted(always), np.int64)] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-ranked, kind="stable")[:size])


@dataclass(frozen=True)
class Coverage:
    """How much of a text a draft vocabulary covers.

    Attributes:
        tokens: number of tokens of the text.
        covered: how many of them have a draft id.
        distinct, distinct_covered: the same, each token counted once.
    """

    tokens: int
    covered: int
    distinct: int
    distinct_covered: int

    @property
    def share(self) -> float:
        """Share of the text's tokens that can be drafted, from 0 to 1: an upper bound of the acceptance rate."""
        return self.covered / self.tokens if self.tokens else 0.0


def measure_coverage(counts: np.ndarray, ids: np.ndarray) -> Coverage:
    """Return how much of a text the tokens `ids` cover.

    Args:
        counts: `[vocab]` int64, how often each token occurs in the text.
        ids: `[draft_vocab]` int64 target ids.
    """
    held = counts[ids]
    return Coverage(
        tokens=int(counts.sum()),
        covered=int(held.sum()),
        distinct=int((counts > 0).sum()),
        distinct_covered=int((held > 0).sum()),
    )
