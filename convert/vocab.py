"""A head's draft vocabulary: what it is, what is wrong with it, and how to change it.

Operations keep the layout and the config, except `draft_vocab_size`, and copy every other tensor unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checkpoint.bytes import read_integers
from ..checkpoint.folder import Checkpoint
from ..checkpoint.header import TensorInfo
from ..checkpoint.manifest import Hints
from ..drafters.captured import without_lists
from ..drafters.contract import FLOATS, check_d2t, compare
from ..drafters.eagle3 import refuse_others
from ..drafters.keys import LEAST_POSITIONS
from ..drafters.slots import INTEGER
from ..drafters.spec import HeadSpec, Tokens
from ..drafters.vocab import (
    ABSOLUTE,
    EITHER,
    FULL,
    IDENTITY,
    MISSING,
    NEITHER,
    Coverage,
    Reading,
    keep_most_frequent,
    kind_of,
    mask,
    measure_coverage,
    offsets,
    read_ids,
    target_ids,
)
from ..engines.layout import Layout, stored, unclaimed
from ..errors import ConfigUnsupported, LayoutCannot, Problem, TargetInvalid, TensorMissing, TensorValue
from .computed import Computed, chosen_rows, from_integers, spread_rows
from .config import read_config
from .plan import Change, Plan, Replaced, SourceTensor, plan_in_place
from .read import Head, claim_tensors, read, read_head, read_slot, rows_of, weight_dtype
from .shared import Copies, count_copies, find_displaced

if TYPE_CHECKING:
    from ..drafters.filler import Filler

VOCAB_SLOTS = ("d2t", "t2d", "lm_head")


@dataclass(frozen=True)
class VocabReport:
    """A head's draft vocabulary.

    Attributes:
        kind: what the map holds, e.g. `OFFSETS`.
        order: "ascending" or "unsorted"; empty if there is no map.
        lm_head_rows: rows on disk; None if the head shares the target's lm_head.
        duplicates, outside: of the map's ids, read as in `kind`.
        t2d: "absent", "agrees", or how it disagrees.
        copies: how many rows are the target's; None without a target of the same width.
        kept, lost: names of the special tokens that can and cannot be drafted.
        coverage: None without a text.
        faults: errors with which no engine would serve the head correctly.
        warnings: points that only the user can decide.
    """

    kind: str
    order: str
    vocab: int
    draft_vocab: int
    lm_head_rows: int | None
    duplicates: int
    outside: int
    t2d: str
    copies: Copies | None
    kept: tuple[str, ...]
    lost: tuple[str, ...]
    coverage: Coverage | None
    faults: tuple[Problem, ...]
    warnings: tuple[str, ...]


AS_TRAINED = "Export the head again with the d2t that it was trained with."


def stored_name(layout: Layout, slot: str) -> str:
    """Return a layout's name for a slot outside the layers."""
    return next(row.name for row in layout.rows if row.slots == (slot,))


def usable_mask(info: TensorInfo | None, vocab: int) -> np.ndarray | None:
    """Read `t2d`; None if there is none with the right dtype and shape."""
    usable = info is not None and (info.dtype, info.shape) == ("BOOL", (vocab,))
    return read_integers(info) if info is not None and usable else None


def examine(
    checkpoint: Checkpoint,
    *,
    layout: Layout | None = None,
    reference: TensorInfo | None = None,
    specials: Mapping[int, str] | None = None,
    counts: np.ndarray | None = None,
) -> VocabReport:
    """Examine a head's draft vocabulary; this also works on a head that `read_head` refuses for its map.

    Args:
        reference: the target's lm_head.
        specials: names of the target's special tokens, by id; the config's own are added.
        counts: [vocab] int64, how often each token occurs in a text.

    Raises:
        UnknownLayout, ConfigInvalid, ConfigUnsupported: the config cannot be read.
        TargetInvalid: the target's vocabulary differs from the head's.
    """
    layout = _layout_of(checkpoint, layout)
    spec = _read_spec(checkpoint, layout)
    if reference is not None and reference.shape[0] != spec.vocab:
        raise TargetInvalid(
            f"the target has {reference.shape[0]} tokens, but the head needs {spec.vocab}",
            where=reference.file,
            fix="Pass the target that the head was trained on.",
        )
    held = {slot: checkpoint.tensors.get(stored_name(layout, slot)) for slot in VOCAB_SLOTS}
    faults = _compare(checkpoint, layout, spec)
    map_info, lm_head = held["d2t"], held["lm_head"]
    usable = map_info is not None and map_info.dtype in INTEGER and len(map_info.shape) == 1
    d2t = read_integers(map_info) if map_info is not None and usable else None
    copies = None
    if lm_head is not None and reference is not None and (map_info is None or d2t is not None):
        copies = count_copies(lm_head, reference, d2t)
    t2d = usable_mask(held["t2d"], spec.vocab)
    if d2t is None:
        kind = NEITHER if map_info is not None else FULL if spec.draft_vocab == spec.vocab else MISSING
        reading = read_ids(np.arange(spec.draft_vocab), spec.vocab, t2d)
    else:
        as_offsets, as_absolute = read_ids(target_ids(d2t), spec.vocab, t2d), read_ids(d2t, spec.vocab, t2d)
        rows = (copies.by_offset, copies.by_id) if copies else None
        kind = kind_of(as_offsets, as_absolute, rows)
        reading = as_absolute if kind == ABSOLUTE else as_offsets
        faults += check_d2t(spec, d2t, stored_name(layout, "d2t"), t2d, rows)
        if copies is not None and lm_head is not None and reference is not None:
            marks = t2d if reading.marked_otherwise or kind == NEITHER else None
            found = _judge_marks(copies, lm_head, reference, marks, stored_name(layout, "d2t"))
            faults = _decide(faults, copies, found)
            faults += found or ([] if kind == ABSOLUTE else _judge_rows(copies, lm_head, reference, reading))
    ids = np.unique(reading.ids[(reading.ids >= 0) & (reading.ids < spec.vocab)])
    names = name_specials(spec, specials or {})
    kept = names.keys() & set(ids.tolist())
    return VocabReport(
        kind=kind,
        order=reading.order if d2t is not None else "",
        vocab=spec.vocab,
        draft_vocab=spec.draft_vocab,
        lm_head_rows=lm_head.shape[0] if lm_head is not None else None,
        duplicates=reading.duplicates,
        outside=reading.outside,
        t2d=_say_t2d(held["t2d"], t2d, reading),
        copies=copies,
        kept=tuple(names[i] for i in names if i in kept),
        lost=tuple(names[i] for i in names if i not in kept),
        coverage=measure_coverage(counts, ids) if counts is not None else None,
        faults=tuple(faults),
        warnings=_warn(kind, [names[i] for i in names if i not in kept]),
    )


def _layout_of(checkpoint: Checkpoint, layout: Layout | None) -> Layout:
    reading = read(checkpoint, layout=layout, values=False)
    # What is no head is named as everywhere; another error may not concern the vocabulary.
    found = reading.layout or reading.sound_head().layout
    refuse_others(found.drafter, "edits the vocabulary of")
    return found


def _read_spec(checkpoint: Checkpoint, layout: Layout) -> HeadSpec:
    """Read a config, tolerating undecided facts that do not concern the vocabulary."""
    count = checkpoint.config.get("num_aux_hidden_states")
    captured = tuple(range(count if isinstance(count, int) and 0 < count < 100 else 3))
    before = checkpoint.config.get("norm_before_residual")
    undecided = {} if before is not None else {"norm_before_residual": False}
    hints = Hints.model_validate({"captured": captured, "max_positions": LEAST_POSITIONS, **undecided})
    return read_config(
        without_lists(checkpoint.config),
        checkpoint.tensors,
        drafter=layout.drafter,
        dtype=weight_dtype(checkpoint),
        hints=hints,
        table=layout.config,
    ).spec


def _compare(checkpoint: Checkpoint, layout: Layout, spec: HeadSpec) -> list[Problem]:
    """Check only the vocabulary's tensors against the contract."""
    names = {stored_name(layout, slot) for slot in VOCAB_SLOTS}
    return compare(
        {name: row.expected for name, row in rows_of(layout, spec, checkpoint.tensors).items() if name in names},
        {name: info for name, info in checkpoint.tensors.items() if name in names},
        ignored={},
        unclaimed=unclaimed(layout, spec),
    )


def _judge_rows(copies: Copies, lm_head: TensorInfo, reference: TensorInfo, reading: Reading) -> list[Problem]:
    """Find an lm_head whose rows are other tokens' than the map says."""
    # Of trained rows one may equal another token's by chance.
    if copies.by_id > copies.by_offset + copies.rows / 10:
        return [_wrong_rows(copies, lm_head.name)]
    displaced = find_displaced(lm_head, reference, reading.ids)
    return [Problem("K217", "error", lm_head.name, displaced.words, AS_TRAINED, TensorValue)] if displaced else []


def _judge_marks(
    copies: Copies, lm_head: TensorInfo, reference: TensorInfo, t2d: np.ndarray | None, name: str
) -> list[Problem]:
    """Find a d2t that names fewer of the rows that lm_head has of the target than t2d marks, in ascending order."""
    marked = np.flatnonzero(t2d) if t2d is not None else np.arange(0)
    found = count_copies(lm_head, reference, marked - np.arange(len(marked)))
    if found is None or found.by_offset <= copies.by_offset:
        return []
    what = f"{found.by_offset} of {copies.rows} rows of lm_head equal the target's rows that t2d marks, but only "
    what += f"{copies.by_offset} those that d2t names: d2t is wrong"
    return [Problem("K217", "error", name, what, f"Keep t2d; do not rebuild it. {AS_TRAINED}", TensorValue)]


def _decide(faults: list[Problem], copies: Copies, wrong: list[Problem]) -> list[Problem]:
    """Return faults, of two maps that contradict each other only the one that the target's rows show to be wrong."""
    if wrong:
        return [fault for fault in faults if fault.code != "K178"]
    if copies.by_offset < copies.rows:
        return faults
    fix = "Rebuild t2d, as lm_head has the target's rows that d2t names: kconv vocab HEAD OUT --rebuild-t2d"
    return [replace(f, fix=f"{fix} --target TARGET.") if f.code == "K178" else f for f in faults]


def _wrong_rows(copies: Copies, name: str) -> Problem:
    return Problem(
        "K175",
        "error",
        name,
        f"{copies.by_id} of {copies.rows} rows of lm_head equal the target's rows d2t[i], but only {copies.by_offset} "
        "equal its rows i + d2t[i]: the rows were chosen by offset instead of by token id",
        "Prune the full head again, by token id: kconv vocab FULL --prune N --text FILE --target TARGET OUT.",
        TensorValue,
    )


def name_specials(spec: HeadSpec, specials: Mapping[int, str]) -> dict[int, str]:
    """Return the special tokens' names by id: from the tokenizer if there is one, else the key of the head's config."""
    eos = spec.tokens.eos if isinstance(spec.tokens.eos, tuple) else (spec.tokens.eos,)
    stated = [("bos", spec.tokens.bos), *(("eos", i) for i in eos), ("pad", spec.tokens.pad)]
    names = {i: f"{name} ({i})" for name, i in reversed(stated) if i is not None}
    return dict(sorted((names | {i: f"{name} ({i})" for i, name in specials.items()}).items()))


def _say_t2d(info: TensorInfo | None, t2d: np.ndarray | None, reading: Reading) -> str:
    if info is None:
        return "absent"
    if t2d is None:
        return f"unusable: {info.dtype} {list(info.shape)}"
    if reading.marked_otherwise is None:
        return "not comparable, because d2t points outside the vocabulary"
    return "agrees" if reading.marked_otherwise == 0 else f"disagrees on {reading.marked_otherwise} tokens"


def _warn(kind: str, lost: list[str]) -> tuple[str, ...]:
    warnings: list[str] = []
    if kind == IDENTITY:
        warnings.append("each row stands for the token of its own number: such a map was usually never filled")
    if kind == EITHER:
        warnings.append("d2t could hold offsets or absolute ids; engines read offsets. --target compares the rows")
    if lost:
        warnings.append(f"{len(lost)} special token(s) can never be drafted: {', '.join(lost)}")
    return tuple(warnings)


def rebuild_t2d(
    checkpoint: Checkpoint, layout: Layout | None, hints: Hints, reference: TensorInfo | None = None
) -> Plan:
    """Plan a head with a `t2d` rebuilt from its `d2t`, replacing any `t2d` that it has.

    `reference` is the target's lm_head, whose rows the head may have copied.

    Raises:
        LayoutCannot: the head has no map.
        TensorValue: its d2t is not a valid map, or the rows show that t2d is right instead. Also see `read_head`.
    """
    layout = _layout_of(checkpoint, layout)
    head = read_head(_without_t2d(checkpoint, layout), layout=layout, hints=hints)
    _need_map(head)
    d2t, lm_head = read_integers(head.places["d2t"][1]), head.places["lm_head"][1]
    ids = target_ids(d2t)
    if reference is not None and (copies := count_copies(lm_head, reference, d2t)) is not None:
        t2d = usable_mask(checkpoint.tensors.get(stored_name(layout, "t2d")), head.spec.vocab)
        for problem in _judge_marks(copies, lm_head, reference, t2d, stored_name(layout, "d2t")):
            raise problem.error()
    marks = from_integers(mask(ids, head.spec.vocab), f"marks the {len(ids)} tokens that d2t maps to")
    return plan_in_place(head, Change(head.spec, {"t2d": _rebuilt(head, checkpoint, "t2d", marks)}))


def write_offsets(
    checkpoint: Checkpoint, layout: Layout | None, hints: Hints, reference: TensorInfo | None = None
) -> Plan:
    """Plan a head whose `d2t` holds offsets, from one whose `d2t` holds absolute ids.

    `reference` is the target's lm_head, whose rows the head may have copied.

    Raises:
        LayoutCannot: the head has no map.
        TensorValue: d2t cannot hold absolute ids, or t2d or the rows show that it does not. Also see `read_head`.
    """
    layout = _layout_of(checkpoint, layout)
    head = claim_tensors(_without_t2d(checkpoint, layout), layout=layout, hints=hints)
    _need_map(head)
    d2t, vocab = read_integers(head.places["d2t"][1]), head.spec.vocab
    t2d = usable_mask(checkpoint.tensors.get(stored_name(head.layout, "t2d")), vocab)
    absolute = read_ids(d2t, vocab, t2d)
    copies = count_copies(head.places["lm_head"][1], reference, d2t) if reference else None
    rows = (copies.by_offset, copies.by_id) if copies else None
    if kind_of(read_ids(target_ids(d2t), vocab, t2d), absolute, rows) not in (ABSOLUTE, EITHER):
        raise TensorValue(
            f"d2t cannot hold absolute ids: {_why_not_absolute(absolute)}",
            where=head.places["d2t"][0].name,
            fix="Leave it unchanged if kconv vocab finds no error. If t2d is wrong, pass --target: copied rows then "
            "decide it. Otherwise rebuild d2t from the kept tokens.",
        )
    why = "held absolute ids; rewritten as offsets, target id minus draft id"
    replaced = {"d2t": _rebuilt(head, checkpoint, "d2t", from_integers(offsets(absolute.ids), why))}
    if stored_name(head.layout, "t2d") in checkpoint.tensors:
        marks = from_integers(mask(absolute.ids, vocab), f"marks the {len(d2t)} tokens that d2t maps to")
        replaced["t2d"] = _rebuilt(head, checkpoint, "t2d", marks)
    return plan_in_place(head, Change(head.spec, replaced))


@dataclass(frozen=True)
class CountedText:
    """How often each token occurs in a text, [vocab] int64, and the text's name and digest, for the manifest."""

    counts: np.ndarray
    source: str


def prune(
    checkpoint: Checkpoint,
    layout: Layout | None,
    hints: Hints,
    size: int,
    text: CountedText,
    specials: Mapping[int, str],
) -> Plan:
    """Plan a head with the rows of only `size` tokens, from one with a full vocabulary.

    It keeps the special tokens and the most frequent tokens of a text, which should resemble what the target will be
    asked to write. `specials` has the names of the target's special tokens, by id; the config's own are added.

    Raises:
        LayoutCannot: the head already has a reduced vocabulary.
        TensorMissing: the head has no lm_head of its own. Also see `read_head`.
        TargetInvalid: the text's tokens come from another vocabulary than the head's.
        ConfigInvalid: `size` is too small for the special tokens, or not below the vocabulary size.
        ConfigUnsupported: lm_head is quantized.
    """
    head = read_head(checkpoint, layout=_layout_of(checkpoint, layout), hints=hints)
    _refuse_unprunable(head, text.counts)
    always = [i for i in name_specials(head.spec, specials) if i < head.spec.vocab]
    ids = keep_most_frequent(text.counts, size, always)
    spec, coverage = replace(head.spec, draft_vocab=size), measure_coverage(text.counts, ids)
    row, lm_head = head.places["lm_head"]
    why = (
        f"the rows of {size} target ids, ascending: {len(always)} special tokens, then the most frequent of "
        f"{text.source}; they are {coverage.share:.2%} of its {coverage.tokens} tokens, and "
        f"{size - coverage.distinct_covered} of them are not in it"
    )
    leads = from_integers(offsets(ids), "maps to the kept tokens, as offsets: target id minus draft id")
    replaced = {
        "lm_head": Replaced(chosen_rows(lm_head, ids, why), "pruned", (SourceTensor(row, lm_head),)),
        "d2t": Replaced(leads, "added"),
        "t2d": Replaced(from_integers(mask(ids, spec.vocab), "marks the kept tokens"), "added"),
    }
    return plan_in_place(head, Change(spec, replaced, _state_size(head, size)))


def _refuse_unprunable(head: Head, counts: np.ndarray) -> None:
    if head.spec.draft_vocab != head.spec.vocab:
        raise LayoutCannot(
            f"the head is already reduced to {head.spec.draft_vocab} tokens",
            where=head.checkpoint.folder,
            fix="Prune the head that it was reduced from.",
        )
    if "lm_head" not in head.places:
        raise TensorMissing(
            "the head has no lm_head to prune; it shares the target's",
            where=head.checkpoint.folder,
            fix="Export the head again with its lm_head.",
        )
    refuse_quantized(head)
    if len(counts) != head.spec.vocab:
        raise TargetInvalid(
            f"the target has {len(counts)} tokens, but the head needs {head.spec.vocab}",
            where="--target",
            fix="Pass the target that the head was trained on.",
        )


def _why_not_absolute(reading: Reading) -> str:
    if not reading.possible:
        return f"{reading.duplicates} of them repeat an earlier one, and {reading.outside} are out of range"
    if reading.marked_otherwise:
        return f"t2d would be wrong about {reading.marked_otherwise} tokens"
    return "the rows of lm_head are the target's at i + d2t[i]"


def refuse_quantized(head: Head) -> None:
    """Raise ConfigUnsupported if lm_head has scales, which belong to exactly its rows."""
    info = head.places["lm_head"][1]
    if info.dtype not in FLOATS:
        raise ConfigUnsupported(
            f"{info.name} is quantized to {info.dtype}, so rows cannot be removed or added",
            where=head.checkpoint.folder,
            fix="Pass the head that it was quantized from.",
        )


def _without_t2d(checkpoint: Checkpoint, layout: Layout) -> Checkpoint:
    """Return a checkpoint without its t2d, so that a wrong one does not prevent reading it."""
    t2d = stored_name(layout, "t2d")
    return replace(checkpoint, tensors={name: i for name, i in checkpoint.tensors.items() if name != t2d})


def _need_map(head: Head) -> None:
    if "d2t" not in head.places:
        raise LayoutCannot(
            "the head has a full vocabulary, so it has no map",
            where=head.checkpoint.folder,
            fix="There is nothing to rebuild; convert the head directly.",
        )


def _rebuilt(head: Head, checkpoint: Checkpoint, slot: str, computed: Computed) -> Replaced:
    """Return the replacement of a slot's tensor, which `checkpoint` may hold though `head` was read without it."""
    rows = stored(head.layout, head.spec)
    names = dict.fromkeys(stored_name(head.layout, one) for one in ("d2t", slot))
    sources = tuple(SourceTensor(rows[n], checkpoint.tensors[n]) for n in names if n in checkpoint.tensors)
    return Replaced(computed, "rebuilt", sources)


def _state_size(head: Head, size: int) -> dict[str, Any]:
    """Return the source's config with another draft_vocab_size, in each place that states it."""
    config, key, nested = dict(head.checkpoint.config), "draft_vocab_size", head.layout.config.nested
    if nested and key in config[nested]:
        config[nested] = config[nested] | {key: size}
        if key not in config:
            return config
    return config | {key: size}


STATES = 256  # random states for measuring the margin
ROUNDING = 1e-9  # in logits; fp64's rounding of a zero distance to the hull


def expand(checkpoint: Checkpoint, layout: Layout | None, hints: Hints) -> Plan:
    """Plan a head with a row for each token of the target, from one with a reduced vocabulary.

    Tokens that the head could not draft get a row that is never the only argmax.

    Raises:
        LayoutCannot: the head has a full vocabulary.
        ConfigUnsupported: lm_head is quantized.
        KconvError: it cannot be read; see `read_head`.
    """
    head = read_head(checkpoint, layout=_layout_of(checkpoint, layout), hints=hints)
    if head.spec.draft_vocab == head.spec.vocab:
        raise LayoutCannot(
            "the head already has a row for each token of the target",
            where=checkpoint.folder,
            fix="There is nothing to expand; convert the head directly.",
        )
    refuse_quantized(head)
    spec = replace(head.spec, draft_vocab=head.spec.vocab)
    lm_head, d2t = (head.places[slot][1] for slot in ("lm_head", "d2t"))
    ids = target_ids(read_integers(head.places["d2t"][1]))
    filler, how = _choose_filler(head, lm_head, ids)
    rows = spread_rows(lm_head, ids, spec.vocab, filler.row, _say_filler(head, lm_head, filler, how))
    sources = tuple(SourceTensor(head.places[slot][0], info) for slot, info in (("lm_head", lm_head), ("d2t", d2t)))
    replaced = {"lm_head": Replaced(rows, "expanded", sources)}
    dropped = {stored_name(head.layout, "t2d"): "a full vocabulary needs no map"}
    return plan_in_place(head, Change(spec, replaced, _state_size(head, spec.draft_vocab), dropped))


def _choose_filler(head: Head, lm_head: TensorInfo, ids: np.ndarray) -> tuple[Filler, str]:
    """Return the filler and a description: a leaning one, unless only the mean is proven to lie in the hull."""

    from ..checkpoint.tensors import row_blocks
    from ..drafters.filler import LEAN, make_filler

    def make(unlikely: int | None) -> Filler:
        return make_filler(lambda: row_blocks(lm_head), unlikely)

    unlikely, mean = _find_unlikely(head, ids), "the mean of these rows"
    if unlikely is None:
        return make(None), mean
    leaning = make(unlikely)
    if leaning.bound(read_slot(head, "norm")) >= ROUNDING:
        plain = make(None)
        if plain.excess < leaning.excess:
            return plain, mean
    return leaning, f"{mean}, leaning by {LEAN:.0%} towards that of token {int(ids[unlikely])}"


def _find_unlikely(head: Head, ids: np.ndarray) -> int | None:
    """Return the row of the padding or of the start-of-text token, which never continue a text; None without one."""
    tokens: Tokens = head.spec.tokens
    ends = tokens.eos if isinstance(tokens.eos, tuple) else (tokens.eos,)
    unlikely = [token for token in (tokens.pad, tokens.bos) if token not in (None, *ends)]
    rows = [row for token in unlikely for row in np.flatnonzero(ids == token)]
    return int(rows[0]) if rows else None


def _say_filler(head: Head, lm_head: TensorInfo, filler: Filler, how: str) -> str:
    from ..checkpoint.tensors import row_blocks
    from ..drafters.filler import measure_margin, random_states

    gain = read_slot(head, "norm")
    missing = head.spec.vocab - head.spec.draft_vocab
    margin = measure_margin(lambda: row_blocks(lm_head), filler.row, missing, random_states(gain, STATES))
    bound = filler.bound(gain)
    proof = f"for any state its logit exceeds the greatest of theirs by at most {bound:.1e}"
    if bound < ROUNDING:
        proof = "a convex combination of them even after rounding, so it is never the only argmax"
    return (
        f"{head.spec.draft_vocab} rows at their target ids; each of the {missing} others is {how}, "
        f"rounded to {lm_head.dtype}: {proof}. On {margin.states} random states its logit is "
        f"below the greatest by at least {margin.worst:.3g} and by {margin.median:.3g} in the median, and sampling at "
        f"temperature 1 would give the {missing} tokens {margin.leak:.2g} of the probability."
    )
