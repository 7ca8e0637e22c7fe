"""Operations on a head's draft vocabulary.

Each keeps the layout and the config, but for `draft_vocab_size`, and carries every other tensor as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..checkpoint.folder import Checkpoint
from ..checkpoint.header import TensorInfo
from ..engines import detect
from ..engines.layout import Layout, stored
from ..errors import ConfigUnsupported, LayoutCannot, TargetInvalid, TensorMissing, TensorValue
from ..head.contract import FLOATS
from ..head.spec import HeadSpec
from ..head.vocab import (
    ABSOLUTE,
    EITHER,
    Reading,
    keep_most_frequent,
    kind_of,
    mask,
    measure_coverage,
    offsets,
    read_ids,
    target_ids,
)
from .captured import Hints
from .copies import count_copies
from .made import Pruned, Values
from .plan import Plan, Source, Step
from .read import Head, claim_tensors, read_head, read_slot, rows_of
from .vocab_report import name_specials, stored_name, usable_mask


def rebuild_t2d(checkpoint: Checkpoint, layout: Layout | None, hints: Hints) -> Plan:
    """Plan a head with a `t2d` that follows from its `d2t`, whatever `t2d` it has.

    Raises:
        LayoutCannot: the head has no map.
        TensorValue: its d2t is no map; and as `read_head`.
    """
    layout = layout or detect(checkpoint.config, checkpoint.tensors)
    head = read_head(_without_t2d(checkpoint, layout), layout=layout, hints=hints)
    _need_map(head)
    ids = target_ids(read_slot(head, "d2t"))
    marks = Values(mask(ids, head.spec.vocab), f"marks the {len(ids)} tokens that d2t leads to")
    return edit(head, head.spec, [_rebuilt(head, checkpoint, "t2d", marks)])


def write_offsets(
    checkpoint: Checkpoint, layout: Layout | None, hints: Hints, reference: TensorInfo | None = None
) -> Plan:
    """Plan a head whose `d2t` holds offsets, from one whose `d2t` holds absolute ids.

    Args:
        checkpoint, layout, hints: as for `read_head`.
        reference: the target's lm_head, of which the head's rows may be copies.

    Raises:
        LayoutCannot: the head has no map.
        TensorValue: d2t cannot hold absolute ids, or t2d or the rows show that it does not; and as `read_head`.
    """
    layout = layout or detect(checkpoint.config, checkpoint.tensors)
    head = claim_tensors(_without_t2d(checkpoint, layout), layout=layout, hints=hints)
    _need_map(head)
    d2t, vocab = read_slot(head, "d2t"), head.spec.vocab
    t2d = usable_mask(checkpoint.tensors.get(stored_name(head.layout, "t2d")), vocab)
    absolute = read_ids(d2t, vocab, t2d)
    copies = count_copies(head.places["lm_head"][1], reference, d2t) if reference else None
    rows = (copies.by_offset, copies.by_id) if copies else None
    if kind_of(read_ids(target_ids(d2t), vocab, t2d), absolute, rows) not in (ABSOLUTE, EITHER):
        raise TensorValue(
            f"d2t cannot be taken for absolute ids: {_why_not_absolute(absolute)}",
            where=head.places["d2t"][0].name,
            fix="Leave it as it is if kconv vocab finds nothing wrong with it; give --target if t2d is what is wrong, "
            "as copied rows decide; else rebuild it from the kept tokens.",
        )
    why = "held absolute ids; rewritten as offsets, target id minus draft id"
    steps = [_rebuilt(head, checkpoint, "d2t", Values(offsets(absolute.ids), why))]
    if stored_name(head.layout, "t2d") in checkpoint.tensors:
        marks = Values(mask(absolute.ids, vocab), f"marks the {len(d2t)} tokens that d2t leads to")
        steps.append(_rebuilt(head, checkpoint, "t2d", marks))
    return edit(head, head.spec, steps)


@dataclass(frozen=True)
class Text:
    """A text that a draft vocabulary is chosen by.

    Attributes:
        counts: [vocab] int64, how often each token stands in it.
        source: its name and digest, for the manifest.
    """

    counts: Tensor
    source: str


def prune(
    checkpoint: Checkpoint, layout: Layout | None, hints: Hints, size: int, text: Text, specials: Mapping[int, str]
) -> Plan:
    """Plan a head with the rows of `size` tokens alone, from one with a full vocabulary.

    The special tokens are kept, and the most frequent ones of a text.

    Args:
        checkpoint, layout, hints: as for `read_head`.
        size: rows of the new lm_head.
        text: what the target will be asked to write, or close to it.
        specials: names of the target's special tokens, by id; the config's own are added.

    Raises:
        LayoutCannot: the head has a reduced vocabulary already.
        TensorMissing: the head has no lm_head of its own; and as `read_head`.
        TargetInvalid: the text's tokens are of another vocabulary than the head's.
        ConfigInvalid: see `head.vocab.keep_most_frequent`.
        ConfigUnsupported: lm_head is quantized.
    """
    head = read_head(checkpoint, layout=layout, hints=hints)
    _refuse_unprunable(head, text.counts)
    always = [i for i in name_specials(head.spec, specials) if i < head.spec.vocab]
    ids = keep_most_frequent(text.counts, size, always)
    spec, coverage = replace(head.spec, draft_vocab=size), measure_coverage(text.counts, ids)
    row, lm_head = head.places["lm_head"]
    rows = stored(head.layout, spec)
    why = (
        f"the rows of {size} target ids, ascending: {len(always)} special tokens, then the most frequent of "
        f"{text.source}; they are {coverage.share:.2%} of its {coverage.tokens} tokens, and "
        f"{size - coverage.distinct_covered} of them are not in it"
    )
    steps = [Step(lm_head.name, (Source(row, lm_head),), rows[lm_head.name], "pruned", Pruned(lm_head, ids, why))]
    for slot, values, what in (
        ("d2t", offsets(ids), "leads to the kept tokens, as offsets: target id minus draft id"),
        ("t2d", mask(ids, spec.vocab), "marks the kept tokens"),
    ):
        name = stored_name(head.layout, slot)
        steps.append(Step(name, (), rows[name], "added", Values(values, what)))
    return edit(head, spec, steps)


def _refuse_unprunable(head: Head, counts: Tensor) -> None:
    if head.spec.draft_vocab != head.spec.vocab:
        raise LayoutCannot(
            f"the head is reduced to {head.spec.draft_vocab} tokens already",
            where=head.checkpoint.folder,
            fix="Prune the head that it was reduced from.",
        )
    if "lm_head" not in head.places:
        raise TensorMissing(
            "the head has no lm_head of its own to prune; it shares the target's",
            where=head.checkpoint.folder,
            fix="Export the head again with its lm_head.",
        )
    refuse_quantized(head)
    if len(counts) != head.spec.vocab:
        raise TargetInvalid(
            f"the target has {len(counts)} tokens, and the head was made for one of {head.spec.vocab}",
            fix="Give the target that the head was trained on.",
        )


def _why_not_absolute(reading: Reading) -> str:
    if not reading.possible:
        return f"{reading.duplicates} of them repeat an earlier one, and {reading.outside} are out of range"
    if reading.marked_otherwise:
        return f"t2d would be wrong about {reading.marked_otherwise} tokens"
    return "the rows of lm_head are the target's at i + d2t[i]"


def refuse_quantized(head: Head) -> None:
    """Raise ConfigUnsupported if lm_head is stored with scales, which belong to its rows as they are."""
    info = head.places["lm_head"][1]
    if info.dtype not in FLOATS:
        raise ConfigUnsupported(
            f"{info.name} is quantized to {info.dtype}; its rows cannot be chosen or added to",
            where=head.checkpoint.folder,
            fix="Give the head that it was quantized from.",
        )


def _without_t2d(checkpoint: Checkpoint, layout: Layout) -> Checkpoint:
    """Return a checkpoint as if it had no t2d, so that a wrong one does not stand in the way of reading it."""
    t2d = stored_name(layout, "t2d")
    return replace(checkpoint, tensors={name: i for name, i in checkpoint.tensors.items() if name != t2d})


def _need_map(head: Head) -> None:
    if "d2t" not in head.places:
        raise LayoutCannot(
            "the head has a full vocabulary and no map",
            where=head.checkpoint.folder,
            fix="There is nothing to rebuild; convert it as it is.",
        )


def _rebuilt(head: Head, checkpoint: Checkpoint, slot: str, made: Values) -> Step:
    """Return the step of a computed tensor that takes the place of the one that `checkpoint` may hold."""
    name, rows = stored_name(head.layout, slot), stored(head.layout, head.spec)
    names = dict.fromkeys((stored_name(head.layout, "d2t"), name))
    sources = tuple(Source(rows[n], checkpoint.tensors[n]) for n in names if n in checkpoint.tensors)
    return Step(name, sources, rows[name], "rebuilt", made)


def edit(head: Head, spec: HeadSpec, changed: Sequence[Step], dropped: Mapping[str, str] | None = None) -> Plan:
    """Return the plan that makes the tensors of `changed` and carries each other one that the output has.

    Args:
        head: the source.
        spec: what the output is; its layout is the source's.
        changed: how its vocabulary's tensors come to be.
        dropped: tensors that it has no place for, with the reason.
    """
    tensors, made = head.checkpoint.tensors, {step.name for step in changed}
    reasons = {**head.ignored, **(dropped or {})}
    before, after = rows_of(head.layout, head.spec, tensors), rows_of(head.layout, spec, tensors)
    carried = [
        Step(name, (Source(before[name], info),), after[name], "carried")
        for name, info in tensors.items()
        if name in after and name not in made
    ]
    gone = {name: why for name, why in reasons.items() if name in tensors}
    source = replace(head, read=replace(head.read, dropped=()))  # the config is carried whole
    return Plan(source, head.layout, spec, _state_size(head, spec.draft_vocab), (*carried, *changed), gone)


def _state_size(head: Head, size: int) -> dict[str, Any]:
    """Return the source's config with another draft_vocab_size, in each place where it is stated."""
    config, key, nested = dict(head.checkpoint.config), "draft_vocab_size", head.layout.config.nested
    if nested and key in config[nested]:
        config[nested] = config[nested] | {key: size}
        if key not in config:
            return config
    return config | {key: size}
