"""What a head's draft vocabulary is, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoint.folder import Checkpoint
from ..checkpoint.header import TensorInfo
from ..checkpoint.tensors import read_tensor
from ..engines import detect
from ..engines.layout import Layout, unclaimed
from ..errors import Problem, TargetInvalid, TensorValue
from ..head.contract import check_d2t, compare
from ..head.slots import INTEGER
from ..head.spec import HeadSpec
from ..head.vocab import (
    ABSOLUTE,
    EITHER,
    FULL,
    IDENTITY,
    MISSING,
    NEITHER,
    Coverage,
    Reading,
    kind_of,
    measure_coverage,
    read_ids,
    target_ids,
)
from .captured import Hints, without_lists
from .config import read_config
from .copies import Copies, count_copies
from .read import rows_of, weight_dtype

SLOTS = ("d2t", "t2d", "lm_head")


@dataclass(frozen=True)
class VocabReport:
    """A head's draft vocabulary.

    Attributes:
        kind: one of the constants of `head.vocab`.
        order: "ascending" or "unsorted"; empty where there is no map.
        vocab, draft_vocab: what the config says.
        lm_head_rows: rows on disk; None where the head shares the target's lm_head.
        duplicates, outside: of the map's ids, as `kind` reads them.
        t2d: "absent", "agrees", or how it does not.
        copies: how many rows are the target's; None without a target of the same width.
        kept, lost: names of the special tokens that can and cannot be drafted.
        coverage: of a text; None where none was given.
        faults: what no engine would serve rightly.
        warnings: what only the user can decide.
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


def stored_name(layout: Layout, slot: str) -> str:
    """Return the name under which a layout stores a slot that stands outside the layers."""
    return next(row.name for row in layout.rows if row.slots == (slot,))


def usable_mask(info: TensorInfo | None, vocab: int) -> Tensor | None:
    """Read `t2d`; None where there is none, or none of the right dtype and shape."""
    usable = info is not None and (info.dtype, info.shape) == ("BOOL", (vocab,))
    return read_tensor(info) if info is not None and usable else None


def examine(
    checkpoint: Checkpoint,
    *,
    layout: Layout | None = None,
    reference: TensorInfo | None = None,
    specials: Mapping[int, str] | None = None,
    counts: Tensor | None = None,
) -> VocabReport:
    """Examine a head's draft vocabulary; a head that `read_head` refuses for its map is described all the same.

    Args:
        checkpoint: the head.
        layout: the layout it is in; found by its marks if None.
        reference: the target's lm_head.
        specials: names of the target's special tokens, by id; the config's own are added.
        counts: [vocab] int64, how often each token stands in a text.

    Raises:
        UnknownLayout, ConfigInvalid, ConfigUnsupported: the config cannot be read.
        TargetInvalid: the target has another vocabulary than the head was made for.
    """
    layout = layout or detect(checkpoint.config, checkpoint.tensors)
    spec = _read_spec(checkpoint, layout)
    if reference is not None and reference.shape[0] != spec.vocab:
        raise TargetInvalid(
            f"the target has {reference.shape[0]} tokens, and the head was made for one of {spec.vocab}",
            where=reference.file,
            fix="Give the target that the head was trained on.",
        )
    held = {slot: checkpoint.tensors.get(stored_name(layout, slot)) for slot in SLOTS}
    faults = _compare(checkpoint, layout, spec)
    map_info, lm_head = held["d2t"], held["lm_head"]
    usable = map_info is not None and map_info.dtype in INTEGER and len(map_info.shape) == 1
    d2t = read_tensor(map_info) if map_info is not None and usable else None
    copies = None
    if lm_head is not None and reference is not None and (map_info is None or d2t is not None):
        copies = count_copies(lm_head, reference, d2t)
    t2d = usable_mask(held["t2d"], spec.vocab)
    if d2t is None:
        kind = NEITHER if map_info is not None else FULL if spec.draft_vocab == spec.vocab else MISSING
        reading = read_ids(torch.arange(spec.draft_vocab), spec.vocab, t2d)
    else:
        as_offsets, as_absolute = read_ids(target_ids(d2t), spec.vocab, t2d), read_ids(d2t, spec.vocab, t2d)
        kind = kind_of(as_offsets, as_absolute, (copies.by_offset, copies.by_id) if copies else None)
        reading = as_absolute if kind == ABSOLUTE else as_offsets
        faults += _judge_map(spec, d2t, kind, reading, stored_name(layout, "d2t"))
    if copies is not None and kind != ABSOLUTE and copies.by_id > copies.by_offset:
        faults.append(_wrong_rows(copies, stored_name(layout, "lm_head")))
    ids = reading.ids[(reading.ids >= 0) & (reading.ids < spec.vocab)].unique()
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


def _read_spec(checkpoint: Checkpoint, layout: Layout) -> HeadSpec:
    """Read a config in which what says nothing of the vocabulary may be undecided."""
    count = checkpoint.config.get("num_aux_hidden_states")
    captured = tuple(range(count if isinstance(count, int) and 0 < count < 100 else 3))
    before = checkpoint.config.get("norm_before_residual")
    hints = Hints(captured=captured, max_positions=1, norm_before_residual=None if before is not None else False)
    dtype = weight_dtype(checkpoint)
    config = without_lists(checkpoint.config)
    return read_config(config, checkpoint.tensors, dtype=dtype, hints=hints, table=layout.config).spec


def _compare(checkpoint: Checkpoint, layout: Layout, spec: HeadSpec) -> list[Problem]:
    """Hold the vocabulary's tensors, and no others, against the contract."""
    names = {stored_name(layout, slot) for slot in SLOTS}
    return compare(
        {name: row.expected for name, row in rows_of(layout, spec, checkpoint.tensors).items() if name in names},
        {name: info for name, info in checkpoint.tensors.items() if name in names},
        ignored={},
        unclaimed=unclaimed(layout, spec),
    )


def _judge_map(spec: HeadSpec, d2t: Tensor, kind: str, reading: Reading, name: str) -> list[Problem]:
    if kind == ABSOLUTE:
        return [
            Problem(
                "K175",
                "error",
                name,
                "d2t holds absolute ids; engines read offsets, and would take each row but the first for another token",
                "Rewrite it: kconv vocab HEAD --absolute OUT.",
                TensorValue,
            )
        ]
    if kind == NEITHER:
        return check_d2t(spec, d2t, name)
    if reading.marked_otherwise:
        return [
            Problem(
                "K178",
                "error",
                name,
                f"t2d and d2t disagree on {reading.marked_otherwise} tokens",
                "If d2t is right, rebuild t2d from it: kconv vocab HEAD --rebuild-t2d OUT.",
                TensorValue,
            )
        ]
    return []


def _wrong_rows(copies: Copies, name: str) -> Problem:
    return Problem(
        "K175",
        "error",
        name,
        f"{copies.by_id} of {copies.rows} rows of lm_head are the target's rows d2t[i], and only {copies.by_offset} "
        "its rows i + d2t[i]: they were taken by offset instead of by token id",
        "Prune the full head again, by token id: kconv vocab FULL --prune N --text FILE --target TARGET OUT.",
        TensorValue,
    )


def name_specials(spec: HeadSpec, specials: Mapping[int, str]) -> dict[int, str]:
    """Return names of the special tokens by id: the tokenizer's where it has one, else the key of the head's config."""
    eos = spec.tokens.eos if isinstance(spec.tokens.eos, tuple) else (spec.tokens.eos,)
    stated = [("bos", spec.tokens.bos), *(("eos", i) for i in eos), ("pad", spec.tokens.pad)]
    names = {i: f"{name} ({i})" for name, i in reversed(stated) if i is not None}
    return dict(sorted((names | {i: f"{name} ({i})" for i, name in specials.items()}).items()))


def _say_t2d(info: TensorInfo | None, t2d: Tensor | None, reading: Reading) -> str:
    if info is None:
        return "absent"
    if t2d is None:
        return f"unusable: {info.dtype} {list(info.shape)}"
    if reading.marked_otherwise is None:
        return "not comparable, as d2t leads outside the vocabulary"
    return "agrees" if reading.marked_otherwise == 0 else f"disagrees on {reading.marked_otherwise} tokens"


def _warn(kind: str, lost: list[str]) -> tuple[str, ...]:
    warnings = []
    if kind == IDENTITY:
        warnings.append("each row stands for the token of its own number: such a map was never filled, as a rule")
    if kind == EITHER:
        warnings.append("d2t could hold offsets or absolute ids; engines read offsets. --target compares the rows")
    if lost:
        warnings.append(f"{len(lost)} special token(s) can never be drafted: {', '.join(lost)}")
    return tuple(warnings)
