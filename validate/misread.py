"""A head read otherwise than its files say, and measured: what it would be accepted as if a known mistake were undone.

Most mistakes of a converter leave names, shapes and dtypes as they were, so files alone cannot tell them. A trained
head can: it drafts best as it was trained. So each known mistake is undone in turn, and where the head is accepted
clearly more often so, that is what is wrong with it. It takes no source, only the target and some text.

The mistakes are those that loaders, exporters and configs of real heads have made: gate and up in the other order,
RoPE's pairs as halves and as neighbors, keys and values of a fused projection in another order, the captured layers
one too early, the wrong residual, norms that are one off (Gemma's), another theta.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import Literal

import torch
from torch import Tensor

from ..head.chain import draft_logits, lengths, overlap
from ..head.forward import DraftHead
from ..head.spec import Gqa, HeadSpec, Mla, Rope
from ..targets.forward import States
from .measure import standard_errors
from .texts import Batch, Text

Slots = Mapping[str, Tensor]
# Sequences of each text that all readings are measured on, how many of the best then are on more, and on how many.
SCREENED, BEST, PROBED = 1, 6, 12
# Fewer say too little of their spread.
LEAST = 6
# A reading is better where it gains this many standard errors, and this share of the acceptance length.
SIGMAS, GAIN = 4.0, 0.01
# One that is not the best of many, but asked for by itself.
SIGMAS_OF_ONE, GAIN_OF_ONE = 3.0, 0.001
SCALES = (0.8, 0.9, 1.1, 1.25)
# Of published heads and their targets.
TARGETS_ROPE = "the target's own RoPE"
THETAS = (1e4, 5e4, 5e5, 1e6)
# Orders of more states than these are too many to try.
MOST_STATES = 4


@dataclass(frozen=True)
class Misreading:
    """A head read otherwise.

    Attributes:
        name: how, as the end of "accepted more often with ...".
        kind: "structure" where weights or config would mean another thing altogether, "scale" where a norm is only
            stronger or weaker, which a head that is not fully trained may gain from too, "target's" where the config
            would state what the target's does: one guess and no search, so less is asked of what it gains.
        expected: whether heads of this kind are built so; one that is not should draft better as it is.
        head: the head so read.
    """

    name: str
    kind: Literal["structure", "scale", "target's"]
    head: DraftHead
    expected: bool = False


@dataclass(frozen=True)
class Gain:
    """What a reading gains over the head as it stands: acceptance length and its paired standard error."""

    reading: Misreading
    before: float
    after: float
    error: float

    @property
    def is_clear(self) -> bool:
        """Whether it is more than chance, and more than a little."""
        gained = self.after - self.before
        if self.reading.kind == "target's":
            return gained > SIGMAS_OF_ONE * self.error and gained > GAIN_OF_ONE * self.before
        return gained > SIGMAS * self.error and gained > GAIN * self.before

    @property
    def is_loss(self) -> bool:
        """Whether it is clearly worse than the head as it stands, which that confirms."""
        return self.before - self.after > SIGMAS_OF_ONE * self.error


@dataclass(frozen=True)
class TargetsOwn:
    """What a target's config states, and its heads' often state too; `mla` where its attention is that."""

    rope: Rope | None
    eps: float | None
    mla: bool

    def readings(self, head: DraftHead) -> Iterator[Misreading]:
        """Yield a head read by it, where the head's own config states otherwise."""
        spec = head.spec
        if self.rope is not None and self.rope != spec.rope:
            expected = self.mla and isinstance(spec.attention, Mla)
            yield Misreading(TARGETS_ROPE, "target's", head.altered(replace(spec, rope=self.rope)), expected)
        if self.eps is not None and self.eps != spec.eps:
            yield Misreading(
                f"the target's epsilon, {self.eps:g}", "target's", head.altered(replace(spec, eps=self.eps))
            )


def find_layers(captured: Sequence[int], layers: Collection[int]) -> frozenset[int]:
    """Return the layers whose outputs the readings of a head want, those of a target that has them."""
    return frozenset(layer + by for layer in captured for by in (-1, 0, 1) if layer + by in layers)


def other_readings(head: DraftHead, layers: Iterable[int]) -> Iterator[Misreading]:
    """Yield the readings of a head that known mistakes would have to be undone by.

    Args:
        head: the head as its files say.
        layers: target layers whose outputs are at hand.
    """
    spec, weights = head.spec, head.weights
    for layer in range(spec.layers):
        yield from _structure(head, f"{layer}.")
    for one, other in combinations(_hidden_norms(spec), 2):
        yield _with(head, f"{_plain(one)} and {_plain(other)} swapped", {one: weights[other], other: weights[one]})
    for name in _norms(weights):
        for sign, said in ((1.0, "less one"), (-1.0, "plus one")):
            yield _with(head, f"{_plain(name)} {said}", {name: weights[name] - sign})
    yield from _orders(head)
    for by in (-1, 1):
        moved = head.altered()
        moved.target_ids = head.target_ids.roll(by)
        yield Misreading(f"the rows of lm_head moved by {by:+d}", "structure", moved)
    for name, other in _specs(spec, frozenset(layers)):
        yield Misreading(name, "structure", head.altered(other))
    for name in _norms(weights):
        for factor in SCALES:
            scaled = {name: weights[name] * factor}
            yield replace(_with(head, f"{_plain(name)} times {factor}", scaled), kind="scale")


def measure_misreadings(
    head: DraftHead,
    texts: Iterable[Text],
    run: Callable[[Batch], States],
    layers: Sequence[int],
    steps: int,
    target: TargetsOwn | None = None,
) -> list[Gain]:
    """Measure each reading of a head on the first sequences of held-out and sampled text.

    Greedy text says little: a small target's runs in circles, which any reading drafts well.

    Args:
        head: the head as its files say.
        texts: as of `texts.make_texts`.
        run: gives the target's states over a batch.
        layers: the layers whose outputs these states hold, in their order.
        steps: K.
        target: what the target's own config states.

    Returns:
        What the best readings gain, and those by the target's config, the greatest gain first; nothing where there is
        too little text.
    """
    screened = _measure(head, _first(texts, SCREENED), run, layers, steps, lambda: other_readings(head, layers))
    best = [gain.reading for gain in screened[:BEST]] + list(target.readings(head) if target else ())
    return _measure(head, _first(texts, PROBED), run, layers, steps, lambda: iter(best), LEAST)


def _measure(
    head: DraftHead,
    batches: Iterable[Batch],
    run: Callable[[Batch], States],
    layers: Sequence[int],
    steps: int,
    readings: Callable[[], Iterator[Misreading]],
    least: int = 1,
) -> list[Gain]:
    """Return what readings gain, the greatest first; they are made anew for each batch, as all at once are large."""
    found: dict[str, list[Tensor]] = {}
    own: list[Tensor] = []
    tried: dict[str, Misreading] = {}
    for batch in batches:
        states = run(batch)
        own += _sequences(head, batch, states, layers, steps)
        for reading in readings():
            tried[reading.name] = reading
            found.setdefault(reading.name, []).extend(_sequences(reading.head, batch, states, layers, steps))
    if len(own) < least:
        return []
    places = sum(len(row) for row in own)
    before = float(torch.cat(own).sum()) / places
    gains = [_gain(tried[name], own, rows, places, before) for name, rows in found.items()]
    return sorted(gains, key=lambda gain: gain.before - gain.after)


def _gain(reading: Misreading, own: list[Tensor], rows: list[Tensor], places: int, before: float) -> Gain:
    """The error is of the mean of differences over sequences, whose places hang together."""
    differences = [other - one for one, other in zip(own, rows, strict=True)]
    mean = float(torch.cat(differences).sum()) / places
    moved = torch.stack([(row - mean).sum() / places for row in differences])[:, None]
    return Gain(reading, before, before + mean, standard_errors(moved)[0] or 0.0)


def _first(texts: Iterable[Text], count: int) -> Iterator[Batch]:
    for text in texts:
        left = count if text.kind != "greedy" else 0
        for batch in text.batches:
            if left > 0:
                yield replace(batch, tokens=batch.tokens[:left], places=batch.places[:left])
                left -= len(batch.tokens)


@torch.no_grad()
def _sequences(head: DraftHead, batch: Batch, states: States, layers: Sequence[int], steps: int) -> Iterator[Tensor]:
    """Yield the acceptance length at each place of each sequence, fp64."""
    columns = [list(layers).index(layer) for layer in head.spec.captured]
    captured = states.captured.unflatten(-1, (len(layers), -1))[..., columns, :].flatten(-2)
    found = overlap(draft_logits(head, batch.tokens, captured, steps), states.logits, head.target_ids)
    yield from lengths(found).double()[:, batch.prompt_length - 1 :]


def _with(head: DraftHead, name: str, changed: Slots) -> Misreading:
    return Misreading(name, "structure", head.altered(weights=changed))


def _plain(slot: str) -> str:
    return slot.removeprefix("0.")


def _norms(weights: Slots) -> list[str]:
    return [name for name in weights if name.endswith("norm") or ".fc_norm." in name or name == "norm"]


def _hidden_norms(spec: HeadSpec) -> list[str]:
    return ["0.hidden_norm", "0.input_layernorm", "0.post_attention_layernorm", "norm"]


def _structure(head: DraftHead, at: str) -> Iterator[Misreading]:
    """Yield a layer's linears in other orders."""
    weights, attention = head.weights, head.spec.attention
    gate, up = f"{at}gate_proj", f"{at}up_proj"
    yield _with(head, f"{_plain(gate)} and {_plain(up)} swapped", {gate: weights[up], up: weights[gate]})
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


def _latent(head: DraftHead, mla: Mla, at: str) -> Iterator[Misreading]:
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
    """Take rows whose pairs are neighbors, as if they were to be halves: `[..., dims, in]`."""
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


def _orders(head: DraftHead) -> Iterator[Misreading]:
    """Yield the captured states in other orders before fc."""
    count = len(head.spec.captured)
    if count > MOST_STATES:
        return
    blocks = head.weights["fc"].unflatten(1, (count, -1))
    for order in permutations(range(count)):
        if list(order) != sorted(order):
            layers = [head.spec.captured[place] for place in order]
            # Column block i of the fc so read takes what block order[i] took.
            yield _with(head, f"the states before fc in the order {layers}", {"fc": blocks[:, order].flatten(1)})


def _specs(spec: HeadSpec, layers: frozenset[int]) -> Iterator[tuple[str, HeadSpec]]:
    """Yield the configs that the same weights may be read by."""
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
    for theta in THETAS:
        if theta != spec.rope.theta:
            yield f"a RoPE theta of {theta:g}", replace(spec, rope=replace(spec.rope, theta=theta))
    if spec.rope.scaling is not None:
        yield "no RoPE scaling", replace(spec, rope=replace(spec.rope, scaling=None))
