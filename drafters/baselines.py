"""Simple drafters without a network, as a baseline for a head.

Any drafter does well on a text that loops, so a head's acceptance on it means little. These two run on the same chains
(`chain.py`) as the head, and `distinct_ngrams` measures how much a text repeats itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from .chain import along_chains, count_chains


@dataclass(frozen=True)
class Bigram:
    """How often each token follows each other one, counted on a text other than the drafted one.

    The probability of a next token is `(pairs + u) / (previous + 1)`: one extra count, spread by the token frequencies
    u, which themselves have one extra count per token. So no probability is 0, and after an unseen token the text's
    frequencies apply.

    Attributes:
        starts: `[vocab + 1]`; the pairs whose first token is v are `starts[v] : starts[v + 1]`.
        follows: `[pairs]`, second token of each distinct pair.
        counts: `[pairs]`, how often the pair occurs.
        frequencies: `[vocab]`, u.
        likeliest: `[vocab]`, most likely next token after each token.
    """

    starts: Tensor
    follows: Tensor
    counts: Tensor
    frequencies: Tensor
    likeliest: Tensor

    def probabilities(self, token: int) -> Tensor:
        """Return the distribution of the token after `token`, `[vocab]`."""
        pairs = slice(int(self.starts[token]), int(self.starts[token + 1]))
        counts = self.frequencies.clone()
        counts[self.follows[pairs]] += self.counts[pairs]
        return counts / counts.sum()


def count_bigrams(texts: Iterable[Tensor], vocab: int) -> Bigram:
    """Count the pairs of adjacent tokens within each text.

    Args:
        texts: 1-D tensors of token ids below `vocab`.
    """
    texts = list(texts)
    seen = torch.bincount(torch.cat(texts), minlength=vocab).float() + 1.0
    frequencies = seen / seen.sum()
    # Each pair as one number, so that memory grows with the text and not with the square of the vocabulary.
    pairs = torch.cat([t[:-1].long() * vocab + t[1:] for t in texts])
    codes, counts = cast(tuple[Tensor, Tensor], pairs.unique(return_counts=True))
    first, follows = codes // vocab, codes % vocab
    starts = torch.searchsorted(first, torch.arange(vocab + 1))

    likeliest = frequencies.argmax().repeat(vocab)
    order = (counts + frequencies[follows]).argsort()
    # In ascending order, so the last write per first token is the most likely one.
    firsts, seconds = (cast(list[int], ids[order].tolist()) for ids in (first, follows))
    best = dict(zip(firsts, seconds, strict=True))
    likeliest[list(best)] = torch.tensor(list(best.values()), dtype=torch.long)
    return Bigram(starts, follows, counts.float(), frequencies, likeliest)


def bigram_drafts(bigram: Bigram, tokens: Tensor, steps: int) -> Tensor:
    """Draft the most likely next token, again and again: `[B, T]` to target ids `[K, B, T']`."""
    return along_chains(bigram.likeliest.to(tokens.device)[tokens], steps)


def bigram_overlap(bigram: Bigram, tokens: Tensor, target_logits: Tensor, steps: int) -> Tensor:
    """Return the probability that a token drawn from the bigram's distribution is accepted, `[K, B, T']`.

    Args:
        tokens: `[B, T]`.
        target_logits: `[B, T, vocab]`, divided by the temperature.
        steps: K.
    """
    overlaps = torch.empty(tokens.shape, device=tokens.device)
    for token in cast(list[int], tokens.unique().tolist()):
        here = tokens == token
        p = target_logits[here].float().softmax(-1)
        overlaps[here] = torch.minimum(p, bigram.probabilities(token).to(p.device)).sum(-1)
    return along_chains(overlaps, steps)


def lookup_drafts(tokens: Tensor, steps: int, matched: Sequence[int] = (2, 1)) -> Tensor:
    """Draft by prompt lookup: find an earlier occurrence of the text's last tokens, and copy what came after it.

    Chain t knows the text up to x[t+1]. It uses the latest earlier occurrence of its last `matched[0]` tokens, else of
    its last `matched[1]` tokens, and so on: by default trigrams (two tokens matched, the third copied), then bigrams. A
    copy that reaches its own end continues with what it drafted; in a chain that still counts, this is the given text.

    Args:
        tokens: `[B, T]`.
        steps: K.
        matched: numbers of tokens to match, in order of preference.

    Returns:
        Target ids `[K, B, T']`, -1 where nothing matches.
    """
    chains = count_chains(tokens.shape[1], steps)
    drafted = torch.full((steps, tokens.shape[0], chains), -1, device=tokens.device)
    for row, text in enumerate(cast(list[list[int]], tokens.tolist())):
        found = [_latest_places(text, size) for size in matched]
        for chain in range(chains):
            place = next((places[chain + 1] for places in found if places[chain + 1] >= 0), -1)
            if place >= 0:
                drafted[:, row, chain] = torch.tensor(text[place + 1 : place + 1 + steps])
    return drafted


def _latest_places(text: list[int], size: int) -> list[int]:
    """Return for each position the latest one before it where the same `size` tokens end, -1 for none."""
    last: dict[tuple[int, ...], int] = {}
    places: list[int] = []
    for end in range(len(text)):
        gram = tuple(text[max(end + 1 - size, 0) : end + 1])
        places.append(last.get(gram, -1))
        last[gram] = end
    return places


def certain_overlap(drafted: Tensor, target_logits: Tensor) -> Tensor:
    """Return the probability p that a token drafted with certainty (q a point mass) is accepted.

    Args:
        drafted: target ids `[K, B, T']`, -1 where nothing is drafted.
        target_logits: `[B, T, vocab]`, divided by the temperature.

    Returns:
        `[K, B, T']` fp32; 0 where nothing is drafted.
    """
    steps, _, chains = drafted.shape
    overlaps: list[Tensor] = []
    for k in range(1, steps + 1):
        p = target_logits[:, k : k + chains].float().softmax(-1)
        overlaps.append(p.gather(-1, drafted[k - 1].clamp(min=0)[..., None])[..., 0])
    return torch.where(drafted >= 0, torch.stack(overlaps), 0.0)


def distinct_ngrams(tokens: Tensor, n: int = 4) -> float:
    """Return how many of a text's n-grams are distinct, as a share: 1.0 repeats nothing, near 0 loops.

    Args:
        tokens: `[T]` or `[B, T]` with T >= n; n-grams are distinct within their row.
        n: tokens per n-gram.
    """
    rows = tokens.reshape(-1, tokens.shape[-1]).unfold(-1, n, 1)
    return sum(len(cast(Tensor, row.unique(dim=0))) for row in rows) / (rows.shape[0] * rows.shape[1])
