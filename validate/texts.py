"""The texts that heads are judged on. What belongs here: prompts made into held-out text and continuations.

Greedy text of a small target loops and flatters every drafter; held-out text and sampled continuations do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PromptsInvalid
from ..target.generate import generate_greedy, generate_sampled
from .report import TextKind

ROWS = 8  # sequences measured side by side; the logits of all draft steps over them are in memory at once


@dataclass(frozen=True)
class Batch:
    """Sequences of one length: `tokens [B, T]`, the first `prompt_length` of which are the prompt."""

    tokens: Tensor
    prompt_length: int


@dataclass(frozen=True)
class Text:
    """Sequences of one kind, batched by length."""

    kind: TextKind
    batches: tuple[Batch, ...]


def make_texts(
    model, prompts: Sequence[Sequence[int]], *, prompt_tokens: int, new_tokens: int, steps: int, seed: int
) -> tuple[Text, ...]:
    """Make the three texts of a set of prompts.

    Args:
        model: the target, as `target.model.load_target` gives it.
        prompts: token ids of each prompt.
        prompt_tokens: prompts are cut to this many tokens before they are continued.
        new_tokens: length of the continuations.
        steps: draft steps that each text must have room for.
        seed: of the sampled continuations.

    Returns:
        Held-out text (left out where no prompt is long enough), sampled and greedy continuations.

    Raises:
        PromptsInvalid: there are no prompts.
    """
    if not prompts:
        raise PromptsInvalid("there are no prompts", fix="Give a JSONL file with at least one prompt.")
    starts = [list(prompt[:prompt_tokens]) for prompt in prompts]
    own = [list(prompt[: prompt_tokens + new_tokens]) for prompt in prompts if len(prompt) > steps + 1]
    sampled = generate_sampled(model, starts, new_tokens, temperature=1.0, seed=seed)
    greedy = generate_greedy(model, starts, new_tokens)
    texts = [Text("held-out", _batch(own, [1] * len(own)))] if own else []
    continued: tuple[tuple[TextKind, list[list[int]]], ...] = (("sampled", sampled), ("greedy", greedy))
    for kind, added in continued:
        joined = [start + new for start, new in zip(starts, added, strict=True)]
        texts.append(Text(kind, _batch(joined, [len(start) for start in starts])))
    return tuple(texts)


def _batch(rows: Sequence[list[int]], prompt_lengths: Sequence[int]) -> tuple[Batch, ...]:
    """Put rows of one length, with prompts of one length, side by side."""
    alike: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    for row, prompt_length in zip(rows, prompt_lengths, strict=True):
        alike[len(row), prompt_length].append(row)
    return tuple(
        Batch(torch.tensor(same[begin : begin + ROWS], dtype=torch.long), prompt_length)
        for (_, prompt_length), same in sorted(alike.items())
        for begin in range(0, len(same), ROWS)
    )
