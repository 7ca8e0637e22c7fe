"""Drafters measured on a text.

A drafter is a program that gives the logits of each draft step of each chain; two drafters may be two programs
altogether, e.g. a trainer's own module and kconv's forward of the converted folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..head.chain import Acceptance, count_chains, draft_logits, greedy_acceptance, overlap, overlap_acceptance
from ..head.drafters import (
    Bigram,
    bigram_drafts,
    bigram_overlap,
    certain_overlap,
    lookup_drafts,
)
from ..head.forward import DraftHead
from ..targets.forward import States, run_target
from .apart import differ
from .figures import AcceptanceFigures, ParityFigures, PartFigures, TextFigures
from .gathered import Gathered, acceptance_figures, parity_figures, text_figures
from .parts import Parts
from .texts import Batch, Text


@dataclass(frozen=True)
class Drafter:
    """A head as a program.

    Attributes:
        logits: from tokens `[B, T]` and the target's states over them to `[K, B, T', draft_vocab]`, in the
            alignment of `head.chain`.
        target_ids: `[draft_vocab]`, the target's id of each draft id.
    """

    logits: Callable[[Tensor, States], Tensor]
    target_ids: Tensor


def head_drafter(head: DraftHead, steps: int, stored: tuple[int, ...] | None = None) -> Drafter:
    """Return kconv's own forward of a head as a drafter.

    Args:
        head: the head.
        steps: K.
        stored: the layers whose outputs the states hold, the head's own among them; just these if None.
    """
    own = head.spec.captured
    stored = stored or own
    columns = [stored.index(layer) for layer in own]

    def logits(tokens: Tensor, states: States) -> Tensor:
        captured = states.captured.unflatten(-1, (len(stored), -1))[..., columns, :].flatten(-2)
        return draft_logits(head, tokens, captured, steps)

    return Drafter(logits, head.target_ids)


@dataclass(frozen=True)
class Measured:
    """Figures of one text: the text itself, each drafter's acceptance, and parity where two were compared.

    Attributes:
        text, acceptance, parity: over all prompts.
        acceptance_by_category, parity_by_category: the same by category; empty where there is but one.
        parts: the error of each part, where two heads were given for that.
    """

    text: TextFigures
    acceptance: tuple[AcceptanceFigures, ...]
    parity: ParityFigures | None
    acceptance_by_category: tuple[AcceptanceFigures, ...] = ()
    parity_by_category: tuple[ParityFigures, ...] = ()
    parts: tuple[PartFigures, ...] = ()


def measure(
    text: Text,
    model,
    captured: tuple[int, ...],
    steps: int,
    drafters: Mapping[str, Drafter],
    *,
    compare: tuple[str, str] | None = None,
    bigram: Bigram | None = None,
    parts: Parts | None = None,
) -> Measured:
    """Measure drafters on one text, with the target in memory.

    Args:
        text: the text.
        model: the target.
        captured: layers whose outputs the drafters read.
        steps, drafters, compare, bigram, parts: as of `measure_states`.
    """

    def run(batch: Batch) -> States:
        return run_target(model, batch.tokens, captured)

    return measure_states(text, run, steps, drafters, compare=compare, bigram=bigram, parts=parts)


@torch.no_grad()
def measure_states(
    text: Text,
    run: Callable[[Batch], States],
    steps: int,
    drafters: Mapping[str, Drafter],
    *,
    compare: tuple[str, str] | None = None,
    bigram: Bigram | None = None,
    parts: Parts | None = None,
) -> Measured:
    """Measure drafters on one text.

    Args:
        text: the text.
        run: gives the target's states over a batch, wherever it has them from.
        steps: K.
        drafters: by name.
        compare: names of the source and the output, to be compared place by place.
        bigram: a bigram table to show beside the heads, with prompt lookup; neither is shown if None.
        parts: two heads whose parts are to be compared.
    """
    gathered = Gathered(acceptance={name: [] for name in drafters})
    for batch in text.batches:
        count_chains(batch.tokens.shape[1], steps)
        states = run(batch)
        logits = {name: drafter.logits(batch.tokens, states) for name, drafter in drafters.items()}
        for name, drafter in drafters.items():
            gathered.acceptance[name] += _accept(text, batch, logits[name], states.logits, drafter.target_ids)
        for name, found in _baselines(text, batch, states.logits, steps, bigram) if bigram else ():
            gathered.acceptance.setdefault(name, []).extend(found)
        if compare:
            one, other = (drafters[name] for name in compare)
            gathered.apart += differ(logits[compare[0]], logits[compare[1]], one.target_ids, other.target_ids)
        if parts:
            parts.add(batch.tokens, states.captured)
        gathered.categories += batch.categories or ("",) * len(batch.tokens)
    categories = sorted(set(gathered.categories))
    several = [gathered.only(category) for category in categories] if len(categories) > 1 else []
    return Measured(
        text_figures(text),
        tuple(acceptance_figures(text, gathered, "")),
        parity_figures(text, gathered, compare, "") if compare else None,
        tuple(row for own in several for row in acceptance_figures(text, own, own.categories[0])),
        tuple(parity_figures(text, own, compare, own.categories[0]) for own in several if compare),
        parts.figures(text.kind) if parts else (),
    )


def _accept(text: Text, batch: Batch, logits: Tensor, target_logits: Tensor, target_ids: Tensor) -> list[Acceptance]:
    """Return a drafter's acceptance on each sequence of a batch."""
    if text.kind == "greedy":
        return _greedy(target_ids[logits.argmax(-1)], batch)
    return _sampled(overlap(logits, target_logits, target_ids), batch)


def _greedy(drafted: Tensor, batch: Batch) -> list[Acceptance]:
    return [greedy_acceptance(drafted[:, row], tokens, batch.prompt_length) for row, tokens in enumerate(batch.tokens)]


def _sampled(overlaps: Tensor, batch: Batch) -> list[Acceptance]:
    """Keep the chains that start where an engine would draft: from the prompt's last token on."""
    kept = overlaps[:, :, batch.prompt_length - 1 :]
    return [overlap_acceptance(kept[:, row : row + 1]) for row in range(len(batch.tokens))]


def _baselines(
    text: Text, batch: Batch, target_logits: Tensor, steps: int, bigram: Bigram
) -> list[tuple[str, list[Acceptance]]]:
    found = lookup_drafts(batch.tokens, steps)
    if text.kind == "greedy":
        by_pairs = _greedy(bigram_drafts(bigram, batch.tokens, steps), batch)
        return [("bigram", by_pairs), ("prompt lookup", _greedy(found, batch))]
    by_pairs = _sampled(bigram_overlap(bigram, batch.tokens, target_logits, steps), batch)
    return [("bigram", by_pairs), ("prompt lookup", _sampled(certain_overlap(found, target_logits), batch))]
