"""What drafters did on a text, sequence by sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..head.chain import Acceptance, pool
from ..head.drafters import distinct_ngrams
from .apart import add_up, name_figures, over_steps
from .figures import AcceptanceFigures, ParityFigures, StepFigures, TextFigures
from .ratios import influences, standard_errors
from .texts import Batch, Text


@dataclass
class Gathered:
    """What was found on each sequence of a text, in one order.

    Attributes:
        categories: each sequence's.
        acceptance: by drafter.
        apart: differences of the two that are compared.
    """

    categories: list[str] = field(default_factory=list)
    acceptance: dict[str, list[Acceptance]] = field(default_factory=dict)
    apart: list[Tensor] = field(default_factory=list)

    def only(self, category: str) -> Gathered:
        """Return what was found on the sequences of one category."""
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
    """Return how far the second of two drafters is from the first; errors of differences are over paired sequences."""
    source, output = (gathered.acceptance[name] for name in compare)
    before, after = pool(source), pool(output)
    errors = standard_errors(influences(output) - influences(source))
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
    )


def text_figures(text: Text) -> TextFigures:
    """Return how large a text is, and how much it repeats itself."""
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
