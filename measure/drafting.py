"""Measure drafters on a text, and compare two of them.

A drafter is a program that gives the logits of each draft step of each chain. Two drafters may be different programs,
e.g. a trainer's own module and kconv's forward of the converted folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..drafters.base import RunningDrafter
from ..drafters.baselines import (
    Bigram,
    bigram_drafts,
    bigram_overlap,
    certain_overlap,
    count_bigrams,
    distinct_ngrams,
    lookup_drafts,
)
from ..drafters.chain import (
    Acceptance,
    count_chains,
    greedy_acceptance,
    overlap,
    overlap_acceptance,
    pool,
)
from ..errors import TargetInvalid
from ..targets.forward import States, run_target
from .figures import AcceptanceFigures, ParityFigures, PartFigures, StepFigures, TextFigures
from .parts import Parts
from .statistics import influences, share_kept, standard_errors
from .texts import Batch, Text

# Rows of what `differ` returns for a sequence; the first two are maxima, the others sums over positions.
LARGEST, SCALE, SQUARES, SOURCE_SQUARES, KL, SAME, PLACES = range(7)


@dataclass(frozen=True)
class Halves:
    """Two bigram tables, each counted on one half of a text's sequences and used for the other half.

    Attributes:
        tables: of the first and of the second half.
        first: the positions of the first half's sequences.
    """

    tables: tuple[Bigram, Bigram]
    first: frozenset[int]

    def of(self, place: int) -> Bigram:
        """Return the table that did not count the sequence at a position."""
        return self.tables[place in self.first]


def count_halves(text: Text, vocab: int) -> Halves | None:
    """Count the pairs of a text so that no sequence is drafted from its own pairs; None for a single sequence."""
    by_place = {place: row for batch in text.batches for place, row in zip(batch.places, batch.tokens, strict=True)}
    order = sorted(by_place)
    if len(order) < 2:
        return None
    one, other = (count_bigrams((by_place[place] for place in half), vocab) for half in (order[::2], order[1::2]))
    return Halves((one, other), frozenset(order[::2]))


def differ(source: Tensor, output: Tensor, source_ids: Tensor, output_ids: Tensor) -> list[Tensor]:
    """Compare two drafters' logits on one batch.

    If their draft vocabularies differ, the tokens in both are compared.

    Args:
        source, output: `[K, B, T', draft_vocab]`.
        source_ids, output_ids: `[draft_vocab]`, the target id of each.

    Returns:
        For each of the B sequences, `[7, K]` float64; see the rows' names.
    """
    if not torch.equal(source_ids, output_ids):
        source, output = _common(source, output, source_ids, output_ids)
    found = []
    for row in range(source.shape[1]):
        a, b = source[:, row].float(), output[:, row].float()
        p, q = a.log_softmax(-1), b.log_softmax(-1)
        difference = (b - a).double()
        found.append(
            torch.stack(
                [
                    difference.abs().amax((1, 2)),
                    a.double().abs().amax((1, 2)),
                    difference.square().sum((1, 2)),
                    a.double().square().sum((1, 2)),
                    (p.exp() * (p - q)).sum(-1).double().sum(1),
                    (a.argmax(-1) == b.argmax(-1)).double().sum(1),
                    torch.full((len(a),), a.shape[1], dtype=torch.float64),
                ]
            )
        )
    return found


def add_up(rows: Sequence[Tensor]) -> Tensor:
    """Combine sequences into `[7, K]`: maxima of the maxima and sums of the sums."""
    stacked = torch.stack(list(rows))
    return torch.cat([stacked[:, :SQUARES].amax(0), stacked[:, SQUARES:].sum(0)])


def over_steps(total: Tensor) -> Tensor:
    """Combine the draft steps: `[7, K]` to `[7, 1]`."""
    return torch.cat([total[:SQUARES].amax(1, keepdim=True), total[SQUARES:].sum(1, keepdim=True)])


def name_figures(total: Tensor, step: int = 0) -> dict[str, float]:
    """Return the figures of one column by their names in the report."""
    column = total[:, step].tolist()
    # A source whose logits are all zero is not a head; then the differences are reported as they are.
    return {
        "relative_error": column[LARGEST] / (column[SCALE] or 1.0),
        "rms_error": (column[SQUARES] / (column[SOURCE_SQUARES] or 1.0)) ** 0.5,
        "kl": column[KL] / column[PLACES],
        "top1": column[SAME] / column[PLACES],
    }


def _common(source: Tensor, output: Tensor, source_ids: Tensor, output_ids: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.isin(source_ids, output_ids)
    if not both.any():
        raise TargetInvalid(
            "the two heads' draft vocabularies have no token in common", fix="Compare heads of one target."
        )
    places = {int(token): place for place, token in enumerate(output_ids)}
    own = torch.tensor([places[int(token)] for token in source_ids[both]])
    return source[..., both], output[..., own]


@dataclass
class Gathered:
    """Results for each sequence of a text, in one order.

    Attributes:
        acceptance: by drafter.
        apart: differences of the two compared drafters.
    """

    categories: list[str] = field(default_factory=list)
    acceptance: dict[str, list[Acceptance]] = field(default_factory=dict)
    apart: list[Tensor] = field(default_factory=list)

    def only(self, category: str) -> Gathered:
        own = [i for i, name in enumerate(self.categories) if name == category]
        return Gathered(
            [category] * len(own),
            {name: [found[i] for i in own] for name, found in self.acceptance.items()},
            [self.apart[i] for i in own] if self.apart else [],
        )


def acceptance_figures(text: Text, gathered: Gathered, category: str) -> list[AcceptanceFigures]:
    """Return each drafter's acceptance over all sequences; errors are over sequences."""
    rows = []
    for name, parts in gathered.acceptance.items():
        total, errors = pool(parts), standard_errors(influences(parts))
        rows.append(
            AcceptanceFigures(
                drafter=name,
                text=text.kind,
                steps=total.steps,
                drafts=total.drafts,
                length=total.length,
                standard_error=errors[-1],
                rates=total.rates,
                note=total.note,
                category=category,
                sequences=len(parts),
                rate_errors=tuple(errors[:-1]),
            )
        )
    return rows


def parity_figures(text: Text, gathered: Gathered, compare: tuple[str, str], category: str) -> ParityFigures:
    """Return the difference of two drafters; errors of differences are over paired sequences."""
    source, output = (gathered.acceptance[name] for name in compare)
    before, after = pool(source), pool(output)
    errors = standard_errors(influences(output) - influences(source))
    kept, kept_error = share_kept(source, output)
    total = add_up(gathered.apart)
    return ParityFigures(
        text=text.kind,
        steps=after.steps,
        **name_figures(over_steps(total)),
        length_difference=after.length - before.length,
        length_difference_se=errors[-1],
        category=category,
        by_step=tuple(
            StepFigures(
                step=step + 1,
                **name_figures(total, step),
                rate_difference=after.rates[step] - before.rates[step],
                rate_difference_se=errors[step],
            )
            for step in range(after.steps)
        ),
        kept=kept,
        kept_se=kept_error,
    )


def text_figures(text: Text) -> TextFigures:
    """Return a text's size, and how much it repeats itself."""
    rows = [batch.tokens for batch in text.batches]
    return TextFigures(
        kind=text.kind,
        sequences=sum(len(r) for r in rows),
        tokens=sum(r.numel() for r in rows),
        distinct_4grams=_distinct(text.batches),
    )


def _distinct(batches: Sequence[Batch]) -> float:
    sizes = [batch.tokens.numel() for batch in batches]
    shares = [distinct_ngrams(batch.tokens[:, batch.prompt_length - 1 :]) for batch in batches]
    return sum(size * share for size, share in zip(sizes, shares, strict=True)) / sum(sizes)


@dataclass(frozen=True)
class Proposer:
    """A drafter as a program.

    Attributes:
        logits: from tokens `[B, T]` and the target's states for them to `[K, B, T', draft_vocab]`, in the alignment of
            `drafters.chain`.
        target_ids: `[draft_vocab]`, the target id of each draft id.
    """

    logits: Callable[[Tensor, States], Tensor]
    target_ids: Tensor


def head_drafter(head: RunningDrafter, steps: int, stored: tuple[int, ...] | None = None) -> Proposer:
    """Return kconv's own forward of a drafter as a program.

    Args:
        steps: K.
        stored: the layers whose outputs the states hold, including the head's own; only the head's own if None.
    """
    own: tuple[int, ...] = head.spec.captured
    stored = stored or own
    columns = [stored.index(layer) for layer in own]

    def logits(tokens: Tensor, states: States) -> Tensor:
        captured = states.captured.unflatten(-1, (len(stored), -1))[..., columns, :].flatten(-2)
        return head.draft(tokens, captured, steps)

    return Proposer(logits, head.target_ids)


@dataclass(frozen=True)
class Measured:
    """Figures of one text: the text itself, each drafter's acceptance, and parity if two were compared.

    Attributes:
        text, acceptance, parity: over all prompts.
        acceptance_by_category, parity_by_category: the same by category; empty if there is only one.
        parts: the error of each part, if two heads were passed for that.
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
    drafters: Mapping[str, Proposer],
    *,
    compare: tuple[str, str] | None = None,
    bigram: Bigram | Halves | None = None,
    parts: Parts | None = None,
) -> Measured:
    """Measure drafters on one text, with the target in memory.

    Args:
        captured: layers whose outputs the drafters read.
        steps, drafters, compare, bigram, parts: as in `measure_states`.
    """

    def run(batch: Batch) -> States:
        return run_target(model, batch.tokens, captured)

    return measure_states(text, run, steps, drafters, compare=compare, bigram=bigram, parts=parts)


@torch.no_grad()
def measure_states(
    text: Text,
    run: Callable[[Batch], States],
    steps: int,
    drafters: Mapping[str, Proposer],
    *,
    compare: tuple[str, str] | None = None,
    bigram: Bigram | Halves | None = None,
    parts: Parts | None = None,
) -> Measured:
    """Measure drafters on one text.

    Args:
        run: returns the target's states for a batch, whatever their origin.
        steps: K.
        compare: names of the source and the output, to be compared position by position.
        bigram: a bigram table to show next to the heads, with prompt lookup, or two by halves of the text; neither is
            shown if None.
    """
    gathered = Gathered(acceptance={name: [] for name in drafters})
    for batch in text.batches:
        count_chains(batch.tokens.shape[1], steps)
        states = run(batch)
        logits = {name: drafter.logits(batch.tokens, states) for name, drafter in drafters.items()}
        for name, drafter in drafters.items():
            gathered.acceptance[name] += accept(text, batch, logits[name], states.logits, drafter.target_ids)
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


def accept(text: Text, batch: Batch, logits: Tensor, target_logits: Tensor, target_ids: Tensor) -> list[Acceptance]:
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
    text: Text, batch: Batch, target_logits: Tensor, steps: int, bigram: Bigram | Halves
) -> list[tuple[str, list[Acceptance]]]:
    found = lookup_drafts(batch.tokens, steps)
    by_pairs: list[Acceptance] = []
    for row in range(len(batch.tokens)):
        one = bigram if isinstance(bigram, Bigram) else bigram.of(batch.places[row])
        alone = replace(batch, tokens=batch.tokens[row : row + 1])
        if text.kind == "greedy":
            by_pairs += _greedy(bigram_drafts(one, alone.tokens, steps), alone)
        else:
            by_pairs += _sampled(bigram_overlap(one, alone.tokens, target_logits[row : row + 1], steps), alone)
    if text.kind == "greedy":
        return [("bigram", by_pairs), ("prompt lookup", _greedy(found, batch))]
    return [("bigram", by_pairs), ("prompt lookup", _sampled(certain_overlap(found, target_logits), batch))]
