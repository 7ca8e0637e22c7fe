"""The texts for judging heads.

Greedy text of a small target loops and flatters every drafter; held-out text and sampled continuations do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PromptsInvalid
from ..targets.forward import generate_greedy, generate_sampled
from ..targets.states import StatesFolder
from .figures import TextKind

# Sequences measured in parallel, and the bytes in memory for their draft logits.
ROWS, LOGIT_BYTES = 8, 1 << 29


@dataclass(frozen=True)
class Batch:
    """Sequences of one length.

    Attributes:
        tokens: `[B, T]`.
        prompt_length: how many of the T tokens are the prompt.
        categories: the prompts' categories, one per sequence; empty if unknown.
        places: the positions of these sequences in their text's original order.
    """

    tokens: Tensor
    prompt_length: int
    categories: tuple[str, ...] = ()
    places: tuple[int, ...] = ()


@dataclass(frozen=True)
class Text:
    """Sequences of one kind, batched by length."""

    kind: TextKind
    batches: tuple[Batch, ...]


@dataclass(frozen=True)
class _Row:
    tokens: list[int]
    prompt_length: int
    category: str
    place: int


def make_texts(
    model,
    prompts: Sequence[Sequence[int]],
    *,
    prompt_tokens: int,
    new_tokens: int,
    steps: int,
    seed: int,
    categories: Sequence[str] = (),
) -> tuple[Text, ...]:
    """Create the three texts of a set of prompts.

    Args:
        prompt_tokens: length to which prompts are cut before they are continued.
        new_tokens: length of the continuations.
        steps: draft steps that each text must have room for.
        categories: of each prompt; empty if unknown.

    Returns:
        Held-out text (omitted if no prompt is long enough), sampled and greedy continuations.

    Raises:
        PromptsInvalid: there are no prompts.
    """
    if not prompts:
        raise PromptsInvalid("there are no prompts", fix="Use a JSONL file with at least one prompt.")
    named = categories or [""] * len(prompts)
    starts = [list(prompt[:prompt_tokens]) for prompt in prompts]
    sampled = generate_sampled(model, starts, new_tokens, temperature=1.0, seed=seed)
    greedy = generate_greedy(model, starts, new_tokens)
    own = [
        _Row(list(prompt[: prompt_tokens + new_tokens]), 1, named[i], i)
        for i, prompt in enumerate(prompts)
        if len(prompt) > steps + 1
    ]
    rows = fit_rows(prompt_tokens + new_tokens, steps, model.config.vocab_size)
    texts = [Text("held-out", _batch(own, rows))] if own else []
    continued: tuple[tuple[TextKind, list[list[int]]], ...] = (("sampled", sampled), ("greedy", greedy))
    for kind, added in continued:
        joined = [_Row(starts[i] + new, len(starts[i]), named[i], i) for i, new in enumerate(added)]
        texts.append(Text(kind, _batch(joined, rows)))
    return tuple(texts)


def stored_texts(states: StatesFolder, *, steps: int, vocab: int) -> tuple[Text, ...]:
    """Create the texts of stored states; `Batch.places` are the sequences' numbers there.

    Args:
        steps: draft steps that each text must have room for; shorter sequences are omitted.

    Raises:
        PromptsInvalid: no sequence has room for them.
    """
    by_kind: dict[TextKind, list[_Row]] = defaultdict(list)
    for place, sequence in enumerate(states.sequences):
        if sequence.prompt_length + steps < sequence.length:
            tokens = states.read_tokens(place).tolist()
            # A dialogue's text is given, like a prompt's own text: nothing is sampled here.
            kind = "held-out" if sequence.kind == "dialogue" else sequence.kind
            by_kind[kind].append(_Row(tokens, sequence.prompt_length, sequence.category, place))
    if not by_kind:
        raise PromptsInvalid(
            f"no sequence has {steps} draft steps after its prompt",
            where=states.folder,
            fix="Create states with more tokens, or use fewer steps.",
        )
    longest = max(len(row.tokens) for rows in by_kind.values() for row in rows)
    return tuple(Text(kind, _batch(rows, fit_rows(longest, steps, vocab))) for kind, rows in by_kind.items())


def fit_rows(length: int, steps: int, vocab: int) -> int:
    """Return how many sequences of a length may be measured in parallel without exceeding the memory for logits."""
    return max(1, min(ROWS, LOGIT_BYTES // ((steps + 1) * length * vocab * 4)))


def _batch(rows: Sequence[_Row], side_by_side: int) -> tuple[Batch, ...]:
    """Stack rows of one length, with prompts of one length."""
    alike: dict[tuple[int, int], list[_Row]] = defaultdict(list)
    for row in rows:
        alike[len(row.tokens), row.prompt_length].append(row)
    return tuple(
        Batch(
            torch.tensor([row.tokens for row in part], dtype=torch.long),
            prompt_length,
            tuple(row.category for row in part),
            tuple(row.place for row in part),
        )
        for (_, prompt_length), same in sorted(alike.items())
        for begin in range(0, len(same), side_by_side)
        for part in [same[begin : begin + side_by_side]]
    )
