"""Drafters measured on a text. What belongs here: acceptance of each, and parity between two.

A drafter is a program that gives the logits of each draft step of each chain; two drafters may be two programs
altogether, e.g. a trainer's own module and kconv's forward of the converted folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..head.chain import (
    Acceptance,
    count_chains,
    draft_logits,
    greedy_acceptance,
    lengths,
    overlap,
    overlap_acceptance,
    pool,
)
from ..head.drafters import (
    Bigram,
    bigram_drafts,
    bigram_overlap,
    certain_overlap,
    distinct_ngrams,
    lookup_drafts,
)
from ..head.forward import DraftHead
from ..target.states import States, run_target
from .report import AcceptanceFigures, ParityFigures, TextFigures
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


def head_drafter(head: DraftHead, steps: int) -> Drafter:
    """Return kconv's own forward of a head as a drafter."""
    return Drafter(lambda tokens, states: draft_logits(head, tokens, states.captured, steps), head.target_ids)


@dataclass
class _Tally:
    """What is gathered about one drafter over a text's batches."""

    acceptances: list[Acceptance] = field(default_factory=list)
    per_position: list[Tensor] = field(default_factory=list)

    def add_sampled(self, overlaps: Tensor) -> None:
        self.acceptances.append(overlap_acceptance(overlaps))
        self.per_position.append(lengths(overlaps).flatten())

    def add_greedy(self, drafted: Tensor, batch: Batch) -> None:
        for row, tokens in enumerate(batch.tokens):
            self.acceptances.append(greedy_acceptance(drafted[:, row], tokens, batch.prompt_length))

    def figures(self, drafter: str, text: Text) -> AcceptanceFigures:
        total = pool(self.acceptances)
        return AcceptanceFigures(
            drafter=drafter,
            text=text.kind,
            steps=total.steps,
            drafts=total.drafts,
            length=total.length,
            standard_error=_standard_error(self.per_position),
            rates=total.rates,
            note=total.note,
        )


@dataclass(frozen=True)
class Measured:
    """Figures of one text: the text itself, each drafter's acceptance, and parity where two were compared."""

    text: TextFigures
    acceptance: tuple[AcceptanceFigures, ...]
    parity: ParityFigures | None


@torch.no_grad()
def measure(
    text: Text,
    model,
    captured: tuple[int, ...],
    steps: int,
    drafters: Mapping[str, Drafter],
    *,
    compare: tuple[str, str] | None = None,
    bigram: Bigram | None = None,
) -> Measured:
    """Measure drafters on one text.

    Args:
        text: the text.
        model: the target.
        captured: layers whose outputs the drafters read.
        steps: K.
        drafters: by name.
        compare: names of the source and the output, to be compared place by place.
        bigram: a bigram table to show beside the heads, with prompt lookup; neither is shown if None.
    """
    tallies = {name: _Tally() for name in (*drafters, *(("bigram", "prompt lookup") if bigram else ()))}
    differences: list[_Difference] = []
    for batch in text.batches:
        states = run_target(model, batch.tokens, captured)
        logits = {name: drafter.logits(batch.tokens, states) for name, drafter in drafters.items()}
        for name, drafter in drafters.items():
            _tally(tallies[name], text, batch, logits[name], states.logits, drafter.target_ids)
        if bigram:
            _tally_baselines(tallies, text, batch, states.logits, steps, bigram)
        if compare:
            differences.append(_compare(*(logits[name] for name in compare)))
    rows = [batch.tokens for batch in text.batches]
    described = TextFigures(
        kind=text.kind,
        sequences=sum(len(r) for r in rows),
        tokens=sum(r.numel() for r in rows),
        distinct_4grams=_distinct(text),
    )
    parity = _parity(text, steps, differences, *(tallies[name] for name in compare)) if compare else None
    return Measured(described, tuple(t.figures(name, text) for name, t in tallies.items()), parity)


def _tally(tally: _Tally, text: Text, batch: Batch, logits: Tensor, target_logits: Tensor, target_ids: Tensor) -> None:
    if text.kind == "greedy":
        tally.add_greedy(target_ids[logits.argmax(-1)], batch)
    else:
        tally.add_sampled(_behind_prompt(overlap(logits, target_logits, target_ids), batch))


def _tally_baselines(
    tallies: Mapping[str, _Tally], text: Text, batch: Batch, target_logits: Tensor, steps: int, bigram: Bigram
) -> None:
    found = lookup_drafts(batch.tokens, steps)
    if text.kind == "greedy":
        tallies["bigram"].add_greedy(bigram_drafts(bigram, batch.tokens, steps), batch)
        tallies["prompt lookup"].add_greedy(found, batch)
    else:
        by_pairs = bigram_overlap(bigram, batch.tokens, target_logits, steps)
        tallies["bigram"].add_sampled(_behind_prompt(by_pairs, batch))
        tallies["prompt lookup"].add_sampled(_behind_prompt(certain_overlap(found, target_logits), batch))


def _behind_prompt(overlaps: Tensor, batch: Batch) -> Tensor:
    """Keep the chains that start where an engine would draft: from the prompt's last token on."""
    count_chains(batch.tokens.shape[1], overlaps.shape[0])
    return overlaps[:, :, batch.prompt_length - 1 :]


@dataclass(frozen=True)
class _Difference:
    """How far one batch's logits are from the source's: maxima, and sums over places."""

    largest: float
    scale: float
    squares: float
    source_squares: float
    kl: float
    same: float
    places: int


def _compare(source: Tensor, output: Tensor) -> _Difference:
    p, q = source.float().log_softmax(-1), output.float().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    difference = output - source
    return _Difference(
        largest=float(difference.abs().max()),
        scale=float(source.abs().max()),
        squares=float(difference.double().square().sum()),
        source_squares=float(source.double().square().sum()),
        kl=float(kl.double().sum()),
        same=float((source.argmax(-1) == output.argmax(-1)).sum()),
        places=kl.numel(),
    )


def _parity(text: Text, steps: int, parts: list[_Difference], source: _Tally, output: _Tally) -> ParityFigures:
    places = sum(part.places for part in parts)
    difference = pool(output.acceptances).length - pool(source.acceptances).length
    paired = [b - a for a, b in zip(source.per_position, output.per_position, strict=True)]
    return ParityFigures(
        text=text.kind,
        steps=steps,
        relative_error=max(part.largest for part in parts) / max(part.scale for part in parts),
        rms_error=(sum(part.squares for part in parts) / sum(part.source_squares for part in parts)) ** 0.5,
        kl=sum(part.kl for part in parts) / places,
        top1=sum(part.same for part in parts) / places,
        length_difference=difference,
        length_difference_se=_standard_error(paired),
    )


def _standard_error(parts: list[Tensor]) -> float | None:
    """Return the standard error of the mean over positions; None where there are none to take it over."""
    values = torch.cat(parts).double() if parts else torch.empty(0)
    return float(values.std() / values.numel() ** 0.5) if values.numel() > 1 else None


def _distinct(text: Text) -> float:
    sizes = [batch.tokens.numel() for batch in text.batches]
    shares = [distinct_ngrams(batch.tokens[:, batch.prompt_length - 1 :]) for batch in text.batches]
    return sum(size * share for size, share in zip(sizes, shares, strict=True)) / sum(sizes)
