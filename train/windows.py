"""A plain text to train on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import RecipeInvalid
from ..head.vocab import keep_most_frequent, offsets


def cut_windows(text: Tensor, seq: int, count: int, seed: int) -> Tensor:
    """Return `count` windows of a text that do not overlap, in random order: `[count, seq]`.

    Args:
        text: [N] token ids.
        seq: tokens per window.
        count: how many.
        seed: of the choice and the order.

    Raises:
        RecipeInvalid: the text holds fewer.
    """
    whole = len(text) // seq
    if whole < count:
        raise RecipeInvalid(
            f"the recipe asks for {count:,} windows of {seq} tokens, and the text holds {whole:,}",
            fix="Lower the recipe's batches, or give more text.",
        )
    chosen = torch.randperm(whole, generator=torch.Generator().manual_seed(seed))[:count]
    return text[: whole * seq].view(whole, seq)[chosen]


def map_draft_vocab(text: Tensor, size: int, vocab: int, specials: Sequence[int] = ()) -> Tensor:
    """Return the map from draft to target ids that keeps a text's most frequent tokens: `d2t`, [size] int64.

    It holds offsets: draft id i means target id i + d2t[i]. Target ids ascend with draft ids.

    Args:
        text: token ids.
        size: rows of the draft vocabulary.
        vocab: rows of the target's.
        specials: ids that are kept whatever their frequency.

    Raises:
        RecipeInvalid: the text holds fewer distinct tokens.
        ConfigInvalid: the special tokens alone are more.
    """
    counts = torch.bincount(text, minlength=vocab)
    counts[list(specials)] += 1
    distinct = int((counts > 0).sum())
    if distinct < size:
        raise RecipeInvalid(
            f"the draft vocabulary has {size} tokens, and the text {distinct} distinct ones",
            fix="Lower draft_vocab, or give more text.",
        )
    return offsets(keep_most_frequent(counts, size, specials))
