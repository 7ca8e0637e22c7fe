"""The possible readings of a head, and which one its target's states confirm.

A trained head drafts best in the way it was trained, so readings are measured: the same head with another spec, or with
its weights in another order, drafts over the same text, and the two are compared by the paired standard error over
sequences. This needs no source, only the target and some text.

There are two kinds of readings. Some concern facts that files leave open or a user stated: which layers a head reads,
its RoPE base, whether its first residual is normed. Others undo a known mistake of a loader, an exporter or a config
that keeps names, shapes and dtypes: gate and up swapped, RoPE's pairs as halves or as neighbors, keys and values of a
fused projection in another order, norms that are off by one (Gemma's).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from ..checkpoint.manifest import FactValue
from ..convert.read import Head
from ..drafters.base import RunningDrafter
from ..drafters.chain import Acceptance, pool
from ..drafters.facts import BASES, measurable, phrase
from ..drafters.forward import DraftHead
from ..drafters.spec import Gqa, HeadSpec, Mla, Rope
from ..drafters.yarn import softmax_scale
from ..measure.drafting import accept, head_drafter
from ..measure.figures import ReadingFigures, ReadingsDecided, TextKind
from ..measure.statistics import influences, standard_errors
from ..measure.texts import Batch, Text
from ..rule import Found
from ..targets.config import TargetConfig
from ..targets.forward import States
from .report import Finding
from .rules.comparisons import RULE

# How many paired standard errors must separate two readings.
TOLD = 3.0
# With fewer sequences a standard error means nothing; with fewer than `MANY` all of them must agree.
FEWEST, MANY = 4, 8
# A head with less acceptance in its best reading hardly drafts, and the differences of its readings are chance.
DRAFTS = 1.2
# Texts by how well they separate two readings: the longest first, and greedy text, which loops, last.
KINDS = ("held-out", "sampled", "greedy")
# Sequences of each text for undoing all mistakes, how many of the best then run on more, and on how many.
SCREENED, BEST, PROBED = 1, 6, 12
# Fewer show too little of their spread.
LEAST = 6
# A mistake counts if undoing it gains this many standard errors, and this share of the acceptance length.
SIGMAS, GAIN = 4.0, 0.01
# A change of strength is a fault if it costs this share of the accepted drafts. A right head of 20 steps gained 17 %
# from one, the most of 36 (docs/validate.md, which also says which faults are found at which acceptance).
FAULT = 0.2
# The same for other layers than the files state. A right head of 60 steps gained 2.3 % from layers one earlier; the
# demo's heads lose 5.7 % and more by layers one off.
OTHER_LAYERS = 0.04
FAR = (
    "Compare rope_theta and rope_scaling with the training config. If they are equal, the head was trained on shorter"
    " text than this: train it on longer, or serve it so."
)
# For a mistake that is not the best of many, but tested by itself.
SIGMAS_OF_ONE, GAIN_OF_ONE = 3.0, 0.001
# The share that a setting of the target's must gain to be a fault: a right head of 80 steps gained 0.3 % by its RoPE.
FAULT_OF_ONE = 0.005
TARGETS_ROPE = "the target's own RoPE"
# Another RoPE may also gain where the text is longer than what the head was trained on, which says nothing against its
# own. The demo's heads saw rows of 96 tokens. A lost base shows within them: with 500 for 10,000 the GQA head regains
# 0.249 from the target's in texts of 96.
NEAR = 96
SCALES = (0.8, 0.9, 1.1, 1.25)
# Of fc, whose scale a loader may lose whole.
LOST_SCALES = (0.01, 0.1, 10.0, 100.0)
# More captured states than this have too many orders to try.
MOST_STATES = 4
Key = TypeVar("Key")


@dataclass(frozen=True)
class Reading:
    """A head's weights with one spec."""

    spec: Any

    @property
    def facts(self) -> dict[str, FactValue]:
        """The value of each measurable fact, by its name."""
        return {fact.name: fact.read(self.spec) for fact in measurable(self.spec.drafter.facts)}


def find_readings(
    head: Head, config: TargetConfig, still_open: Collection[str], stored: Collection[int] | None = None
) -> tuple[Reading, ...]:
    """Return the readings of a head to measure, the one in use first.

    They always vary the captured layers: one layer early and one late, which is the difference between layer inputs and
    outputs.

    Args:
        head: as read.
        config: its target's.
        still_open: the facts that its files leave open, or that rest on the user's word.
        stored: the layers whose outputs are available; None for all of the target's.
    """
    specs = [head.spec]
    for fact in measurable(head.drafter.facts):
        if fact.put is None or fact.name not in {"captured", *still_open}:
            continue
        candidates = fact.candidates(head.checkpoint.config, head.hints, head.checkpoint.tensors)
        known = (one.value for one in candidates if one.value is not None)
        values = dict.fromkeys([fact.read(head.spec), *fact.rivals(head.spec, config), *known])
        specs = [fact.put(spec, value) for spec in specs for value in values]
    layers, count = set(range(config.layers) if stored is None else stored), len(head.spec.captured)
    return tuple(Reading(spec) for spec in specs if layers.issuperset(spec.captured) and len(spec.captured) == count)


def choose_text(texts: Sequence[Text]) -> Text:
    """Return the text that separates readings best."""
    return min(texts, key=lambda text: KINDS.index(text.kind))


@dataclass(frozen=True)
class ReadingsMeasured:
    """Acceptance of each reading on one text.

    Attributes:
        readings: the one in use first.
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
        """The number of sequences in the text."""
        return len(self.parts[0])

    def behind(self, one: int, other: int) -> tuple[float, float | None]:
        """Return by how much one reading's length falls short of another's, and its paired standard error."""
        return _behind(self.parts[one], self.parts[other])

    def beats(self, other: int, one: int) -> bool:
        """Return whether one reading is better than another by more than the noise."""
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
                    facts=reading.facts,
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


def _behind(one: Sequence[Acceptance], other: Sequence[Acceptance]) -> tuple[float, float | None]:
    """Return by how much one length falls short of another on the same sequences, and the paired standard error."""
    return pool(other).length - pool(one).length, standard_errors(influences(other) - influences(one))[-1]


@torch.no_grad()
def _accept(
    batches: Iterable[tuple[Text, Batch]], run: Callable[[Batch], States], stored: tuple[int, ...], steps: int,
    heads: Callable[[], Iterable[tuple[Key, RunningDrafter]]], within: int | None = None,
) -> dict[Key, list[Acceptance]]:  # fmt: skip
    """Return the acceptance of each head on each sequence; `heads` is evaluated again for each batch.

    Only drafts that start within the first tokens count, if `within` says of how many.
    """
    found: dict[Key, list[Acceptance]] = {}
    for text, batch in batches:
        if within is not None and batch.prompt_length > within:
            continue
        states = run(batch)
        for key, head in heads():
            drafter = head_drafter(head, steps, stored)
            logits = drafter.logits(batch.tokens, states)[:, :, :within]
            found.setdefault(key, []).extend(accept(text, batch, logits, states.logits, drafter.target_ids))
    return found


def measure_readings(
    text: Text, run: Callable[[Batch], States], stored: tuple[int, ...], steps: int, head: RunningDrafter,
    found: tuple[Reading, ...],
) -> ReadingsMeasured:  # fmt: skip
    """Measure each reading of a head on one text.

    Args:
        text: the text.
        run: returns the target's states for a batch.
        stored: the layers whose outputs these states hold, in their order.
        steps: K.
        head: the head in memory, in any of its readings.
        found: the readings.
    """
    load = head.spec.drafter.load
    heads = [(place, load(one.spec, head.weights)) for place, one in enumerate(found)]
    parts = _accept(((text, batch) for batch in text.batches), run, stored, steps, lambda: heads)
    return ReadingsMeasured(found, text.kind, tuple(tuple(parts.get(place, ())) for place, _ in heads))


def decide_readings(measured: ReadingsMeasured, still_open: Collection[str], *, taken: bool = True) -> ReadingsDecided:
    """Return what the measurements decide.

    Args:
        measured: the measurements.
        still_open: the facts that the head's files leave open, or that rest on the user's word.
        taken: whether the head is in use with the first reading; false for a head that cannot be read without options.
    """
    best, lengths, facts = measured.best, measured.lengths, [one.facts for one in measured.readings]
    changed = [{name for name, value in one.items() if value != facts[0][name]} for one in facts]
    beaten: set[str] = set()
    if taken and measured.beats(best, 0):
        # A fact that does not affect the acceptance length, such as theta over short texts, stays unchanged.
        right = [at for at in range(len(facts)) if measured.beats(at, 0) and not measured.beats(best, at)]
        best = min(right, key=lambda at: (len(changed[at]), -lengths[at]))
        # A trifle does not call the files' statements into doubt: a barely trained head may gain it from any change.
        if changed[best] & set(still_open) or measured.behind(0, best)[0] > OTHER_LAYERS * (lengths[best] - 1):
            beaten = changed[best]
    confirmed, undecided = [], []
    for name in facts[best]:
        if name in still_open and name not in beaten:
            others = _others(measured, best, name)
            certain = others and all(measured.beats(best, other) for other in others)
            (confirmed if certain else undecided).append(name)
    named = tuple(name for name in facts[best] if name in beaten)
    return ReadingsDecided(winner=best, beaten=named, confirmed=tuple(confirmed), undecided=tuple(undecided))


def _others(measured: ReadingsMeasured, best: int, fact: str) -> list[int]:
    """Return the readings with another value of a fact."""
    own = measured.readings[best].facts[fact]
    return [at for at, one in enumerate(measured.readings) if one.facts[fact] != own]


def judge_readings(measured: ReadingsMeasured, decided: ReadingsDecided) -> Iterator[Finding]:
    """Yield the findings: a reading that another one beats, and for each open fact whether the measurement decides it.

    Args:
        measured: the measurements.
        decided: what they decide.
    """
    best, lengths, facts = decided.winner, measured.lengths, [one.facts for one in measured.readings]
    known = measured.readings[0].spec.drafter.facts
    right = facts[best]
    on = f"{measured.sequences} sequence{'s' * (measured.sequences != 1)} of {measured.text} text"
    if decided.beaten:
        gap, error = measured.behind(0, best)
        read, instead = (
            ", ".join(f"{name}: {phrase(name, one[name])}" for name in decided.beaten) for one in (facts[0], right)
        )
        options = " ".join(known[name].options(right[name]) for name in decided.beaten)
        # Some lists alone could mean inputs too, and would be refused.
        options += " --captured-are outputs" if "captured" in decided.beaten else ""
        yield RULE["K312"].finding(
            Found(
                "config.json",
                f"read as {read}, the acceptance length is {lengths[0]:.3f}; read as {instead}, it is"
                f" {lengths[best]:.3f} (+{gap:.3f} ± {error:.3f}, {on})",
                f"Convert the source again with {options}.",
            )
        )
    for name in decided.confirmed:
        nearest = max(_others(measured, best, name), key=lengths.__getitem__)
        gap, error = measured.behind(nearest, best)
        yield RULE["K313"].finding(
            Found(
                f"config.json: {name}",
                f"measured: {phrase(name, right[name])}, acceptance length {lengths[best]:.3f}; the next best reading,"
                f" {phrase(name, facts[nearest][name])}, has {lengths[nearest]:.3f} (-{gap:.3f} ± {error:.3f}, on"
                f" {on})",
                f"Pass {known[name].options(right[name])}.",
            )
        )
    for name in decided.undecided:
        rivals = [facts[at][name] for at in _others(measured, best, name) if not measured.beats(best, at)]
        shown = " or ".join(phrase(name, value) for value in dict.fromkeys([right[name], *sorted(rivals)]))
        yield RULE["K314"].finding(
            Found(
                f"config.json: {name}",
                f"the measurement cannot decide it: {shown}; the differences are within the noise of {on}",
                "Use more prompts, or longer ones (--new-tokens), and states of the adjacent layers.",
            )
        )


Kind = Literal["structure", "layers", "strength", "scale", "target's"]


@dataclass(frozen=True)
class Mistake:
    """A known mistake, undone.

    Attributes:
        name: the change, as the end of "accepted more often with ...".
        kind: "structure" if weights or states would be in another order, from which no right head gains. "layers" if
            the states would be of other layers. "strength" if a norm would be another or left out, or the attention
            have other heads, "scale" if a norm or fc would only be stronger or weaker: an undertrained head may gain
            from these. "target's" if the config would state what the target's does: a single guess rather than a
            search, so a smaller gain suffices.
        head: the changed head.
        expected: whether heads of this kind are built this way; if not, the head should draft better unchanged.
        scaled: the unchanged head with its norms, or its softmax, as strong as the changed one's. What the change gains
            beyond it does not come from strength, so no right head lacks it.
    """

    name: str
    kind: Kind
    head: DraftHead
    expected: bool = False
    scaled: DraftHead | None = None


@dataclass(frozen=True)
class Gain:
    """The gain from undoing a mistake: acceptance length and its paired standard error.

    Attributes:
        beyond: the gain beyond that of `Mistake.scaled`, and its error, if there is one.
        near: the gain of another RoPE in the first `NEAR` tokens, and its error, if that was asked.
    """

    name: str
    kind: Kind
    before: float
    gained: float
    error: float
    expected: bool = False
    beyond: tuple[float, float] | None = None
    near: tuple[float, float] | None = None

    @property
    def is_far(self) -> bool:
        """Whether it gains in text alone that may be longer than what the head was trained on."""
        return self.near is not None and self.near[0] <= max(SIGMAS_OF_ONE * self.near[1], GAIN_OF_ONE * self.before)

    @property
    def is_fault(self) -> bool:
        """Whether the gain is clear, and more than an undertrained head gains from a change of its kind."""
        if self.is_far:
            return False
        if self.kind == "target's" and self.gained <= FAULT_OF_ONE * self.before:
            return False
        if not self.is_clear or self.kind == "structure" or (self.kind == "target's" and self.beyond is None):
            return self.is_clear
        accepted = self.before + self.gained - 1
        if self.kind == "layers":
            return self.gained > OTHER_LAYERS * accepted
        is_own = self.beyond is not None and replace(self, gained=self.beyond[0], error=self.beyond[1]).is_clear
        return is_own or self.gained > FAULT * accepted

    @property
    def is_clear(self) -> bool:
        """Whether the gain is more than chance, and more than a little."""
        if self.kind == "target's":
            return self.gained > SIGMAS_OF_ONE * self.error and self.gained > GAIN_OF_ONE * self.before
        return self.gained > SIGMAS * self.error and self.gained > GAIN * self.before

    @property
    def is_loss(self) -> bool:
        """Whether the change is clearly worse, which confirms the head as it is."""
        return -self.gained > SIGMAS_OF_ONE * self.error


@dataclass(frozen=True)
class TargetsOwn:
    """Settings of a target's config that its heads often state too; `mla` if it has latent attention."""

    rope: Rope | None
    eps: float | None
    mla: bool

    def readings(self, head: DraftHead) -> Iterator[Mistake]:
        """Yield the head with each of them, if the head's own config states something else."""
        spec = head.spec
        if self.rope is not None and self.rope != spec.rope:
            expected = self.mla and isinstance(spec.attention, Mla)
            # YaRN scales the softmax too, and so do larger queries.
            ratio = softmax_scale(self.rope, spec.attention) / softmax_scale(spec.rope, spec.attention)
            turned = head.altered(replace(spec, rope=self.rope))
            yield Mistake(TARGETS_ROPE, "target's", turned, expected, None if ratio == 1 else _louder(head, ratio))
        if self.eps is not None and self.eps != spec.eps:
            yield Mistake(f"the target's epsilon, {self.eps!r}", "target's", head.altered(replace(spec, eps=self.eps)))


def find_layers(captured: Sequence[int], layers: Collection[int]) -> frozenset[int]:
    """Return the layers whose outputs a head's mistakes need, as far as the target has them."""
    return frozenset(layer + by for layer in captured for by in (-1, 0, 1) if layer + by in layers)


def known_mistakes(head: DraftHead, layers: Iterable[int], but: Collection[HeadSpec] = ()) -> Iterator[Mistake]:
    """Yield the head with each known mistake undone.

    Args:
        head: the head according to its files.
        layers: target layers whose outputs are available.
        but: specs that are measured as readings anyway.
    """
    spec, weights = head.spec, head.weights
    for layer in range(spec.layers):
        yield from _structure(head, f"{layer}.")
    for one, other in combinations(_hidden_norms(spec), 2):
        yield _norms_as(head, f"{_plain(one)} and {_plain(other)} swapped", {one: weights[other], other: weights[one]})
    for name in _norms(weights):
        for sign, said in ((1.0, "less one"), (-1.0, "plus one")):
            yield _norms_as(head, f"{_plain(name)} {said}", {name: weights[name] - sign})
    yield from _orders(head)
    for by in (-1, 1):
        moved = head.altered()
        moved.target_ids = head.target_ids.roll(by)
        yield Mistake(f"the rows of lm_head moved by {by:+d}", "structure", moved)
    yield from _splits(head)
    for name, other in _specs(spec, frozenset(layers)):
        if other not in but:
            yield Mistake(name, _kind(spec, other), head.altered(other))
    for name in _norms(weights):
        yield from _scaled(head, name, SCALES)
    yield from _scaled(head, "fc", LOST_SCALES)


def measure_mistakes(
    head: DraftHead,
    texts: Sequence[Text],
    run: Callable[[Batch], States],
    stored: tuple[int, ...],
    steps: int,
    target: TargetsOwn | None = None,
    but: Collection[HeadSpec] = (),
) -> list[Gain]:
    """Undo each known mistake of a head on the first sequences of held-out and sampled text, and the best on more.

    Greedy text shows little: a small target's runs in circles, which any reading drafts well.

    Args:
        head: the head according to its files.
        texts: as in `texts.make_texts`.
        run: returns the target's states for a batch.
        stored: the layers whose outputs these states hold, in their order.
        steps: K.
        target: the target's own settings.
        but: specs that are measured as readings anyway.

    Returns:
        The gains of the best ones, and of those from the target's config, the greatest first; nothing if there is too
        little text.
    """

    turned: set[str] = set()

    def gains(
        count: int, mistakes: Callable[[], Iterable[Mistake]], least: int, within: int | None = None
    ) -> list[Gain]:
        kinds: dict[str, tuple[Kind, bool]] = {}

        def heads() -> Iterator[tuple[tuple[str, bool], DraftHead]]:
            yield ("", False), head
            for mistake in mistakes():
                kinds[mistake.name] = (mistake.kind, mistake.expected)
                if mistake.head.spec.rope != head.spec.rope:
                    turned.add(mistake.name)
                yield (mistake.name, False), mistake.head
                if mistake.scaled is not None and count > SCREENED:
                    yield (mistake.name, True), mistake.scaled

        parts = _accept(_first(texts, count), run, stored, steps, heads, within)
        own = parts.get(("", False), [])
        if len(own) < least:
            return []
        before, found = pool(own).length, []
        for name, (kind, expected) in kinds.items():
            gained, error = _behind(own, parts[name, False])
            beyond = None
            if (scaled := parts.get((name, True))) is not None:
                more, apart = _behind(scaled, parts[name, False])
                beyond = (more, apart or 0.0)
            found.append(Gain(name, kind, before, gained, error or 0.0, expected, beyond))
        return sorted(found, key=lambda gain: -gain.gained)

    screened = gains(SCREENED, lambda: known_mistakes(head, stored, but), 1)
    names = {gain.name for gain in screened[:BEST]}
    best = [mistake for mistake in known_mistakes(head, stored, but) if mistake.name in names]
    best += target.readings(head) if target else ()
    found = gains(PROBED, lambda: best, LEAST)
    asked = {gain.name for gain in found if gain.name in turned and gain.is_fault}
    if not asked:
        return found
    again = gains(PROBED, lambda: (mistake for mistake in best if mistake.name in asked), LEAST, NEAR)
    near = {gain.name: (gain.gained, gain.error) for gain in again}
    return [replace(gain, near=near.get(gain.name)) for gain in found]


def judge_mistakes(gains: Sequence[Gain], otherwise: float = 0.0, least: float = 0.0) -> Iterator[Finding]:
    """Yield a finding if undoing a mistake raises the head's acceptance; the greatest gain names the error.

    Args:
        gains: from undoing each of them.
        otherwise: what another reading of the head gains. A mistake that gains no more only comes close to it.
        least: the length that drafters without a network reach. A cure that reaches no more is none.
    """
    clear = [gain for gain in gains if gain.is_clear and gain.gained > otherwise and gain.before + gain.gained > least]
    faults = [gain for gain in clear if gain.is_fault]
    # The target's statement needs no guess, though another reading may gain the same by coming close to it. And a scale
    # that compensates half of an error elsewhere is not the error, nor is a swap that does.
    certain = [gain for gain in faults if gain.kind != "scale" and 2 * gain.gained > faults[0].gained]
    own = [gain for gain in certain if gain.kind == "target's" and gain.gained > certain[0].gained - certain[0].error]
    for gain in (own or certain or faults or clear)[:1]:
        rule = RULE["K364" if gain.is_fault else "K365"]
        after = gain.before + gain.gained
        said = f"with {gain.name} the acceptance length is {after:.3f}, unchanged it is {gain.before:.3f}"
        said += f" (a gain of {gain.gained:.3f} ± {gain.error:.3f})"
        if gain.near is None or gain.is_fault:
            yield rule.finding(Found(gain.name, said))
            continue
        said += f"; in the first {NEAR} tokens of each text it gains {gain.near[0]:.3f} ± {gain.near[1]:.3f}"
        yield rule.finding(Found(gain.name, said, FAR, severity="warning"))
    for gain in gains:
        if gain.expected and not gain.is_fault and not gain.is_loss:
            after = gain.before + gain.gained
            said = f"with the target's the acceptance length is {after:.3f}, with its own {gain.before:.3f}"
            apart = f"a difference of {gain.gained:+.3f} ± {gain.error:.3f}"
            yield RULE["K366"].finding(Found(gain.name, f"the head's RoPE is not its target's: {said} ({apart})"))


def _first(texts: Iterable[Text], count: int) -> Iterator[tuple[Text, Batch]]:
    for text in texts:
        left = count if text.kind != "greedy" else 0
        for batch in text.batches:
            if left > 0:
                yield text, replace(batch, tokens=batch.tokens[:left], places=batch.places[:left])
                left -= len(batch.tokens)


def _with(head: DraftHead, name: str, changed: Mapping[str, Tensor]) -> Mistake:
    return Mistake(name, "structure", head.altered(weights=changed))


def _scaled(head: DraftHead, name: str, factors: Iterable[float]) -> Iterator[Mistake]:
    for factor in factors:
        changed = {name: head.weights[name] * factor}
        yield replace(_with(head, f"{_plain(name)} times {factor:g}", changed), kind="scale")


def _norms_as(head: DraftHead, name: str, changed: Mapping[str, Tensor]) -> Mistake:
    """Return the head with other norms, and with its own norms as strong as those."""
    own = {slot: head.weights[slot] for slot in changed}
    scaled = {slot: w * (changed[slot].abs().mean() / w.abs().mean().clamp_min(1e-6)) for slot, w in own.items()}
    return Mistake(name, "strength", head.altered(weights=changed), scaled=head.altered(weights=scaled))


def _plain(slot: str) -> str:
    return slot.removeprefix("0.")


def _norms(weights: Mapping[str, Tensor]) -> list[str]:
    return [name for name in weights if name.endswith("norm") or ".fc_norm." in name or name == "norm"]


def _hidden_norms(spec: HeadSpec) -> list[str]:
    return ["0.hidden_norm", "0.input_layernorm", "0.post_attention_layernorm", "norm"]


def _structure(head: DraftHead, at: str) -> Iterator[Mistake]:
    """Yield a layer's linear layers in other orders."""
    weights, attention = head.weights, head.spec.attention
    gate, up = f"{at}gate_proj", f"{at}up_proj"
    yield _with(head, f"{_plain(gate)} and {_plain(up)} swapped", {gate: weights[up], up: weights[gate]})
    yield from _halves(head, at)
    yield from _groups(head, at)
    if isinstance(attention, Gqa):
        keys, values = (
            [slot for slot in (f"{at}{name}", f"{at}{name}.bias") if slot in weights] for name in ("k_proj", "v_proj")
        )
        pairs = list(zip(keys, values, strict=True))
        changed = {one: weights[other] for pair in pairs for one, other in (pair, pair[::-1])}
        yield _with(head, f"{_plain(keys[0])} and {_plain(values[0])} swapped", changed)
    rows = _mla_rows if isinstance(attention, Mla) else _gqa_rows
    turned = rows(head, at)
    for way, how in (("halves", _to_halves), ("neighbors", _to_neighbors)):
        for slots in ((*turned,), *((slot,) for slot in turned)):
            named = " and ".join(map(_plain, slots))
            yield _with(head, f"RoPE's pairs of {named} as {way}", {slot: turned[slot](how) for slot in slots})
    o_proj = f"{at}o_proj"
    columns = weights[o_proj].unflatten(1, (attention.heads, -1))
    yield _with(head, f"the heads of {_plain(o_proj)} reversed", {o_proj: columns.flip(1).flatten(1)})
    for by in (-1, 1):
        yield _with(head, f"the heads of {_plain(o_proj)} moved by {by:+d}", {o_proj: columns.roll(by, 1).flatten(1)})
    mixed = weights[o_proj].unflatten(1, (-1, attention.heads)).transpose(1, 2).flatten(1)
    yield _with(head, f"the columns of {_plain(o_proj)} by head and not by dim", {o_proj: mixed})
    if isinstance(attention, Mla):
        yield from _latent(head, attention, at)


def _halves(head: DraftHead, at: str) -> Iterator[Mistake]:
    """Yield the MLP's matrices with halves of their inner width in other places."""
    weights, slots = head.weights, [f"{at}{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    gate, up, down = slots
    if weights[gate].shape[0] % 2:
        return
    for slot in slots:
        dim = 1 if slot == down else 0
        yield _with(
            head, f"the halves of {_plain(slot)} swapped", {slot: torch.cat(weights[slot].chunk(2, dim)[::-1], dim)}
        )
    # A fused matrix may hold gate and up by shard, or row by row; a split in the middle then mixes them.
    fused = torch.cat([weights[gate], weights[up]])
    shards = fused.unflatten(0, (2, 2, -1))
    for way, parts in (("by halves", (shards[:, 0], shards[:, 1])), ("row by row", (fused[0::2], fused[1::2]))):
        changed = dict(zip((gate, up), (part.reshape(weights[gate].shape) for part in parts), strict=True))
        yield _with(head, f"{_plain(gate)} and {_plain(up)} fused {way}", changed)


def _groups(head: DraftHead, at: str) -> Iterator[Mistake]:
    """Yield the query heads, and o_proj's with them or not, in the order of each way to group them."""
    weights, heads, o_proj = head.weights, head.spec.attention.heads, f"{at}o_proj"
    slot = f"{at}{'q_b_proj' if isinstance(head.spec.attention, Mla) else 'q_proj'}"
    query, output = weights[slot].unflatten(0, (heads, -1)), weights[o_proj].unflatten(1, (heads, -1))
    for size in range(2, heads):
        if heads % size == 0:
            order = torch.arange(heads).unflatten(0, (size, -1)).T.flatten()
            rows = {slot: query[order].flatten(0, 1)}
            said = f"the heads of {_plain(slot)} in turn from {size} groups"
            yield _with(head, said, rows)
            yield _with(head, f"{said}, and those of {_plain(o_proj)}", rows | {o_proj: output[:, order].flatten(1)})


def _latent(head: DraftHead, mla: Mla, at: str) -> Iterator[Mistake]:
    """Yield MLA's fused projections in other orders."""
    nope, rope, v = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim
    slot = f"{at}kv_b_proj"
    kv = head.weights[slot]
    by_head = kv.unflatten(0, (mla.heads, -1))
    values_first = torch.cat([by_head[:, v:], by_head[:, :v]], dim=1).flatten(0, 1)
    yield _with(head, f"values before keys in {_plain(slot)}", {slot: values_first})
    keys, values = kv.split([mla.heads * nope, mla.heads * v])
    blocks = torch.cat([keys.unflatten(0, (mla.heads, -1)), values.unflatten(0, (mla.heads, -1))], dim=1)
    yield _with(head, f"all keys before all values in {_plain(slot)}", {slot: blocks.flatten(0, 1)})
    dims = kv.unflatten(0, (-1, mla.heads)).transpose(0, 1).flatten(0, 1)
    yield _with(head, f"{_plain(slot)} by dim and not by head", {slot: dims})
    slot = f"{at}q_b_proj"
    query = head.weights[slot].unflatten(0, (mla.heads, -1))
    rotary_first = torch.cat([query[:, rope:], query[:, :rope]], dim=1).flatten(0, 1)
    yield _with(head, f"the rotary dims first in {_plain(slot)}", {slot: rotary_first})


Turn = Callable[[Tensor], Tensor]


def _to_halves(rows: Tensor) -> Tensor:
    """Take rows whose pairs are neighbors as if they were halves: `[..., dims, in]`."""
    return torch.cat([rows[..., 0::2, :], rows[..., 1::2, :]], dim=-2)


def _to_neighbors(rows: Tensor) -> Tensor:
    one, other = rows.chunk(2, dim=-2)
    return torch.stack([one, other], dim=-2).flatten(-3, -2)


def _mla_rows(head: DraftHead, at: str) -> dict[str, Callable[[Turn], Tensor]]:
    mla = head.spec.attention
    if not isinstance(mla, Mla):
        return {}

    def query(how: Turn) -> Tensor:
        rows = head.weights[f"{at}q_b_proj"].unflatten(0, (mla.heads, -1))
        fixed, turned = rows.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=1)
        return torch.cat([fixed, how(turned)], dim=1).flatten(0, 1)

    def key(how: Turn) -> Tensor:
        rows = head.weights[f"{at}kv_a_proj_with_mqa"]
        return torch.cat([rows[: mla.kv_lora_rank], how(rows[mla.kv_lora_rank :])])

    return {f"{at}q_b_proj": query, f"{at}kv_a_proj_with_mqa": key}


def _gqa_rows(head: DraftHead, at: str) -> dict[str, Callable[[Turn], Tensor]]:
    gqa = head.spec.attention
    if not isinstance(gqa, Gqa):
        return {}

    def rows(slot: str, heads: int) -> Callable[[Turn], Tensor]:
        return lambda how: how(head.weights[slot].unflatten(0, (heads, -1))).flatten(0, 1)

    return {f"{at}q_proj": rows(f"{at}q_proj", gqa.heads), f"{at}k_proj": rows(f"{at}k_proj", gqa.kv_heads)}


def _orders(head: DraftHead) -> Iterator[Mistake]:
    """Yield the captured states in other orders before fc."""
    count = len(head.spec.captured)
    if count > MOST_STATES:
        return
    blocks = head.weights["fc"].unflatten(1, (count, -1))
    for order in permutations(range(count)):
        if list(order) != sorted(order):
            layers = [head.spec.captured[place] for place in order]
            # Column block i of the changed fc reads what block order[i] read.
            yield _with(head, f"the states before fc in the order {layers}", {"fc": blocks[:, order].flatten(1)})


def _splits(head: DraftHead) -> Iterator[Mistake]:
    """Yield the head with twice and half as many attention heads of the same width in all."""
    spec, gqa = head.spec, head.spec.attention
    if not isinstance(gqa, Gqa):  # the shapes of MLA's weights leave its number of heads no choice
        return
    for heads, kv, dim in (
        (gqa.heads * 2, gqa.kv_heads * 2, gqa.head_dim // 2),
        (gqa.heads // 2, gqa.kv_heads // 2, gqa.head_dim * 2),
    ):
        if dim % 2 == 0 and (heads * dim, kv * dim) == (gqa.heads * gqa.head_dim, gqa.kv_heads * gqa.head_dim):
            split = replace(gqa, heads=heads, kv_heads=kv, head_dim=dim)
            scaled = _louder(head, softmax_scale(spec.rope, split) / softmax_scale(spec.rope, gqa))
            name = f"{heads} attention heads of {dim} dims"
            yield Mistake(name, "strength", head.altered(replace(spec, attention=split)), scaled=scaled)


def _louder(head: DraftHead, ratio: float) -> DraftHead:
    """Return the head with a softmax that is this much stronger."""
    queries = [name for name in head.weights if name.endswith((".q_proj", ".q_b_proj"))]
    return head.altered(weights={name: head.weights[name] * ratio for name in queries})


def _kind(spec: HeadSpec, other: HeadSpec) -> Kind:
    return "strength" if other.norms != spec.norms else "layers" if other.captured != spec.captured else "structure"


def _specs(spec: HeadSpec, layers: frozenset[int]) -> Iterator[tuple[str, HeadSpec]]:
    """Yield the configs with which the same weights may be read."""
    own = spec.captured
    moved = [tuple(layer + by for layer in own) for by in (-1, 1)]
    moved += [(*own[:i], layer + by, *own[i + 1 :]) for i, layer in enumerate(own) for by in (-1, 1)]
    for other in dict.fromkeys(moved):
        if layers.issuperset(other) and list(other) == sorted(set(other)):
            yield f"the outputs of layers {list(other)}", replace(spec, captured=other)
    residual = replace(spec.norms, before_residual=not spec.norms.before_residual)
    yield f"{'a normed' if residual.before_residual else 'the raw'} residual", replace(spec, norms=residual)
    fed = replace(spec.norms, output=not spec.norms.output)
    yield f"a state fed back {'after' if fed.output else 'before'} the final norm", replace(spec, norms=fed)
    for theta in BASES:
        if theta != spec.rope.theta:
            yield f"a RoPE theta of {theta!r}", replace(spec, rope=replace(spec.rope, theta=theta))
    if spec.rope.scaling is not None:
        yield "no RoPE scaling", replace(spec, rope=replace(spec.rope, scaling=None))
