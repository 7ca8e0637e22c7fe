"""Which reading of a head its target's states confirm.

A config can leave open, or a user can say, which layers a head reads, by which base its RoPE turns, and whether its
first residual is normed. Each such reading is the same weights under another spec, so all of them are run over one text
beside the one that was taken, and compared by the paired standard error over sequences. A head that was trained is
measurably worse under any reading but its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from ..convert.captured import readings
from ..convert.read import Head
from ..head.chain import Acceptance, pool
from ..head.forward import DraftHead
from ..head.spec import HeadSpec
from ..targets.config import TargetConfig
from ..targets.forward import States
from .figures import ReadingFigures, TextKind
from .measure import accept, head_drafter, influences, standard_errors
from .report import Finding
from .texts import Batch, Text

# By how many paired standard errors one reading must beat another to be told from it.
TOLD = 3.0
# Of fewer sequences a standard error says nothing; of fewer than `MANY` each one of them must say the same.
FEWEST, MANY = 4, 8
# A head that accepts less under its best reading hardly drafts, and what sets its readings apart is chance.
DRAFTS = 1.2
# Bases that trainers and targets of Llama, Qwen, Kimi and DeepSeek have.
BASES = (10000.0, 50000.0, 500000.0, 1000000.0)
# Texts by how well they tell two readings apart: the longest first, and greedy text, which loops, last.
KINDS = ("held-out", "sampled", "greedy")
FACTS = ("captured", "rope_theta", "norm_before_residual")


@dataclass(frozen=True)
class Reading:
    """A head's weights under one spec; `facts` are what it says of each of `FACTS`, as phrases."""

    spec: HeadSpec

    @property
    def facts(self) -> dict[str, str]:
        """What the reading says, by fact."""
        return {
            "captured": f"outputs of layers {list(self.spec.captured)}",
            "rope_theta": f"{self.spec.rope.theta:g}",
            "norm_before_residual": str(self.spec.norms.before_residual).lower(),
        }

    def options(self, fact: str) -> str:
        """Return the option of kconv that says what this reading does of a fact."""
        return {
            "captured": f"--captured {','.join(map(str, self.spec.captured))}",
            "rope_theta": f"--rope-theta {self.spec.rope.theta:g}",
            "norm_before_residual": f"--norm-before-residual {'yes' if self.spec.norms.before_residual else 'no'}",
        }[fact]


def find_readings(
    head: Head, config: TargetConfig, still_open: Collection[str], stored: Collection[int] | None = None
) -> tuple[Reading, ...]:
    """Return the readings of a head that are to be measured, the one that was taken first.

    The captured layers are always among what is measured: one layer early and one late, which is the difference
    between layer inputs and outputs.

    Args:
        head: as it was read.
        config: its target's.
        still_open: those of `FACTS` that its files leave open, or that rest on a user's word.
        stored: the layers whose outputs are at hand; None for all of the target's.
    """
    spec = head.spec
    shifted = [tuple(i + by for i in spec.captured) for by in (0, -1, 1)]
    listed = readings(head.checkpoint.config, head.hints, head.checkpoint.tensors)
    ids = dict.fromkeys([*shifted, *(one.ids for one in listed if len(one.ids) == len(spec.captured))])
    layers = range(config.layers) if stored is None else stored
    captured = [one for one in ids if all(i in layers for i in one)]
    bases = [spec.rope.theta]
    if "rope_theta" in still_open:
        own = config.rope.get("rope_theta")
        targets = [float(own)] if isinstance(own, (int, float)) and not isinstance(own, bool) and own > 0 else []
        bases = list(dict.fromkeys([*bases, *targets, *BASES]))
    normed = [spec.norms.before_residual]
    normed += [not normed[0]] if "norm_before_residual" in still_open else []
    return tuple(
        Reading(
            replace(
                spec,
                captured=one,
                rope=replace(spec.rope, theta=base),
                norms=replace(spec.norms, before_residual=before),
            )
        )
        for one, base, before in product(captured, bases, normed)
    )


def choose_text(texts: Sequence[Text]) -> Text:
    """Return the text that tells readings apart best."""
    return min(texts, key=lambda text: KINDS.index(text.kind))


@dataclass(frozen=True)
class ReadingsMeasured:
    """Acceptance of each reading on one text.

    Attributes:
        readings: the one that was taken first.
        text: the text's kind.
        parts: for each reading, its acceptance on each sequence.
    """

    readings: tuple[Reading, ...]
    text: TextKind
    parts: tuple[tuple[Acceptance, ...], ...]

    @property
    def lengths(self) -> list[float]:
        """The acceptance length of each reading."""
        return [pool(parts).length for parts in self.parts]

    @property
    def best(self) -> int:
        """Which reading has the largest acceptance length."""
        lengths = self.lengths
        return max(range(len(lengths)), key=lengths.__getitem__)

    @property
    def sequences(self) -> int:
        """How many sequences the text has."""
        return len(self.parts[0])

    def behind(self, one: int, other: int) -> tuple[float, float | None]:
        """Return by how much one reading's length falls short of another's, and its paired standard error."""
        moved = influences(self.parts[other]) - influences(self.parts[one])
        return self.lengths[other] - self.lengths[one], standard_errors(moved)[-1]

    def beats(self, other: int, one: int) -> bool:
        """Say whether a reading is better than another one by more than the noise."""
        gap, error = self.behind(one, other)
        if error is None or self.sequences < FEWEST or self.lengths[other] < DRAFTS or gap <= max(TOLD * error, 0.0):
            return False
        pairs = zip(self.parts[one], self.parts[other], strict=True)
        return self.sequences >= MANY or all(pool([b]).length > pool([a]).length for a, b in pairs)

    def figures(self) -> tuple[ReadingFigures, ...]:
        """Return a row for each reading."""
        rows = []
        for place, reading in enumerate(self.readings):
            gap, error = self.behind(place, self.best)
            total = pool(self.parts[place])
            rows.append(
                ReadingFigures(
                    **reading.facts,
                    taken=place == 0,
                    text=self.text,
                    steps=total.steps,
                    sequences=self.sequences,
                    length=total.length,
                    behind_best=gap,
                    behind_best_se=error,
                )
            )
        return tuple(rows)


@torch.no_grad()
def measure_readings(
    text: Text, run: Callable[[Batch], States], stored: tuple[int, ...], steps: int, head: DraftHead,
    found: tuple[Reading, ...],
) -> ReadingsMeasured:  # fmt: skip
    """Measure each reading of a head on one text.

    Args:
        text: the text.
        run: gives the target's states over a batch.
        stored: the layers whose outputs these states hold, in their order.
        steps: K.
        head: the head in memory, under any of its readings.
        found: the readings.
    """
    drafters = [head_drafter(DraftHead(one.spec, head.weights), steps, stored) for one in found]
    parts: list[list[Acceptance]] = [[] for _ in found]
    for batch in text.batches:
        states = run(batch)
        for place, drafter in enumerate(drafters):
            logits = drafter.logits(batch.tokens, states)
            parts[place] += accept(text, batch, logits, states.logits, drafter.target_ids)
    return ReadingsMeasured(found, text.kind, tuple(map(tuple, parts)))


def judge_readings(measured: ReadingsMeasured, still_open: Collection[str], *, taken: bool = True) -> Iterator[Finding]:
    """Yield what the measurement says: a reading that another one beats, and each open fact that it decides or not.

    Args:
        measured: what was measured.
        still_open: those of `FACTS` that the head's files leave open, or that rest on a user's word.
        taken: whether the head is read in the first reading; not so of one that cannot be read without a word.
    """
    best, lengths = measured.best, measured.lengths
    first, winner = measured.readings[0], measured.readings[best]
    on = f"{measured.sequences} sequences of {measured.text} text"
    beaten = taken and measured.beats(best, 0)
    apart = [fact for fact in FACTS if beaten and first.facts[fact] != winner.facts[fact]]
    if apart:
        gap, error = measured.behind(0, best)
        read, instead = (", ".join(f"{fact}: {one.facts[fact]}" for fact in apart) for one in (first, winner))
        yield Finding(
            rule="K312",
            severity="error",
            where="config.json",
            message=f"read as {read}, the acceptance length is {lengths[0]:.3f}; read as {instead}, it is"
            f" {lengths[best]:.3f} (+{gap:.3f} ± {error:.3f}, {on})",
            fix=f"Convert the source again with {' '.join(winner.options(fact) for fact in apart)}.",
        )
    for fact in (fact for fact in FACTS if fact in still_open and fact not in apart):
        others = [i for i, one in enumerate(measured.readings) if one.facts[fact] != winner.facts[fact]]
        if others and all(measured.beats(best, other) for other in others):
            nearest = max(others, key=lengths.__getitem__)
            gap, error = measured.behind(nearest, best)
            yield Finding(
                rule="K313",
                severity="note",
                where=f"config.json: {fact}",
                message=f"measured: {winner.facts[fact]}, acceptance length {lengths[best]:.3f}; the next best reading,"
                f" {measured.readings[nearest].facts[fact]}, has {lengths[nearest]:.3f} (-{gap:.3f} ± {error:.3f}, on"
                f" {on})",
                fix=f"Say {winner.options(fact)} where kconv asks.",
            )
        else:
            rivals = {measured.readings[i].facts[fact] for i in others if not measured.beats(best, i)}
            shown = " or ".join([winner.facts[fact], *sorted(rivals)])
            yield Finding(
                rule="K314",
                severity="warning",
                where=f"config.json: {fact}",
                message=f"measured, but cannot be decided: {shown}; the differences are within the noise of {on}",
                fix="Give more prompts, or longer ones (--new-tokens), and states of the layers beside these.",
            )
